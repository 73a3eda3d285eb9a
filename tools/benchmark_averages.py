#!/usr/bin/env python
"""What averages of the weights cost in a step on the host: python tools/benchmark_averages.py

The whole bf16 step (norm, clip, AdamW, FP32 and bf16 parameters) without averages and with them in
both dtypes, in turn in one process."""

from __future__ import annotations

import time
from statistics import median
from typing import Any

import torch
import tyro
from rich.console import Console
from rich.table import Table
from torch import nn

from mp_optim import OptimizerConfig, get_megatron_optimizer

TENSOR = 2_000_000
"""Elements of each parameter."""
FORMS: dict[str, tuple[int, dict[str, Any]]] = {
    "none": (30, {}),
    "float32": (38, {"ema_decay": 0.999}),
    "bfloat16": (
        34,
        {"ema_decay": 0.999, "ema_dtype": "bfloat16", "stochastic_rounding": True},
    ),
}
"""By dtype of the averages: bytes a parameter that a step moves, and settings."""


def stack(params: int, settings: dict[str, Any]) -> Any:
    """An optimizer over bf16 parameters with gradients."""
    torch.manual_seed(0)
    model = nn.ParameterList()
    for _ in range(max(1, params // TENSOR)):
        model.append(nn.Parameter(torch.randn(TENSOR).bfloat16()))
        model[-1].grad = torch.randn(TENSOR).bfloat16()
    config = OptimizerConfig(lr=1e-3, bf16=True, clip_grad=1.0, **settings)
    return get_megatron_optimizer(config, model)


def main(params: float = 100e6, rounds: int = 15) -> None:
    """Print milliseconds of a step, and ratios to a step without averages.

    Args:
        params: parameters of the model. rounds: steps of each, the first two not counted.
    """
    stacks = {name: stack(int(params), form) for name, (_, form) in FORMS.items()}
    times: dict[str, list[float]] = {name: [] for name in FORMS}
    for _ in range(rounds + 2):
        for name, optimizer in stacks.items():
            began = time.perf_counter()
            optimizer.step()
            times[name].append(1e3 * (time.perf_counter() - began))
    table = Table("averages", "ms", "ratio", "ratio of the bytes")
    plain = median(times["none"][2:])
    for name, (size, _) in FORMS.items():
        middle = median(times[name][2:])
        ratios = f"{middle / plain:.2f}", f"{size / FORMS['none'][0]:.2f}"
        table.add_row(name, f"{middle:.1f}", *ratios)
    Console().print(table)


if __name__ == "__main__":
    tyro.cli(main)
