"""The step calls every observer of a table and works without any of them."""

import math
from typing import Any

import pytest
import torch
from torch import nn

from mp_optim import MegatronOptimizer, OptimizerConfig, get_megatron_optimizer
from mp_optim.mixed_precision.observer import Observer
from mp_optim.monitor import OBSERVERS

STEPS, SKIPPED = 4, 2


def trained() -> tuple[MegatronOptimizer, list[torch.Tensor]]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 2)).bfloat16()
    config = OptimizerConfig(lr=0.1, bf16=True, skip_step_sigma_factor=50.0, clip_grad=1.0)
    optimizer = get_megatron_optimizer(config, model)
    for step in range(STEPS):
        optimizer.zero_grad()
        scale = math.inf if step == SKIPPED else 1.0
        (model(torch.ones(3, 4).bfloat16()).square().mean() * scale).backward()
        assert optimizer.step().success == (step != SKIPPED)
    return optimizer, [param.detach().clone() for param in model.parameters()]


@pytest.mark.filterwarnings("ignore:a step was skipped")
@pytest.mark.parametrize("missing", [*OBSERVERS, "all"])
def test_step_has_same_bits_when_an_observer_is_removed(missing, monkeypatch):
    whole, expected = trained()
    left = {name: kind for name, kind in OBSERVERS.items() if missing not in (name, "all")}
    monkeypatch.setattr(MegatronOptimizer, "observer_kinds", left)
    optimizer, weights = trained()
    assert all(map(torch.equal, weights, expected))
    own = {name: observer.metrics() for name, observer in whole.observers.items()}
    gone = {key for name in own.keys() - left.keys() for key in own[name]}
    assert optimizer.metrics().keys() == whole.metrics().keys() - gone
    optimizer.load_state_dict(optimizer.state_dict())
    assert ("skip_step" in optimizer.state_dict()) == ("skip_rule" in left)


@pytest.mark.filterwarnings("ignore:a step was skipped")
def test_observer_is_called_before_and_after_each_step_when_registered(monkeypatch):
    class Recorder(Observer):
        def __init__(self, stack: MegatronOptimizer) -> None:
            super().__init__(stack)
            self.seen: list[Any] = []

        def before_step(self) -> None:
            self.seen.append(self.stack.counts.steps)

        def after_step(self, grads: Any, verdict: Any) -> None:
            self.seen.append((grads.has_any, verdict.cause))

    monkeypatch.setattr(MegatronOptimizer, "observer_kinds", {**OBSERVERS, "recorder": Recorder})
    optimizer, _ = trained()
    taken = (True, "")
    skipped = (True, "not_finite")
    expected = [0, taken, 1, taken, 2, skipped, 3, taken]
    assert optimizer.observers["recorder"].seen == expected
