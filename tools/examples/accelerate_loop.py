#!/usr/bin/env python
"""A loop of accelerate's: accumulation, clipping, saved state: python
tools/examples/accelerate_loop.py
"""

from __future__ import annotations

from typing import Any

import torch
from accelerate import Accelerator
from torch import nn
from torch.optim.lr_scheduler import OneCycleLR

import mp_optim


def main(
    folder: str = "runs/accelerate",
    cls: Any = mp_optim.AdamW,
    resume: bool = False,
    **settings: Any,
) -> list[float]:
    """Fit a random teacher in 60 steps of 2 micro-batches; returns the losses of these."""
    accelerator = Accelerator(gradient_accumulation_steps=2, cpu=True)
    torch.manual_seed(0)
    teacher = nn.Linear(16, 4)
    model = nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 4)).bfloat16()
    optimizer = cls(model.parameters(), lr=1e-2, **settings)
    scheduler = OneCycleLR(optimizer, max_lr=1e-2, total_steps=60)
    model, optimizer, scheduler = accelerator.prepare(model, optimizer, scheduler)
    if resume:
        accelerator.load_state(folder)
    losses = []
    for batch in range(60 if resume else 0, 120):
        if batch == 60:
            accelerator.save_state(folder)
        inputs = torch.randn(64, 16, generator=torch.Generator().manual_seed(batch))
        with accelerator.accumulate(model):
            loss = nn.functional.mse_loss(model(inputs.bfloat16()).float(), teacher(inputs))
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        losses.append(loss.item())
    return losses


if __name__ == "__main__":
    losses = main(offload=1.0, state="8bit")
    print(f"loss {losses[0]:.4f} -> {losses[-1]:.4f}")
