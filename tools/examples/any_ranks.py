#!/usr/bin/env python
"""A run that goes on with another number of ranks.

torchrun --standalone --nproc-per-node 8 tools/examples/any_ranks.py runs/any 40
torchrun --standalone --nproc-per-node 5 tools/examples/any_ranks.py runs/any 80
torchrun --standalone --nproc-per-node 8 tools/examples/any_ranks.py runs/any 120

Each goes on where the last one stopped, up to that step. The batch of a step is the same 40 rows,
however many ranks share them out; so is the order of the data.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from mp_optim import OptimizerConfig, checkpoint, get_megatron_optimizer

ROWS = 40


def main(folder: str, end: int) -> None:
    dist.init_process_group()
    rank, ranks = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    teacher = nn.Linear(16, 4)
    model = nn.Sequential(nn.Linear(16, 61), nn.Tanh(), nn.Linear(61, 4)).bfloat16()
    config = OptimizerConfig(
        lr=3e-3,
        bf16=True,
        clip_grad=1.0,
        use_distributed_optimizer=True,
        data_parallel_sharding_strategy="optim_grads",
    )
    optimizer = get_megatron_optimizer(config, model)
    begin = 0
    if Path(folder, "latest").exists():
        begin = checkpoint.load(folder, model, optimizer)["step"]
    losses = []
    for step in range(begin, end):
        inputs = torch.randn(ROWS, 16, generator=torch.Generator().manual_seed(step))
        mine = inputs.tensor_split(ranks)[rank]
        loss = nn.functional.mse_loss(model(mine.bfloat16()).float(), teacher(mine))
        # ranks are averaged; one with fewer rows counts for less
        optimizer.scale_loss(loss * (len(mine) * ranks / ROWS)).backward()
        optimizer.step()
        optimizer.zero_grad()
        shown = loss.detach() * len(mine) / ROWS
        dist.all_reduce(shown)
        losses.append(shown.item())
    checkpoint.save(folder, model, optimizer, extra={"step": end})
    if rank == 0:
        print(f"{ranks} ranks, steps {begin} to {end}: loss {losses[0]:.4f} -> {losses[-1]:.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
