#!/usr/bin/env python
"""What a model of tools/train.py and its optimizer take on one rank, before anything is allocated.

python tools/plan_memory.py --model tests/functional/full_size/qwen3_30b_a3b.yaml --dp 8 --ep 8
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import tyro

from mp_optim import OptimizerConfig
from mp_optim.apps.cli.command import status_of
from mp_optim.apps.fit.plan_command import GIB, Options, report
from training.loading import load_yaml
from training.models import hf_config

__all__ = ["GIB", "load", "main"]


def load(path: Path) -> tuple[Any, OptimizerConfig]:
    config = load_yaml(path)
    return hf_config(config.model), config.optimizer


def main(options: Options) -> int:
    """Print the plan; returns the exit status."""
    return report(*load(options.model), options)


if __name__ == "__main__":
    sys.exit(status_of(lambda: main(tyro.cli(Options, description=__doc__))))
