#!/usr/bin/env python
"""Weights as float8 with a scale for each row, FP32 main params: python
tools/examples/float8_weights.py"""

from __future__ import annotations

import torch
from torch import nn

from mp_optim import OptimizerConfig, get_megatron_optimizer
from mp_optim.apps.float8 import quantize_weights


def main(steps: int = 60) -> list[float]:
    """Fit a random teacher; returns the losses."""
    device = torch.accelerator.current_accelerator() or torch.device("cpu")
    torch.manual_seed(0)
    teacher = nn.Linear(16, 4).to(device)
    model = nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 4)).to(device, torch.bfloat16)
    quantize_weights(model, torch.float8_e4m3fn, rowwise=True)
    optimizer = get_megatron_optimizer(
        OptimizerConfig(
            lr=1e-2, bf16=True, optimizer_cpu_offload=True, optimizer_offload_fraction=0.5
        ),
        model,
    )
    losses = []
    for _ in range(steps):
        inputs = torch.randn(64, 16, device=device)
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(inputs.bfloat16()).float(), teacher(inputs).detach())
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


if __name__ == "__main__":
    losses = main()
    print(f"loss {losses[0]:.4f} -> {losses[-1]:.4f}")
