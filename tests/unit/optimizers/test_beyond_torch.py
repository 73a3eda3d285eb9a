"""Optimizer classes continue from state of torch's classes."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import mp_optim
from mp_optim.apps.convert import from_torch, import_state


def model() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(8, 24), nn.Linear(24, 3)).bfloat16()


def step(layers: nn.Module, optimizer: torch.optim.Optimizer, count: int = 1) -> None:
    for _ in range(count):
        optimizer.zero_grad()
        layers(torch.ones(4, 8, dtype=torch.bfloat16)).float().square().sum().backward()
        optimizer.step()


def test_adamw_continues_from_imported_torch_adamw_state() -> None:
    layers = model()
    before = torch.optim.AdamW(layers.parameters(), lr=1e-2)
    step(layers, before, 3)
    after = mp_optim.AdamW(layers.named_parameters(), lr=1e-2)
    with pytest.raises(ValueError, match=r"import_state\(optimizer, from_torch"):
        after.load_state_dict(before.state_dict())
    names = [name for name, _ in layers.named_parameters()]
    import_state(after, from_torch(before.state_dict(), names), main_from_model=True)
    assert float(after.state[layers[0].bias]["step"]) == 3.0
    step(layers, after)
    assert after.last_step.success
