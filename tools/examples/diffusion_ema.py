#!/usr/bin/env python
"""A denoiser in bfloat16 whose averaged weights draw the samples: python
tools/examples/diffusion_ema.py

mp-optim fit --model tools/examples/diffusion_ema.py:build --gpu 24GB --ram 64GB
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import mp_optim

NOISES = 100


class Denoiser(nn.Module):
    """Says which noise is in points of a plane, at a level of noise."""

    def __init__(self, width: int = 128, depth: int = 3) -> None:
        super().__init__()
        inner = [nn.Linear(width, width) for _ in range(depth)]
        self.first, self.inner = nn.Linear(4, width), nn.ModuleList(inner)
        self.last = nn.Linear(width, 2)

    def forward(self, points: Tensor, levels: Tensor) -> Tensor:
        angles = levels[:, None] * (math.pi / 2)
        value = self.first(torch.cat([points, angles.sin(), angles.cos()], 1))
        for layer in self.inner:
            value = value + layer(nn.functional.silu(value))
        return self.last(value)


def loss_of(model: nn.Module, points: Tensor) -> Tensor:
    """How wrong the noise is that the model sees."""
    like: Any = {"dtype": points.dtype, "device": points.device}
    levels, noise = torch.rand(len(points), **like), torch.randn(points.shape, **like)
    keep, add = (levels * math.pi / 2).cos()[:, None], (levels * math.pi / 2).sin()[:, None]
    return nn.functional.mse_loss(model(keep * points + add * noise, levels).float(), noise.float())


def build() -> tuple[nn.Module, Callable[[nn.Module], Tensor]]:
    """For mp-optim fit: a model of another size, and its loss."""
    with torch.device("meta"):
        model = Denoiser(8192, 24).bfloat16()
    return model, lambda m: loss_of(m, torch.zeros(4096, 2, dtype=torch.bfloat16, device="cpu"))


@torch.no_grad()
def sample(model: nn.Module, count: int) -> Tensor:
    """Points, from noise (DDIM)."""
    weight = next(model.parameters())
    points = torch.randn(count, 2, dtype=weight.dtype, device=weight.device)
    for step in range(NOISES, 0, -1):
        now, then = (math.pi / 2 * min(at / NOISES, 0.99) for at in (step, step - 1))
        noise = model(points, torch.full_like(points[:, 0], now / (math.pi / 2)))
        whole = (points - math.sin(now) * noise) / math.cos(now)
        points = math.cos(then) * whole + math.sin(then) * noise
    return points.float()


def main(steps: int = 250) -> tuple[list[float], float]:
    """Learn a ring of radius 1; returns the losses, and how far samples are from the ring."""
    torch.manual_seed(0)
    device = torch.accelerator.current_accelerator() or torch.device("cpu")
    model = Denoiser().to(device, torch.bfloat16)
    optimizer = mp_optim.AdamW(
        model.parameters(), lr=2e-3, max_grad_norm=1.0, offload=0.5, ema_decay=0.98
    )
    losses = []
    for _ in range(steps):
        around = torch.rand(512, device=device) * (2 * math.pi)
        ring = torch.stack([around.cos(), around.sin()], 1).bfloat16()
        loss = loss_of(model, ring)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    with optimizer.averaged_weights():
        radius = sample(model, 512).norm(dim=1)
    return losses, (radius - 1).abs().mean().item()


if __name__ == "__main__":
    losses, distance = main()
    print(f"loss {losses[0]:.4f} -> {losses[-1]:.4f}, samples are {distance:.3f} from the ring")
