"""Every rule finds the minimum of a known function with compact state."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import mp_optim

RULES: dict[str, dict[str, Any]] = {
    "Adam": {"lr": 0.05},
    "AdamW": {"lr": 0.05, "weight_decay": 0.0},
    "LAMB": {"lr": 0.03, "weight_decay": 0.0},
    "Lion": {"lr": 0.03, "weight_decay": 0.0},
    "SGD": {"lr": 0.02, "momentum": 0.9},
    "Muon": {"lr": 0.3, "weight_decay": 0.0},
}
FORMS: dict[str, dict[str, Any]] = {
    "bf16": {"state": "bf16"},
    "8-bit moments, remainder8": {"state": "8bit", "main_params": "remainder8"},
}


def bowl(x: Tensor) -> Tensor:
    curvature = torch.linspace(0.1, 1.0, x.numel()).view(x.shape)
    return (curvature * (x - 1).square()).sum()


def valley(x: Tensor) -> Tensor:
    left, right = x[:, 0::2], x[:, 1::2]
    return (5 * (right - left.square()).square() + (1 - left).square()).sum()


@pytest.mark.parametrize(("form", "function"), [("bf16", bowl), ([*FORMS][1], valley)])
@pytest.mark.parametrize("rule", RULES)
def test_rules_converge_when_state_is_compact(rule, form, function):
    torch.manual_seed(0)
    param = nn.Parameter((0.5 * torch.randn(16, 16)).bfloat16())
    settings = {**RULES[rule], **FORMS[form]}
    optimizer = getattr(mp_optim, rule)([param], **settings)
    start, steps = function(param.detach().float()).item(), 200
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = RULES[rule]["lr"] * (1 - step / steps)
        optimizer.zero_grad()
        function(param.float()).backward()
        optimizer.step()
    assert function(param.detach().float()).item() < 0.06 * start
