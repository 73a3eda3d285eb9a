"""The decision on the device (clip, step or skip) has the host's bits without a synchronization."""

import math
import pickle
import struct
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from mp_optim import (
    FusedAdam,
    HybridDeviceOptimizer,
    OptimizerConfig,
    StepResult,
    get_megatron_optimizer,
)
from mp_optim.core import Slot
from mp_optim.mixed_precision import MegatronOptimizer
from mp_optim.mixed_precision import clip_and_skip as verdicts
from mp_optim.mixed_precision.clip_and_skip import decide, decide_on_device
from mp_optim.mixed_precision.grad_norm import (
    EXCLUDED,
    MAIN_NORM,
    Measurement,
    NormKey,
    agree,
    count_zeros,
)
from support.kernel_launches import KernelLaunches
from support.models import build, config_for, same_bits, tokens_of, train
from support.waiting import WaitedError, no_waiting

pytestmark = [
    pytest.mark.skipif(torch.cuda.is_available(), reason="the tests marked gpu do this on the GPU"),
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),
]  # numpy warns of overflow and NaN in Triton's interpreter.

ODD = [0.0, 5e-324, 1e-310, 1e-160, 1e-12, 1.0, 1e300, 1.7976931348623157e308, math.inf, math.nan]
squares = st.one_of(st.sampled_from(ODD), st.floats(0, 1e6), st.floats(0))
scales = st.one_of(
    st.none(), st.sampled_from([1.0, 3.0, 2.0**-20, 2.0**126, 1e-45]), st.floats(1e-6, 1e12)
)


def bits(value: Any) -> Any:
    return (
        struct.pack("d", value)
        if isinstance(value, float) and not math.isnan(value)
        else str(value)
    )


@settings(max_examples=200, deadline=None)
@given(
    st.lists(squares, min_size=2, max_size=4),
    scales,
    st.sampled_from([0.0, 1e-3, 1.0, 5.0, 1e300]),
    st.sampled_from([math.inf, 1e-3, 1.0, 1e10]),
    st.one_of(st.none(), st.integers(0, 2**40)),
)
def test_decision_on_the_device_has_the_bits_of_a_host_decision_for_any_gradient_sums(
    sums, scale, clip, threshold, zeros
):
    names = [EXCLUDED, MAIN_NORM, "mtp", "other"][: len(sums)]
    measurement = Measurement(
        dict(zip(names, torch.tensor(sums, dtype=torch.float64), strict=True)),
        None if zeros is None else torch.tensor(float(zeros), dtype=torch.float64),
    )
    scaling = (
        [] if scale is None else [torch.tensor([scale], dtype=torch.float32).double().reciprocal()]
    )
    config = OptimizerConfig(lr=1.0, clip_grad=clip, grad_norm_skip_threshold=threshold)
    host = decide(measurement, scaling, config)
    device = decide_on_device(measurement, scaling, config)
    found = device.wait()
    for mine, theirs in ((found.multipliers, host.multipliers), (found.norms, host.norms)):
        assert {name: bits(value) for name, value in mine.items()} == {
            n: bits(v) for n, v in theirs.items()
        }
    assert (found.cause, found.found_inf, found.num_zeros) == (
        host.cause,
        host.found_inf,
        host.num_zeros,
    )
    assert bool(device.found_inf) == host.found_inf and device.result.success == host.result.success
    for name, given_to_kernels in device.multipliers.items():
        multiplier, skip = given_to_kernels.values.tolist()
        assert given_to_kernels.values.dtype == torch.float32 and bool(skip) == bool(host.cause)
        assert host.found_inf or bits(multiplier) == bits(host.multipliers[name])


