"""``metrics()`` reports planned and allocated bytes of host memory and warns of growth."""

import warnings
from typing import Any

import pytest
import torch
from torch import nn

import mp_optim
from support.models import config_for

SETTINGS: list[dict[str, Any]] = [
    {"offload": 1.0},
    {"offload": 0.5, "offload_mode": "overlap"},
    {"offload": 1.0, "offload_mode": "speculative"},
    {"offload_mode": "speculative", "offload": 1.0, "state": "8bit", "main_params": "remainder16"},
    {"offload": 1.0, "offload_place": "streamed", "ema_decay": 0.9},
]


def stepped(settings: dict[str, Any], steps: int = 3) -> tuple[nn.Module, torch.optim.Optimizer]:
    layers = (nn.Linear(120, 120, bias=False) for _ in range(8))
    model = nn.Sequential(*layers).bfloat16()
    optimizer = mp_optim.AdamW(model.parameters(), lr=1e-3, **settings)
    for _ in range(steps):
        torch.stack([param.float().square().sum() for param in model.parameters()]).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer


@pytest.mark.parametrize("settings", SETTINGS)
def test_metrics_show_equal_planned_and_resident_host_bytes_after_steps(settings):
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        _, optimizer = stepped(settings)
        metrics = optimizer.metrics()
    assert metrics["planned_host_bytes"] == metrics["resident_host_bytes"] > 0


def test_metrics_allocate_no_state_before_a_step():
    _, optimizer = stepped({"offload": 1.0, "offload_mode": "speculative"}, steps=0)
    metrics = optimizer.metrics()
    assert metrics["planned_host_bytes"] > 2 * metrics["resident_host_bytes"]


def test_metrics_warn_once_of_staging_when_gradients_are_wider_than_planned():
    layers = (nn.Linear(1000, 1000, bias=False) for _ in range(4))
    model = nn.Sequential(*layers).bfloat16()
    config = config_for("bf16", 1.0, offload_mode="overlap")
    optimizer = mp_optim.get_megatron_optimizer(config, model)
    for param in model.parameters():
        param.main_grad = torch.ones_like(param, dtype=torch.float32)
    optimizer.step()
    with pytest.warns(
        UserWarning, match="host memory of staging: .* planned .*gradients are wider"
    ):
        metrics = optimizer.metrics()
    assert metrics["resident_host_bytes"] > metrics["planned_host_bytes"]
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        optimizer.metrics()


def test_metrics_count_state_of_torchs_optimizer_when_a_part_is_offloaded():
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(4)))
    optimizer = mp_optim.HybridDeviceOptimizer(
        model.parameters(), 0.4, torch.optim.AdamW, torch.optim.AdamW, param_update_in_fp32=True
    )
    config = mp_optim.OptimizerConfig(lr=1e-3)
    wrapped = mp_optim.FP32Optimizer(optimizer, config)
    model(torch.randn(2, 64)).sum().backward()
    wrapped.step()
    elements = sum(param.numel() for param in model.parameters())
    assert 12 * 0.4 * elements <= wrapped.metrics()["resident_host_bytes"] < 12 * 0.6 * elements
