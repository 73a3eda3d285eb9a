"""Gradient health: skipped spikes and gradient norms of parameters."""

import math
from typing import Any

import pytest
import torch
from torch import nn

import mp_optim
from mp_optim import get_megatron_optimizer
from mp_optim.mixed_precision import MegatronOptimizer
from support.launch import results_of_ranks
from support.models import build, config_for, tokens_of
from support.waiting import no_waiting

needs_interpreter = pytest.mark.skipif(
    torch.cuda.is_available(), reason="a GPU has kernels of its own"
)


def build_one_param(**settings: Any) -> tuple[nn.Parameter, MegatronOptimizer]:
    fixed = {"skip_step_sigma_factor": 6.0, "skip_step_rolling_interval_length": 16}
    config = config_for("fp32", **{"clip_grad": 0.0, **fixed, **settings})
    model = nn.ParameterDict({"w": nn.Parameter(torch.ones(4))})
    return model["w"], get_megatron_optimizer(config, model)


def step(param: nn.Parameter, optimizer: MegatronOptimizer, norm: float) -> Any:
    if param.grad is None:
        param.grad = torch.zeros_like(param)
    param.grad.fill_(norm / 2.0)
    return optimizer.step()


def oracle(seen: list[float], sigma: float = 6.0) -> float:
    def median(values: list[float]) -> float:
        ordered, n = sorted(values), len(values)
        return (ordered[(n - 1) // 2] + ordered[n // 2]) / 2

    window = seen[-16:]
    if len(window) < 8:
        return math.inf
    middle = median(window)
    spread = 1.4826 * median([abs(value - middle) for value in window])
    return middle + sigma * max(spread, abs(middle) / 128)


def wave(number: int) -> float:
    return 1.0 + 0.25 * math.sin(1.7 * number)


def test_skip_limit_equals_the_formula_of_median_and_deviation_of_recent_norms():
    param, optimizer = build_one_param()
    norms: list[float] = []
    for number in range(40):
        result = step(param, optimizer, wave(number))
        metrics = optimizer.metrics()
        assert metrics["skip_limit/grad_norm"] == oracle(norms), number
        norms.append(metrics["grad_norm"])
        assert result.success


def test_skip_rule_skips_a_norm_spike_only_after_half_a_window_of_norms():
    param, optimizer = build_one_param()
    for number in range(7):
        step(param, optimizer, wave(number))
    assert step(param, optimizer, 100.0).success  # The rule needs half a window of norms.
    result = step(param, optimizer, 100.0)
    assert not result.success
    assert "the gradient norm is 100, over" in result.reason
    assert "skip_step_sigma_factor=6" in result.reason
    metrics = optimizer.metrics()
    assert metrics["skipped_steps/spike"] == 1 == metrics["skipped_steps"]
    assert metrics["skipped_steps/over_threshold"] == 0


def test_skip_rule_skips_one_step_when_only_the_loss_spikes():
    param, optimizer = build_one_param()
    for number in range(12):
        optimizer.health.report_loss(torch.tensor(2.0 + wave(number)))
        step(param, optimizer, wave(number))
    optimizer.health.report_loss(9.0)
    reason = step(param, optimizer, 1.0).reason
    assert "the loss is 9, over" in reason
    assert optimizer.metrics()["reported_loss"] == 9.0
    assert step(param, optimizer, 1.0).success  # A reported loss counts for one step.


def test_skip_rule_window_is_unchanged_after_an_overflow():
    param, optimizer = build_one_param()
    for number in range(12):
        step(param, optimizer, wave(number))
    before = optimizer.state_dict()["skip_step"]["window"].clone()
    with pytest.warns(UserWarning, match="inf or nan"):
        step(param, optimizer, math.inf)
    after = optimizer.state_dict()["skip_step"]["window"]
    assert torch.equal(after[0], before[0])
    metrics = optimizer.metrics()
    assert metrics["skipped_steps/not_finite"] == 1
    assert metrics["skipped_steps/spike"] == 0


NORMS = [wave(number) for number in range(20)] + [30.0, 1.0, math.inf, 40.0, 1.1, 0.9]
"""Gradient norms of a training run with spikes and an overflow."""


def train_with_spikes(monkeypatch: pytest.MonkeyPatch | None = None, **settings: Any) -> Any:
    param, optimizer = build_one_param(log_param_grad_norms=1, **settings)
    results = []
    for number, norm in enumerate(NORMS):
        loss = torch.tensor(5.0 if number == 24 else wave(3 * number))
        if monkeypatch is None or not number:  # The first step copies index tensors to the device.
            optimizer.health.report_loss(loss)
            results.append(step(param, optimizer, norm))
            continue
        with no_waiting(monkeypatch, optimizer):
            optimizer.health.report_loss(loss)
            results.append(step(param, optimizer, norm))
    metrics = optimizer.metrics()
    names = [name for name in metrics if "skip" in name or "norm" in name]
    window = optimizer.state_dict()["skip_step"]["window"]
    reasons = [result.reason for result in results]
    return reasons, {name: metrics[name] for name in names}, window, param.detach()


def assert_same(found: Any, expected: Any) -> None:
    assert found[:2] == expected[:2]
    assert torch.equal(found[2].nan_to_num(-1.0), expected[2].nan_to_num(-1.0))
    assert torch.equal(found[3], expected[3])


@needs_interpreter
@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::RuntimeWarning")
def test_skip_rule_on_device_decides_like_host_without_synchronizing(monkeypatch):
    host = train_with_spikes(fused_backend="reference")
    assert [bool(reason) for reason in host[0]].count(True) == 4
    assert_same(train_with_spikes(monkeypatch, fused_backend="triton"), host)


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_skip_rule_decides_identically_after_resume(tmp_path):
    param, optimizer = build_one_param()
    for number in range(20):
        optimizer.health.report_loss(wave(3 * number))
        step(param, optimizer, wave(number))
    module = nn.ParameterDict({"w": param})
    mp_optim.checkpoint.save(tmp_path, module, optimizer)
    again, resumed = build_one_param()
    mp_optim.checkpoint.load(tmp_path, nn.ParameterDict({"w": again}), resumed)
    for norm in (1.2, 1.8, 30.0, 1.0):
        assert step(again, resumed, norm).reason == step(param, optimizer, norm).reason
    assert resumed.metrics()["skipped_steps/spike"] > 0
    limits = [o.metrics()["skip_limit/grad_norm"] for o in (optimizer, resumed)]
    assert limits[0] == limits[1]


@pytest.mark.parametrize("precision", ["bf16", "fp16", "fp32"])
@pytest.mark.parametrize("fraction", [0.0, 0.5])
def test_param_grad_norms_equal_torch_norms_in_each_precision(precision, fraction):
    model, optimizer = build(precision, fraction, log_param_grad_norms=3)
    for number in range(2):
        optimizer.zero_grad()
        optimizer.scale_loss(model(tokens_of(number))).backward()
        model.bias.grad = None
        scale = float(optimizer.get_loss_scale())
        optimizer.step()
    norms = optimizer.health.grad_norms()
    assert list(norms.values()) == sorted(norms.values(), reverse=True)
    for name, param in model.named_parameters():
        grad = torch.zeros(1) if param.grad is None else param.grad
        norm = torch.linalg.vector_norm(grad.double()).item() / scale
        assert norms[name] == pytest.approx(norm, rel=1e-13), name
    metrics = optimizer.metrics()
    shown = [name for name in metrics if name.startswith("param_grad_norm/")]
    assert shown == [f"param_grad_norm/{name}" for name in list(norms)[:3]]
    total = math.sqrt(sum(norm * norm for norm in norms.values()))
    assert total == pytest.approx(metrics["grad_norm"], rel=1e-13)


def test_skip_warning_names_parameters_with_largest_gradient_norms(caplog):
    model, optimizer = build("fp32", log_param_grad_norms=1, grad_norm_skip_threshold=50.0)
    for param in model.parameters():
        param.grad = torch.full_like(param, 0.01)
    model.dense.grad.fill_(100.0)
    optimizer.step()
    assert "; largest gradient norms: dense 800, " in caplog.text


def test_skip_rule_decides_identically_on_all_ranks_in_each_layout(tmp_path):
    """The tolerance is needed because layouts add FP32 gradients in different orders."""
    first, second = results_of_ranks("gradient_health", 2, tmp_path)
    assert first == second
    whole, parts = first.pop("whole"), first.pop("tensor parallel")
    assert parts["norms"] == pytest.approx({"weight": math.sqrt(15.0), "bias": 4.0})
    assert whole["taken"].count(False) == 2
    for layout, found in first.items():
        assert found["taken"] == whole["taken"], layout
        assert found["norms"] == pytest.approx(whole["norms"], rel=1e-5), layout