def small(precision: str = "bf16", **settings: Any) -> tuple[nn.Module, MegatronOptimizer]:
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}[
        precision.split("-")[0]
    ]
    values = torch.linspace(-1, 1, 300)

    def copied(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(dtype, copy=True)

    model = nn.ParameterDict(
        {
            "whole": nn.Parameter(copied(values)),
            "transposed": nn.Parameter(copied(values.reshape(20, 15)).t()),
            "empty": nn.Parameter(torch.empty(0, dtype=dtype)),
            "shared": nn.Parameter(copied(values[:7])),
            "mtp": nn.Parameter(copied(values[:40].reshape(5, 8))),
        }
    )
    model["shared"].shared = True
    model["mtp"].grad_norm_group = "mtp"
    config = config_for(precision, fused_backend="triton", **settings)
    return model, get_megatron_optimizer(config, model, config_overrides={})


def give_grads(
    model: nn.Module, optimizer: MegatronOptimizer, step: int, bad: float | None = None
) -> None:
    generator = torch.Generator().manual_seed(step)
    scale = float(optimizer.get_loss_scale())
    for param in model.values():
        param.grad = (torch.randn(param.shape, generator=generator) * 0.05 * scale).to(param.dtype)
    if bad is not None:
        model["transposed"].grad[3, 2] = bad


WATCHED: dict[str, Any] = {
    "log_num_zeros_in_grad": True,
    "skip_step_sigma_factor": 6.0,
    "log_param_grad_norms": 2,
}
"""Settings that turn on every observer of a step."""


@pytest.mark.parametrize(
    ("precision", "rule"), [("fp16", "adam"), ("bf16", "lamb"), ("bf16-remainder", "sgd")]
)
def test_triton_step_does_not_synchronize_when_all_observers_are_on(precision, rule, monkeypatch):
    model, optimizer = small(precision, optimizer=rule, **WATCHED)
    # These steps build kernel tables and prove the kernels of first and later steps.
    for seed in (8, 9):
        give_grads(model, optimizer, seed)
        optimizer.step()
    for step in range(3):
        give_grads(model, optimizer, step, math.inf if step == 1 else None)
        with no_waiting(monkeypatch, optimizer):
            optimizer.health.report_loss(torch.ones(()))
            result = optimizer.step()
            assert not result.is_known
            optimizer.zero_grad()
            optimizer.scale_loss(torch.ones(()))
    assert optimizer.metrics()["steps"] == 5 and optimizer.metrics()["skipped_steps"] == 1


def test_chained_step_does_not_synchronize_when_kernels_are_triton(monkeypatch):
    model, optimizer = build("fp16", fused_backend="triton")
    train(model, optimizer, 1)
    for step in range(2):
        optimizer.zero_grad()
        optimizer.scale_loss(model(tokens_of(step))).backward()
        with no_waiting(monkeypatch, optimizer):
            result = optimizer.step()
        assert result.success


def test_sync_guard_raises_when_a_step_or_its_result_synchronizes(monkeypatch):
    model, optimizer = small()
    give_grads(model, optimizer, 0)
    optimizer.step()  # The first step builds kernel tables.
    give_grads(model, optimizer, 1)
    with no_waiting(monkeypatch, optimizer):
        result = optimizer.step()
        with pytest.raises(WaitedError, match="very step"):
            _ = result.grad_norm
    on_host, host = small()
    monkeypatch.setattr(type(host.executor), "verdict_device", lambda self: None)
    give_grads(on_host, host, 0)
    host.step()
    give_grads(on_host, host, 1)
    with pytest.raises(WaitedError, match="cpu of"), no_waiting(monkeypatch, host):
        host.step()


def seven_steps(
    caplog: pytest.LogCaptureFixture, precision: str, reads: bool, **settings: Any
) -> dict[str, Any]:
    caplog.clear()
    model, optimizer = small(
        precision, log_num_zeros_in_grad=True, grad_norm_skip_threshold=10.0, **settings
    )
    results, scales = [], []
    for step in range(7):
        give_grads(model, optimizer, step, {0: math.inf, 3: math.nan, 6: math.inf}.get(step))
        if step == 5:
            model["transposed"].grad.fill_(float(optimizer.get_loss_scale()) * 4)
        optimizer.param_groups[0]["lr"] = 0.01 / (1 + step)
        result = optimizer.step()
        results.append(result)
        assert not reads or len(tuple(result)) == 3
        scales.append(float(optimizer.get_loss_scale()))
    state = optimizer.state_dict(full_precision=True)["state"]
    return {
        "results": [tuple(result) for result in results],
        "scales": scales,
        "metrics": optimizer.metrics(),
        "reasons": [result.reason for result in results],
        "logged": [record.getMessage() for record in caplog.records],
        "state": {f"{i}.{k}": v.clone() for i, s in state.items() for k, v in s.items()},
        "params": {name: p.detach().clone() for name, p in model.items()},
    }


@pytest.mark.parametrize(
    ("precision", "settings"),
    [
        ("fp16", {"hysteresis": 1, "loss_scale_window": 2}),
        ("fp32", {"optimizer": "lamb", "clip_grad": 0.0}),
        ("bf16-stochastic", {}),
    ],
)
def test_training_has_host_bits_when_the_device_decides_whether_to_skip_each_step(
    precision, settings, monkeypatch, caplog
):
    device = seven_steps(caplog, precision, False, **settings)
    looked = seven_steps(caplog, precision, True, **settings) if precision == "fp16" else device
    assert any(device["reasons"]) and device["logged"]
    monkeypatch.setattr(
        "mp_optim.rules.rule_executor.RuleExecutor.verdict_device", lambda self: None
    )
    host = seven_steps(caplog, precision, True, **settings)
    for found in (device, looked):
        for what in ("results", "scales", "metrics", "reasons", "logged"):
            assert repr(found[what]) == repr(host[what]), what
        for what in ("state", "params"):
            assert found[what].keys() == host[what].keys()
            for name, value in host[what].items():
                assert same_bits(found[what][name], value), name


@pytest.mark.parametrize(
    "look",
    [
        lambda o: o.state_dict(),
        lambda o: o.state[o.param_groups[0]["params"][0]],
        lambda o: o.init_state(),
        lambda o: o.optimizer.slot_state(Slot(0, 0)),
        lambda o: o.optimizer.state_dict(),
        lambda o: o.describe(),
        lambda o: o.slot_state(Slot(0, 0)),
        lambda o: o.load_state_dict(o.state_dict()),
        lambda o: o.full_slot_state(Slot(0, 0)),
        lambda o: o.optimizer.full_slot_state(Slot(0, 0)),
    ],
)
def test_reading_state_resets_step_counters_when_the_device_skipped_the_step(look):
    model, optimizer = small()
    give_grads(model, optimizer, 0)
    optimizer.step()
    states = optimizer.optimizer.state_dict()["state"].values()
    counters = [state["step"] for state in states]
    give_grads(model, optimizer, 1, math.nan)
    optimizer.step()
    assert counters[0] == 2  # The counter assumes that the step succeeds.
    look(optimizer)
    assert [float(counter) for counter in counters] == [1.0] * len(counters)
    assert optimizer.metrics()["skipped_steps"] == 1


def test_hybrid_optimizer_does_not_synchronize_when_nothing_is_offloaded(monkeypatch):
    params = {name: nn.Parameter(torch.ones(300)) for name in "ab"}
    inner = HybridDeviceOptimizer(
        list(params.items()),
        0.0,
        FusedAdam,
        FusedAdam,
        lr=0.1,
        sub_optimizer_kwargs={"backend": "triton"},
    )
    from mp_optim import FP32Optimizer

    optimizer = FP32Optimizer(inner, OptimizerConfig(lr=0.1, fused_backend="triton"))
    for number, grad in enumerate((1.0, 1.0, math.inf)):
        for param in params.values():
            param.grad = torch.full_like(param, grad)
        optimizer.state_dict()
        # The first step builds kernel tables.
        with no_waiting(monkeypatch, optimizer) if number else nullcontext():
            optimizer.step()
    assert [float(s["step"]) for s in inner.state_dict()["state"].values()] == [2.0, 2.0]


def test_step_result_is_a_tuple_whose_values_are_fetched_once_when_first_read():
    reads: list[int] = []
    result = StepResult.later(lambda: reads.append(1) or (True, 2.5, None, ""))
    assert len(result) == 3 and not reads and not result.is_known
    success, norm, zeros = result
    assert (success, norm, zeros) == (True, 2.5, None) and reads == [1]
    assert result == (True, 2.5, None)
    assert result == StepResult(True, 2.5, None)
    assert result != (False, 2.5, None)
    assert result != 5 and hash(result) == hash((True, 2.5, None)) and len(reads) == 1
    assert result[1] == result[-2] == 2.5
    assert result[:2] == (True, 2.5)
    assert list(result) == [True, 2.5, None]
    assert repr(result) == "StepResult(success=True, grad_norm=2.5, num_zeros_in_grad=None)"
    copy = pickle.loads(pickle.dumps(StepResult.later(lambda: (False, None, 3, ""))))
    assert copy == (False, None, 3) and isinstance(copy, StepResult) and copy.num_zeros_in_grad == 3
    with pytest.raises(AttributeError):
        result.success = False
    with pytest.raises(AttributeError):
        del result.success


@pytest.mark.parametrize("scaled", [False, True])
def test_device_decision_launches_at_most_25_kernels(scaled):
    key, sums = NormKey(), torch.ones((), dtype=torch.float64)
    scaling = [torch.full((1,), 0.5, dtype=torch.float64)] if scaled else []
    config = config_for("fp16" if scaled else "bf16")
    with KernelLaunches() as launches:
        measurement = agree({key: sums}, None, None, [EXCLUDED, MAIN_NORM])
        verdicts.decide_on_device(measurement, scaling, config)
    assert len(launches.names) <= (25 if scaled else 22), launches.names


def test_count_zeros_launches_at_most_17_kernels_for_20_gradients():
    key, other = NormKey(), NormKey(EXCLUDED)
    grads = [torch.eye(3).bfloat16() for _ in range(20)]
    keys = [key, other] * 10
    with KernelLaunches() as launches:
        zeros = count_zeros(grads, keys, [key, other], torch.device("cpu"))
    assert zeros[key] == 60.0
    assert zeros[other] == 0.0
    assert len(launches.names) <= 10 + 7, launches.names
