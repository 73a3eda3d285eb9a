#!/usr/bin/env python
"""FSDP2 through accelerate: torchrun --standalone --nproc-per-node 2
tools/examples/accelerate_fsdp2.py

accelerate replaces the optimizer's parameters by DTensors; ours builds its state after that.
"""

from __future__ import annotations

import torch
from accelerate import Accelerator, FullyShardedDataParallelPlugin
from accelerate.utils import DistributedType
from torch import nn
from torch.distributed.tensor import DTensor

import mp_optim


def sharding_accelerator() -> Accelerator:
    """An accelerator that prepares models with FSDP2, also on a CPU, where accelerate by itself
    falls back to DDP."""
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2,
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=["Linear"],
        cpu_ram_efficient_loading=False,
    )
    accelerator = Accelerator(cpu=not torch.accelerator.is_available(), fsdp_plugin=plugin)
    if accelerator.distributed_type is DistributedType.MULTI_CPU:
        vars(accelerator.state).update(distributed_type=DistributedType.FSDP, fsdp_plugin=plugin)
    return accelerator


def main(steps: int = 40) -> list[float]:
    """Fit a random teacher; returns this rank's losses."""
    accelerator = sharding_accelerator()
    torch.manual_seed(0)
    teacher = nn.Linear(16, 4).to(accelerator.device)
    model = nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 4)).bfloat16()
    optimizer = mp_optim.AdamW(model.parameters(), lr=1e-2, offload=0.5, max_grad_norm=1.0)
    model, optimizer = accelerator.prepare(model, optimizer)
    assert all(isinstance(param, DTensor) for param in model.parameters())
    torch.manual_seed(accelerator.process_index)
    losses = []
    for _ in range(steps):
        inputs = torch.randn(64, 16, device=accelerator.device)
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(inputs.bfloat16()).float(), teacher(inputs).detach())
        accelerator.backward(loss)
        optimizer.step()
        losses.append(loss.item())
    accelerator.print(f"loss {losses[0]:.4f} -> {losses[-1]:.4f}")
    accelerator.wait_for_everyone()
    accelerator.end_training()
    return losses


if __name__ == "__main__":
    main()
