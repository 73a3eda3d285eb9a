#!/usr/bin/env python
"""A run in float16 that gets bad batches, and what the optimizer says of it: python
tools/examples/sick_run.py
"""

from __future__ import annotations

import torch
from torch import nn

import mp_optim
from mp_optim import OptimizerConfig

BAD = {150: 30.0, 151: 30.0, 180: float("inf")}
"""What the loss is multiplied with, by step."""


def main(steps: int = 200) -> dict[int, str]:
    """Train; returns the steps that were skipped, and why."""
    torch.manual_seed(0)
    teacher = nn.Linear(16, 4)
    model = nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 4)).half()
    config = OptimizerConfig(
        lr=3e-3,
        fp16=True,
        clip_grad=0.0,
        initial_loss_scale=2.0**21,
        loss_scale_window=1000,
        hysteresis=1,
        skip_step_sigma_factor=10.0,  # skip what is far above the median of the last 128 steps
        log_param_grad_norms=3,
    )
    optimizer = mp_optim.get_megatron_optimizer(config, model)
    skipped = {}
    for step in range(steps):
        inputs = torch.randn(64, 16, generator=torch.Generator().manual_seed(step))
        loss = nn.functional.mse_loss(model(inputs.half()).float(), teacher(inputs))
        optimizer.health.report_loss(loss)
        optimizer.scale_loss(loss * BAD.get(step, 1.0)).backward()
        result = optimizer.step()
        optimizer.zero_grad()
        if not result.success:
            skipped[step] = str(result.reason)
            print(f"step {step}: skipped, {result.reason}")
    for name, value in optimizer.metrics().items():
        print(f"{name:40} {value}")
    return skipped


if __name__ == "__main__":
    main()
