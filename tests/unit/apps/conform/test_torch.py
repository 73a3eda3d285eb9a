"""torch's optimizers pass the conformance checks of level "must"."""

import warnings
from functools import partial
from typing import Any

import pytest
import torch

from mp_optim.apps.conform import Subject
from mp_optim.apps.conform.runner import FAILS, PASSES, outcome_of

SETTINGS: dict[str, tuple[dict[str, Any], ...]] = {
    "SGD": ({"lr": 0.1, "momentum": 0.9}, {"lr": 1.0}, {"momentum": 0.5, "nesterov": True}),
    "Adam": ({}, {"lr": 0.1, "amsgrad": True}, {"weight_decay": 0.1, "foreach": False}),
    "AdamW": ({}, {"lr": 0.1}, {"betas": (0.5, 0.9)}),
    "Adagrad": ({}, {"lr": 1.0}, {"lr_decay": 0.1}),
    "RMSprop": ({}, {"lr": 0.1}, {"momentum": 0.9, "centered": True}),
    "Adamax": ({}, {"lr": 0.1}, {"weight_decay": 0.1}),
    "RAdam": ({}, {"lr": 0.1}, {"decoupled_weight_decay": True, "weight_decay": 0.1}),
    "Adadelta": ({}, {"lr": 10.0}, {"rho": 0.5}),
}
"""Three settings of each torch optimizer. NAdam is left out because a load casts its product of
rates to the parameter's dtype, so bfloat16 training does not resume. ``fused=True`` is left out
because torch steps sliced parameters on a CPU as if they were contiguous."""


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        pytest.param(
            *(name, settings),
            marks=() if name == "SGD" else pytest.mark.slow,
            id=f"{name}-{settings}",
        )
        for name, three in SETTINGS.items()
        for settings in three
    ],
)
def test_conform_passes_torch_optimizers_at_level_must(name, settings):
    subject = Subject(f"torch.optim.{name}", settings)
    chosen = [c.name for c in subject.checks() if c.level == "must"]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = {each: outcome_of(each, subject.maker()) for each in chosen}
    assert len(found) > 30
    assert {each: why for each, (status, why) in found.items() if status == FAILS} == {}


class DecayInGradients(torch.optim.SGD):
    """A wrong SGD that adds weight decay to the caller's gradients in place."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None and group["weight_decay"]:
                    param.grad.add_(param.detach(), alpha=group["weight_decay"])
        return super().step(closure)


def test_conform_finds_weight_decay_written_into_gradients():
    for kind, status in ((DecayInGradients, FAILS), (torch.optim.SGD, PASSES)):
        assert outcome_of("gradients_are_left_alone", partial(kind, lr=0.1))[0] == status
