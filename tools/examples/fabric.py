#!/usr/bin/env python
"""Lightning Fabric with our optimizer: python tools/examples/fabric.py"""

from __future__ import annotations

import torch
from lightning_fabric import Fabric
from torch import nn

from mp_optim import OptimizerConfig, get_megatron_optimizer


def main(steps: int = 60) -> list[float]:
    """Fit a random teacher; returns the losses."""
    fabric = Fabric(devices=1, accelerator="auto", precision="bf16-true")
    fabric.seed_everything(0, verbose=False)
    teacher = nn.Linear(16, 4).to(fabric.device)
    model = nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 4)).bfloat16()
    optimizer = get_megatron_optimizer(OptimizerConfig(lr=1e-2, bf16=True, clip_grad=1.0), model)
    model, optimizer = fabric.setup(model, optimizer)
    losses = []
    for _ in range(steps):
        inputs = torch.randn(64, 16, device=fabric.device)
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(inputs).float(), teacher(inputs).detach())
        fabric.backward(loss)
        optimizer.step()
        losses.append(loss.item())
    return losses


if __name__ == "__main__":
    losses = main()
    print(f"loss {losses[0]:.4f} -> {losses[-1]:.4f}")
