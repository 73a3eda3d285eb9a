"""A skipped step has a log line, a reason, and a metric for each cause."""

import logging
import math
import warnings
from typing import Any

import pytest
import torch
from torch import nn

from mp_optim import StepResult, get_megatron_optimizer
from mp_optim.mixed_precision import MegatronOptimizer
from support.models import config_for
from support.waiting import no_waiting

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

THRESHOLD = {"grad_norm_skip_threshold": 10.0}
needs_interpreter = pytest.mark.skipif(
    torch.cuda.is_available(), reason="a GPU has kernels of its own"
)


def small(precision: str = "bf16", **settings: Any) -> tuple[nn.Module, MegatronOptimizer]:
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
    model = nn.ParameterDict(
        {
            "main": nn.Parameter(torch.ones(300).to(dtype[precision])),
            "mtp": nn.Parameter(torch.ones(40).to(dtype[precision])),
        }
    )
    model["mtp"].grad_norm_group = "mtp"
    for param in model.values():
        param.grad = torch.zeros_like(param)
    config = config_for(precision, **settings)
    return model, get_megatron_optimizer(config, model, config_overrides={})


def step(
    model: nn.Module, optimizer: MegatronOptimizer, norm: float = 1.0, **bad: float
) -> StepResult:
    scale = float(optimizer.get_loss_scale())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        for name, param in model.items():
            param.grad.fill_(scale * norm / math.sqrt(param.numel()))
            if name in bad:
                param.grad[3] = bad[name]
        result: StepResult = optimizer.step()
    return result


def logged_lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    records = [r for r in caplog.records if r.name.startswith("mp_optim.monitor")]
    return [record.getMessage() for record in records]


@pytest.mark.parametrize(
    ("bad", "groups"),
    [
        ({"mtp": math.nan}, "mtp"),
        ({"main": math.inf}, "main"),
        ({"main": math.inf, "mtp": math.nan}, "main, mtp"),
    ],
)
def test_skip_reason_names_norm_group_when_a_gradient_is_not_finite(bad, groups, caplog):
    model, optimizer = small("fp16", hysteresis=2)
    reason = f"the gradients of norm group {groups} hold an inf or nan"
    assert step(model, optimizer).reason == ""
    assert step(model, optimizer, **bad).reason == reason
    assert step(model, optimizer, **bad).reason == reason
    assert logged_lines(caplog) == [
        f"step 2 was skipped: {reason}; loss scale 4096",
        f"step 3 was skipped: {reason}; loss scale 4096",
    ]
    assert {record.levelno for record in caplog.records} == {logging.WARNING}


def test_skip_reason_prints_norm_and_threshold_when_norm_is_too_large(caplog):
    model, optimizer = small("fp16", loss_scale_window=2, **THRESHOLD)
    step(model, optimizer)
    result = step(model, optimizer, norm=20.0)
    assert result.reason.startswith("the gradient norm is ")
    assert result.reason.endswith(", over grad_norm_skip_threshold=10")
    assert not result.success and f"{result.grad_norm:g}" in result.reason
    line = f"step 2 was skipped: {result.reason}; loss scale 4096"
    assert logged_lines(caplog) == [line]


def test_metrics_count_skipped_steps_by_cause():
    model, optimizer = small("fp16", **THRESHOLD)
    steps = [{}, {"norm": 20.0}, {"mtp": math.nan}, {"norm": 30.0}, {}]
    for given in steps:
        step(model, optimizer, **given)
    metrics = optimizer.metrics()
    assert metrics["steps"] == 5 and metrics["skipped_steps"] == 3
    assert metrics["skipped_steps/not_finite"] == 1
    assert metrics["skipped_steps/over_threshold"] == 2


@needs_interpreter
def test_skip_warning_is_logged_in_the_next_step_when_the_device_decides(caplog, monkeypatch):
    model, optimizer = small("fp16", fused_backend="triton")
    step(model, optimizer)
    for param in model.values():
        param.grad.fill_(math.inf)
    optimizer.scale_loss(torch.ones(()))
    with no_waiting(monkeypatch, optimizer):
        result = optimizer.step()
        assert not result.is_known and logged_lines(caplog) == []
        optimizer.scale_loss(torch.ones(()))
        optimizer.step()  # This step settles the decision of the step before.
        (line,) = logged_lines(caplog)
    assert line == f"step 2 was skipped: {result.reason}; loss scale 4096"
    later = step(model, optimizer, main=math.inf)
    # The log line must not read the present scale of the device.
    optimizer.grad_scaler.scale.fill_(3.0)
    assert len(logged_lines(caplog)) == 2 and later.reason
    assert logged_lines(caplog)[2].startswith("step 4 was skipped")
    assert logged_lines(caplog)[2].endswith("; loss scale 2048")
