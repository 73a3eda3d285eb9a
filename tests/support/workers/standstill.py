"""Two ranks skip steps: together, and as pipeline stages when one has a bad gradient."""

import logging
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


class Lines(logging.Handler):
    """A log handler that keeps the level and text of each line."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[tuple[str, str]] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append((record.levelname, record.getMessage()))


def logged() -> list[tuple[str, str]]:
    """Return the log lines of a step that both ranks skip."""
    log, handler = logging.getLogger("mp_optim.monitor"), Lines()
    log.setLevel(logging.INFO)
    log.addHandler(handler)
    model = nn.Linear(4, 4)
    config = OptimizerConfig(lr=0.1, use_distributed_optimizer=True, grad_norm_skip_threshold=1e-9)
    optimizer = get_megatron_optimizer(config, model)
    model(torch.ones(2, 4)).sum().backward()
    assert optimizer.step().reason
    log.removeHandler(handler)
    return handler.lines


def main(folder: Path) -> Any:
    rank = dist.get_rank()
    found: dict[str, object] = {"logged": logged()}

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
