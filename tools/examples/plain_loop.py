#!/usr/bin/env python
"""A plain torch loop in bf16, half of the optimizer on the host: python
tools/examples/plain_loop.py"""

from __future__ import annotations

import torch
from torch import nn

from mp_optim import OptimizerConfig, get_megatron_optimizer


def main(steps: int = 60) -> list[float]:
    """Fit a random teacher; returns the losses."""
    torch.manual_seed(0)
    device = torch.accelerator.current_accelerator() or torch.device("cpu")
    teacher = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 4)).to(device)
    model = nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 4)).to(device, torch.bfloat16)
    optimizer = get_megatron_optimizer(
        OptimizerConfig(
            lr=1e-2, bf16=True, optimizer_cpu_offload=True, optimizer_offload_fraction=0.5
        ),
        model,
    )
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    losses = []
    for _ in range(steps):
        inputs = torch.randn(64, 16, device=device)
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(inputs.bfloat16()).float(), teacher(inputs).detach())
        optimizer.scale_loss(loss).backward()
        optimizer.step()
        scheduler.step()
        losses.append(loss.item())
    return losses


if __name__ == "__main__":
    losses = main()
    print(f"loss {losses[0]:.4f} -> {losses[-1]:.4f}")
