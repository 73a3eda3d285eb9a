#!/usr/bin/env python
"""torchtitan's container and schedule with our optimizers, by name:
python tools/examples/torchtitan_container.py

State is saved by torchtitan's own flat state dict, under FQNs.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torchtitan.components.optimizer import ParamGroupConfig

from mp_optim.apps.integrations.torchtitan import MpOptimizersContainer


def main(
    folder: str = "runs/titan", cls: str = "AdamW", resume: bool = False, **settings: Any
) -> list[float]:
    """Fit a random teacher for 60 steps; returns the losses."""
    torch.manual_seed(0)
    teacher = nn.Linear(16, 4)
    model = nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 4)).bfloat16()
    groups = [
        ParamGroupConfig(
            pattern="bias$", optimizer_name=cls, optimizer_kwargs={"lr": 1e-2, "weight_decay": 0.0}
        ),
        ParamGroupConfig(pattern=".*", optimizer_name=cls, optimizer_kwargs={"lr": 1e-2}),
    ]
    config = MpOptimizersContainer.Config(
        param_groups=groups, optimizer_factory_kwargs_by_name={cls: settings}
    )
    optimizers = config.build(model_parts=[model])
    if resume:
        state = {"model": model.state_dict(), "optimizer": optimizers.state_dict()}
        dcp.load(state, checkpoint_id=folder)
        model.load_state_dict(state["model"])
        optimizers.load_state_dict(state["optimizer"])
    losses = []
    for step in range(30 if resume else 0, 60):
        if step == 30 and not resume:
            state = {"model": model.state_dict(), "optimizer": optimizers.state_dict()}
            dcp.save(state, checkpoint_id=folder)
        inputs = torch.randn(64, 16, generator=torch.Generator().manual_seed(step))
        optimizers.zero_grad()
        loss = nn.functional.mse_loss(model(inputs.bfloat16()).float(), teacher(inputs))
        loss.backward()
        optimizers.step()
        losses.append(loss.item())
    return losses


if __name__ == "__main__":
    losses = main(offload=1.0, state="bf16")
    print(f"loss {losses[0]:.4f} -> {losses[-1]:.4f}")
