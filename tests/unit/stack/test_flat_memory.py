"""The number of objects that an optimizer holds does not grow with its steps."""

import gc
from collections import Counter
from typing import Any

import pytest
import torch
from torch import nn

import mp_optim

WATCHED = {
    "audit_rate": 1.0,
    "ema_decay": 0.9,
    "max_grad_norm": 1.0,
    "log_param_grad_norms": 2,
    "skip_step_sigma_factor": 6.0,
    "skip_step_rolling_interval_length": 4,
}
PLACES: dict[str, dict[str, Any]] = {
    "device": {},
    "overlap": {"offload": 0.5, "offload_mode": "overlap"},
    "speculative": {"offload": 1.0, "offload_mode": "speculative"},
    "streamed": {"offload": 1.0, "offload_place": "streamed", "stream_window_bytes": 4096},
    "disk": {"offload": 1.0, "offload_mode": "overlap", "stream_window_bytes": 65536},
}


def objects_after(steps: int, optimizer: Any, model: nn.Module) -> Counter[str]:
    """Take steps, discard work and replace a parameter; return the number of objects by type."""
    for step in range(steps):
        inputs = torch.full((2, 24), 1.0 + step % 3).bfloat16()
        model(inputs).float().square().mean().backward()
        if step % 5 == 1:
            optimizer.stack.discard_backward_work()
        elif step % 5 == 3:
            model[0].bias = nn.Parameter(model[0].bias.detach().clone())
            optimizer.param_groups[0]["params"][1] = model[0].bias
        optimizer.step()
        optimizer.zero_grad()
        optimizer.metrics()
    gc.collect()
    return Counter(type(each).__name__ for each in gc.get_objects())


@pytest.mark.parametrize("place", PLACES)
def test_steps_keep_no_objects_when_every_monitor_is_on(place, tmp_path):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(24, 24), nn.Linear(24, 8)).bfloat16()
    named = [*model.named_parameters()]
    groups = [
        {"params": named[:2], "weight_decay": 0.1},
        {"params": named[2:], "weight_decay": 0.0},
    ]
    disk = {"optimizer_state_path": str(tmp_path)} if place == "disk" else {}
    optimizer = mp_optim.AdamW(groups, lr=1e-3, **PLACES[place], **WATCHED, **disk)
    optimizer.track_changes()
    first, second, third = (objects_after(steps, optimizer, model) for steps in (8, 20, 20))
    # An object that is made once grows the count in one span only.
    grown = {name: min(third[name] - second[name], second[name] - first[name]) for name in third}
    assert {name: more for name, more in grown.items() if more >= 20} == {}
