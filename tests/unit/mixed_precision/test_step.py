"""A step skips, clips and unscales; it reads present settings and gradients."""

import gc
import math
import weakref

import pytest
import torch
from torch import nn

from mp_optim import DynamicGradScaler, FP32Optimizer, FusedAdam, get_megatron_optimizer
from mp_optim.core.interrupted_step import ParkedTensors
from support.models import build, config_for, same_bits, tokens_of, train
from support.offload import differing, snapshot


@pytest.mark.parametrize("bad", [math.inf, math.nan])
@pytest.mark.parametrize("fraction", [0.0, 0.5])
@pytest.mark.parametrize("precision", ["bf16", "fp16", "fp32"])
def test_step_changes_nothing_when_a_gradient_is_not_finite(precision, fraction, bad):
    model, optimizer = build(precision, fraction)
    train(model, optimizer, 3)
    before = snapshot(model, optimizer)
    optimizer.scale_loss(model(tokens_of(9))).backward()
    model.experts["up"].grad[0, 0, 0] = bad
    result = optimizer.step()
    assert result == (False, None, None)
    assert differing(before, snapshot(model, optimizer)) == []
    assert optimizer.metrics()["skipped_steps"] == 1


def test_step_divides_gradients_by_scale_of_backward_when_loss_scale_grows():
    def run(window):
        model, optimizer = build(
            "fp16", loss_scale_window=window, optimizer="sgd", sgd_momentum=0.0, clip_grad=0.0
        )
        norms, scales = [], []
        for step in range(3):
            optimizer.zero_grad()
            optimizer.scale_loss(model(tokens_of(step))).backward()
            norms.append(optimizer.step().grad_norm)
            scales.append(float(optimizer.get_loss_scale()))
        return norms, scales, [p.detach().clone() for p in model.parameters()]

    growing, constant = run(1), run(1000)
    assert growing[1] == [2.0**13, 2.0**14, 2.0**15] and constant[1] == [2.0**12] * 3
    assert growing[0] == pytest.approx(
        constant[0], rel=2e-3
    )  # FP16 rounds differently scaled gradients differently.
    for a, b in zip(growing[2], constant[2], strict=True):
        assert (a.float() - b.float()).abs().max() <= 2 * 2.0**-10 * b.float().abs().max()


def test_clip_uses_the_norm_of_each_norm_group():
    model = nn.ParameterDict({"a": nn.Parameter(torch.zeros(4)), "b": nn.Parameter(torch.zeros(4))})
    model["b"].grad_norm_group = "mtp"
    config = config_for("fp32", optimizer="sgd", sgd_momentum=0.0, lr=1.0, weight_decay=0.0)
    optimizer = get_megatron_optimizer(config, model)
    model["a"].grad, model["b"].grad = torch.full((4,), 0.25), torch.full((4,), 50.0)
    assert optimizer.step().grad_norm == pytest.approx(0.5)
    assert torch.equal(model["a"].detach(), torch.full((4,), -0.25))
    assert model["b"].detach().norm() == pytest.approx(1.0, rel=1e-5)
    assert optimizer.metrics()["grad_norm/mtp"] == pytest.approx(100.0)


def test_grad_norm_excludes_shared_params_but_nan_in_a_shared_param_skips_the_step():
    model = nn.ParameterDict({"a": nn.Parameter(torch.zeros(1)), "b": nn.Parameter(torch.zeros(1))})
    model["b"].shared = True
    optimizer = get_megatron_optimizer(config_for("fp32"), model)
    model["a"].grad, model["b"].grad = torch.full((1,), 3.0), torch.full((1,), 4.0)
    assert optimizer.step().grad_norm == 3.0
    model["b"].grad.fill_(math.nan)
    assert not optimizer.step().success


@pytest.mark.parametrize("fraction", [0.0, 1.0])
def test_step_leaves_parameter_and_state_unchanged_without_a_gradient(fraction):
    model, optimizer = build("bf16", fraction)
    train(model, optimizer, 2)
    optimizer.zero_grad()
    model(tokens_of(3)).backward()
    model.dense.grad = None
    before = {k: v.clone() for k, v in optimizer.state[model.dense].items()}
    weights = model.dense.detach().clone()
    optimizer.step()
    assert same_bits(model.dense.detach(), weights)
    for key, value in optimizer.state[model.dense].items():
        assert same_bits(value, before[key])
    assert optimizer.state[model.bias]["step"] == 3 and optimizer.state[model.dense]["step"] == 2


def test_step_reads_gradient_from_main_grad_decoupled_grad_or_grad():
    results = []
    for attribute in ("main_grad", "decoupled_grad", "grad"):
        param = nn.Parameter(torch.ones(3, dtype=torch.bfloat16))
        optimizer = get_megatron_optimizer(config_for("bf16"), nn.ParameterDict({"w": param}))
        if attribute == "grad":
            param.grad_dtype = torch.float32
        setattr(param, attribute, torch.tensor([0.1, 0.2, 0.3]))
        assert optimizer.step().success
        results.append(next(iter(dict(optimizer.named_main_params()).values())).clone())
    assert same_bits(results[0], results[1]) and same_bits(results[0], results[2])


