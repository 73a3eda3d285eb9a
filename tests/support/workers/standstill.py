"""Two pipeline stages: one has a gradient that is not finite, and one has no parameters."""

import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from mp_optim import OptimizerConfig, ParamKey, get_megatron_optimizer
from mp_optim.process_groups.process_groups import ProcessGroups
from support.as_rank import as_rank


def stage(rank: int, **settings: object) -> tuple[nn.Module, object]:
    model = nn.ParameterDict({f"stage{rank}": nn.Parameter(torch.ones(4, dtype=torch.float16))})
    # This override matches on one rank only.
    overrides = {ParamKey(name="stage0"): {"max_lr": 1e-3}}
    groups = ProcessGroups(grad_stats=dist.group.WORLD)
    return model, get_megatron_optimizer(
        OptimizerConfig(lr=0.1, fp16=True, **settings), model, overrides, process_groups=groups
    )


def main(folder: Path) -> Any:
    rank = dist.get_rank()
    found: dict[str, object] = {}

    model, stack = stage(rank, loss_scale=8.0)
    stack.scale_loss(model[f"stage{rank}"].sum()).backward()
    if rank == 1:
        model["stage1"].grad[0] = torch.nan
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        stack.step()
    found["said"] = [str(warning.message) for warning in caught]

    empty = get_megatron_optimizer(
        OptimizerConfig(lr=0.1),
        nn.Identity(),
        process_groups=ProcessGroups(grad_stats=dist.group.WORLD),
    )
    found["stub"] = bool(empty.step().success)
    return found


if __name__ == "__main__":
    as_rank(main)
