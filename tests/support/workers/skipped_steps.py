"""Two ranks skip the same step. Each saves the levels and lines of its log."""

import logging
from pathlib import Path
from typing import Any

import torch
from torch import nn

from mp_optim import OptimizerConfig, get_megatron_optimizer
from support.as_rank import as_rank


class Lines(logging.Handler):
    """A log handler that keeps the level and text of each line."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[tuple[str, str]] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append((record.levelname, record.getMessage()))


def main(folder: Path) -> Any:
    log, handler = logging.getLogger("mp_optim.monitor"), Lines()
    log.setLevel(logging.INFO)
    log.addHandler(handler)
    model = nn.Linear(4, 4)
    config = OptimizerConfig(lr=0.1, use_distributed_optimizer=True, grad_norm_skip_threshold=1e-9)
    optimizer = get_megatron_optimizer(config, model)
    model(torch.ones(2, 4)).sum().backward()
    assert optimizer.step().reason
    return handler.lines


if __name__ == "__main__":
    as_rank(main)