def test_step_uses_learning_rate_and_decay_changed_in_param_groups():
    model, optimizer = build("bf16", 0.5)
    train(model, optimizer, 1)
    for group in optimizer.param_groups:
        group["lr"], group["weight_decay"] = 0.0, 0.0
    before = [p.detach().clone() for p in model.parameters()]
    train(model, optimizer, 1, start=1)
    assert all(same_bits(a, b.detach()) for a, b in zip(before, model.parameters(), strict=True))


def test_dynamic_scaler_grows_and_backs_off_within_its_limits():
    scaler = DynamicGradScaler(2.0**4, 1.0, 2.0, 0.5, growth_interval=2, hysteresis=2)
    seen = []
    for inf in (True, False, True, True, True, False, False, False, False):
        scaler.update(inf)
        seen.append(float(scaler.scale))
    assert seen == [16, 16, 16, 8, 4, 4, 8, 8, 16]
    scaler = DynamicGradScaler(2.0**125, 1.0, 2.0, 0.5, 1, 1)
    for _ in range(5):
        scaler.update(False)
    assert float(scaler.scale) == 2.0**126 and float(scaler.inv_scale) > 0
    other = DynamicGradScaler(4.0, 1.0, 2.0, 0.5, 1, 1)
    other.load_state_dict(scaler.state_dict())
    assert other.scale == scaler.scale


@pytest.mark.parametrize(
    "argument, value",
    [
        ("growth_interval", 1.5),
        ("hysteresis", 0),
        ("min_scale", 99.0),
        ("backoff_factor", 1.0),
        ("growth_factor", 1.0),
    ],
)
def test_dynamic_scaler_names_the_argument_when_its_value_is_invalid(argument, value):
    good = {
        "initial_scale": 16.0,
        "min_scale": 1.0,
        "growth_factor": 2.0,
        "backoff_factor": 0.5,
        "growth_interval": 2,
        "hysteresis": 2,
    }
    with pytest.raises(ValueError, match=argument):
        DynamicGradScaler(**{**good, argument: value})


def test_optimizer_names_parameter_or_flag_when_model_dtype_is_wrong():
    with pytest.raises(TypeError, match=r"weight is torch\.bfloat16.*bf16=True"):
        FP32Optimizer(
            FusedAdam(list(nn.Linear(2, 2).bfloat16().named_parameters())), config_for("fp32")
        )
    with pytest.raises(ValueError, match="set bf16 or fp16"):
        get_megatron_optimizer(config_for("fp16"), nn.Linear(2, 2).bfloat16())


def test_step_names_the_parameter_when_its_gradient_is_sparse():
    model = nn.Embedding(4, 2, sparse=True)
    optimizer = get_megatron_optimizer(config_for("fp32"), model)
    model(torch.tensor([1])).sum().backward()
    with pytest.raises(TypeError, match="weight: gradient"):
        optimizer.step()


@pytest.mark.parametrize(("backend", "fraction"), [("auto", 0.5), ("triton", 0.0)])
def test_step_gives_equal_bits_after_offload_to_cpu_and_restore_from_cpu(
    backend, fraction, monkeypatch
):
    def state(optimizer):
        return [
            v for s in optimizer.state_dict()["state"].values() for k, v in s.items() if k != "step"
        ]

    def run(moves):
        model = nn.ParameterDict(
            {name: nn.Parameter(torch.ones(7, dtype=torch.bfloat16)) for name in "ab"}
        )
        optimizer = get_megatron_optimizer(
            config_for("bf16", fraction, fused_backend=backend), model
        )

        moved = []

        def park(self, tensors):
            moved[:] = state(optimizer)
            for tensor in moved:
                tensor.data = tensor.data.clone()

        monkeypatch.setattr(ParkedTensors, "park", park)
        for step in range(4):
            for param in model.values():
                param.grad = torch.full_like(param, 0.1 + step)
            optimizer.step()
            if moves and step == 1:
                optimizer.offload_to_cpu()
                optimizer.restore_from_cpu()
        assert bool(moved) == moves
        return state(optimizer)

    assert all(map(same_bits, run(True), run(False)))


@pytest.mark.parametrize(
    ("fraction", "mode"), [(0.0, "sync"), (0.5, "sync"), (0.5, "overlap"), (0.5, "speculative")]
)
def test_gradients_are_freed_after_step_and_zero_grad(fraction, mode):
    model, optimizer = build("bf16", fraction, offload_mode=mode)
    gradients = []
    for step in range(4):
        optimizer.scale_loss(model(tokens_of(step))).backward()
        found = [p.grad for p in model.parameters() if p.grad is not None]
        gradients += [weakref.ref(grad) for grad in found]
        del found
        optimizer.step()
        optimizer.zero_grad()
    gc.collect()
    assert [gone() for gone in gradients] == [None] * len(gradients)


@pytest.mark.parametrize("was_on", [True, False])
def test_step_does_not_change_the_garbage_collector_setting(was_on):
    seen = []

    class Timer:
        def start(self, barrier):
            seen.append(gc.isenabled())

        def stop(self):
            seen.append(gc.isenabled())

    model, optimizer = build("bf16", 0.5, timers=lambda name, log_level: Timer())
    model(tokens_of(0)).backward()
    if not was_on:
        gc.disable()
    try:
        optimizer.step()
        assert gc.isenabled() == was_on and seen and set(seen) == {was_on}
    finally:
        gc.enable()
