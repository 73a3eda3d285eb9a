#!/usr/bin/env python
"""Measure what publishing changed weights costs.

python tools/benchmark_deltas.py bytes                       # how many change, by learning rate
python tools/benchmark_deltas.py time --params 100e6         # a step with and without; idle machine

``bytes``: synthetic weights (0.02 N(0, 1), bfloat16), gradients of noise around a direction, AdamW
from FP32 main params; the shares depend on nothing but the seed.
"""

from __future__ import annotations

import gc
import statistics
import time
from dataclasses import dataclass
from typing import Any, Literal

import torch
import tyro
from measuring.kernels import require_kernels
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

import mp_optim


@dataclass
class Options:
    """What to measure."""

    what: tyro.conf.Positional[Literal["bytes", "time"]] = "bytes"
    params: float = 1e6
    """Elements of the model."""
    tensors: int = 8
    rates: tuple[float, ...] = (1e-6, 3e-6, 1e-5, 3e-5, 1e-4, 1e-3)
    """Learning rates."""
    warmup: int = 20
    """Steps before anything is counted."""
    steps: int = 8
    """Steps that are counted, or timed in a round."""
    rounds: int = 15
    """Of steps without, and steps with; the ratio of each pair is taken."""


def built(options: Options, lr: float) -> tuple[list[nn.Parameter], mp_optim.AdamW]:
    """Weights, and their optimizer."""
    generator = torch.Generator().manual_seed(0)
    size = int(options.params) // options.tensors
    params = [
        nn.Parameter((torch.randn(size, generator=generator) * 0.02).bfloat16())
        for _ in range(options.tensors)
    ]
    named = [(f"w{index}", param) for index, param in enumerate(params)]
    return params, mp_optim.AdamW(named, lr=lr, weight_decay=0.0)


def noisy(params: list[nn.Parameter], seed: int) -> list[Tensor]:
    """Gradients of one step: a direction that stays, and noise of three times its size."""
    steady, noise = (torch.Generator().manual_seed(number) for number in (1, 1000 + seed))
    found = []
    for param in params:
        direction = torch.randn(param.shape, generator=steady)
        found.append((direction + 3 * torch.randn(param.shape, generator=noise)).bfloat16())
    return found


def count(options: Options, lr: float, every: int) -> dict[str, float]:
    """Shares and bytes of publications after every so many steps, means."""
    params, optimizer = built(options, lr)
    found: dict[str, list[float]] = {"changed": [], "bytes": [], "gaps": []}
    for step in range(options.warmup + options.steps * every):
        for param, grad in zip(params, noisy(params, step), strict=True):
            param.grad = grad
        optimizer.step()
        if step + 1 == options.warmup:
            optimizer.track_changes()
        elif step >= options.warmup and (step + 1 - options.warmup) % every == 0:
            delta = optimizer.changed_weights()
            found["changed"].append(delta.changed / delta.watched)
            found["bytes"].append(len(delta.to_bytes()) / delta.watched)
            found["gaps"].append(len(delta.to_bytes(bitmaps=False)) / delta.watched)
    return {name: statistics.mean(values) for name, values in found.items()}


def show_bytes(options: Options, console: Console) -> None:
    """The table of docs/deltas.md."""
    table = Table("learning rate", "steps", "changed", "bytes a weight", "gaps alone", "of all")
    for lr in options.rates:
        for every in (1, 8):
            row = count(options, lr, every)
            table.add_row(
                f"{lr:g}",
                str(every),
                f"{row['changed']:.1%}",
                f"{row['bytes']:.3f}",
                f"{row['gaps']:.3f}",
                f"{row['bytes'] / 2:.1%}",
            )
    console.print(table)


def seconds(optimizer: Any, steps: int) -> float:
    """Of so many steps, each: of all threads of this process, so that others count for less."""
    began = time.process_time()
    for _ in range(steps):
        optimizer.step()
    return (time.process_time() - began) / steps


def show_time(options: Options, console: Console) -> None:
    """Ratios of steps with and without, in turn."""
    for lr in options.rates:
        params, optimizer = built(options, lr)
        for param, grad in zip(params, noisy(params, 0), strict=True):
            param.grad = grad
        ratios, plain, marked, to_publish = [], [], [], []
        for number in range(options.rounds):
            for tracks in (False, True) if number % 2 else (True, False):
                optimizer.track_changes(tracks)
                seconds(optimizer, 1)
                (marked if tracks else plain).append(seconds(optimizer, options.steps))
                began = time.process_time()
                if tracks:
                    optimizer.changed_weights()
                    to_publish.append(time.process_time() - began)
            ratios.append(marked[-1] / plain[-1])
        low, middle, high = statistics.quantiles(ratios, n=4)
        console.print(
            f"lr {lr:g}: a step takes {statistics.median(plain) * 1e3:.1f} ms of CPU; with changes "
            f"{middle:.3f} times that (quartiles {low:.3f}, {high:.3f}; the fastest "
            f"{min(marked) / min(plain):.3f}); a publication "
            f"{statistics.median(to_publish) * 1e3:.1f} ms"
        )
        del optimizer, params
        gc.collect()


def main(options: Options) -> None:
    require_kernels()
    console = Console()
    {"bytes": show_bytes, "time": show_time}[options.what](options, console)


if __name__ == "__main__":
    main(tyro.cli(Options, description=__doc__))
