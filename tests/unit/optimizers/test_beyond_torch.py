"""Placement, checkpoints and descriptions of the torch-shaped classes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

import mp_optim
from mp_optim import checkpoint
from mp_optim.apps.convert import from_torch, import_state


def model() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(8, 24), nn.Linear(24, 3)).bfloat16()


def step(layers: nn.Module, optimizer: torch.optim.Optimizer, count: int = 1) -> None:
    for _ in range(count):
        optimizer.zero_grad()
        layers(torch.ones(4, 8, dtype=torch.bfloat16)).float().square().sum().backward()
        optimizer.step()


def test_checkpoint_under_other_settings(tmp_path: Path) -> None:
    """Placement and mode may be others than those of the run that saved."""
    first = model()
    optimizer = mp_optim.AdamW(first.named_parameters(), lr=1e-2)
    step(first, optimizer, 3)
    checkpoint.save(tmp_path, first, optimizer)
    second = model()
    other = mp_optim.AdamW(
        second.named_parameters(), lr=1.0, offload=1.0, offload_mode="speculative"
    )
    checkpoint.load(tmp_path, second, other)
    assert other.param_groups[0]["lr"] == 1e-2
    step(first, optimizer, 3)
    step(second, other, 3)
    assert all(map(torch.equal, first.parameters(), second.parameters()))


def test_state_of_torchs_adamw_goes_on_under_ours() -> None:
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
