#!/usr/bin/env python
"""What StableAdamW costs in a step on the host, and what Adam without a first moment saves: python
tools/benchmark_stable_adamw.py

The whole bf16 step (norm, clip, rule, FP32 and bf16 parameters) of AdamW, of AdamW with beta1 = 0
and of StableAdamW, in turn in one process."""

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
RULES: dict[str, tuple[int, dict[str, Any]]] = {
    "adam": (30, {}),
    "adam, beta1 = 0": (22, {"adam_beta1": 0.0}),
    "stable_adamw": (36, {"optimizer": "stable_adamw"}),
}
"""Bytes a parameter that a step moves, and settings."""


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
    """Print milliseconds of a step, and ratios to AdamW's.

    Args:
        params: parameters of the model. rounds: steps of each, the first two not counted.
    """
    stacks = {name: stack(int(params), form) for name, (_, form) in RULES.items()}
    times: dict[str, list[float]] = {name: [] for name in RULES}
    for _ in range(rounds + 2):
        for name, optimizer in stacks.items():
            began = time.perf_counter()
            optimizer.step()
            times[name].append(1e3 * (time.perf_counter() - began))
    table = Table("rule", "ms", "ratio", "ratio of the bytes")
    plain = median(times["adam"][2:])
    for name, (size, _) in RULES.items():
        middle = median(times[name][2:])
        ratios = f"{middle / plain:.2f}", f"{size / RULES['adam'][0]:.2f}"
        table.add_row(name, f"{middle:.1f}", *ratios)
    Console().print(table)


if __name__ == "__main__":
    tyro.cli(main)
