#!/usr/bin/env python
"""Images in channels_last, a compiled model, an average of its weights:
python tools/examples/vision_ema.py
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import mp_optim


def main(
    folder: str = "runs/vision", cls: Any = mp_optim.AdamW, resume: bool = False, **settings: Any
) -> list[float]:
    """Tell two textures apart for 60 steps; returns the losses."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 16, 3, stride=2), nn.GELU(), nn.Conv2d(16, 2, 3), nn.AdaptiveAvgPool2d(1)
    ).to(torch.bfloat16, memory_format=torch.channels_last)
    compiled = torch.compile(model, backend="aot_eager")
    optimizer = cls(compiled.parameters(), lr=3e-3, **settings)
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    parts = {"model": model, "average": average, "optimizer": optimizer}
    if resume:
        for name, state in torch.load(f"{folder}.pt", weights_only=True).items():
            parts[name].load_state_dict(state)
    losses = []
    for step in range(30 if resume else 0, 60):
        if step == 30 and not resume:
            torch.save({name: part.state_dict() for name, part in parts.items()}, f"{folder}.pt")
        random = torch.Generator().manual_seed(step)
        labels = torch.randint(2, (32,), generator=random)
        images = torch.randn(32, 3, 16, 16, generator=random)
        images[labels == 1, :, ::2] += 1.0
        inputs = images.to(torch.bfloat16, memory_format=torch.channels_last)
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(compiled(inputs).flatten(1).float(), labels)
        loss.backward()
        optimizer.step()
        average.update_parameters(model)
        losses.append(loss.item())
    return losses


if __name__ == "__main__":
    losses = main(state="8bit", main_params="remainder16")
    print(f"loss {losses[0]:.4f} -> {losses[-1]:.4f}")
