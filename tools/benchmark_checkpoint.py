#!/usr/bin/env python
"""Measure saving and loading of many small parameters, and the planning of many ranks.

python tools/benchmark_checkpoint.py --params 5000        # on an idle machine
python tools/benchmark_checkpoint.py --planning --ranks 1024 --params 10000
"""

from __future__ import annotations

import math
import pickle
import shutil
import socket
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import tyro
from measuring.kernels import require_kernels
from rich.console import Console
from rich.table import Table
from torch import nn

from mp_optim import OptimizerConfig, checkpoint, get_megatron_optimizer
from mp_optim.checkpoint.writing import Held, Holding, shares
from mp_optim.core.partition import boxes
from mp_optim.kernels.native_library import set_host_threads


@dataclass
class Options:
    """What to measure."""

    params: int = 5000
    """Parameters."""
    elements: int = 256
    """Elements of each; a square number."""
    rounds: int = 3
    folder: Path | None = None
    """Where to write; a temporary folder by default. It is deleted."""
    planning: bool = False
    """Plan for many ranks of ZeRO-1, on paper, instead."""
    ranks: int = 1024
    """Ranks to plan for."""


def build(options: Options) -> tuple[nn.Module, Any]:
    """A stepped model of many parameters; on one rank, ZeRO-1."""
    side = math.isqrt(options.elements)
    model = nn.ParameterDict(
        {
            f"p{index}": nn.Parameter(torch.randn(side, side).bfloat16())
            for index in range(options.params)
        }
    )
    optimizer = get_megatron_optimizer(
        OptimizerConfig(lr=1e-3, bf16=True, use_distributed_optimizer=True), model
    )
    torch.stack([param.float().sum() for param in model.values()]).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    return model, optimizer


def timed(work: Callable[[], object]) -> tuple[float, float]:
    """Seconds, and seconds of the processor."""
    begun, used = time.perf_counter(), time.process_time()
    work()
    return time.perf_counter() - begun, time.process_time() - used


def measure(options: Options, folder: Path, console: Console) -> None:
    """Save and load in turn."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=0, world_size=1)
    held, other = build(options), build(options)
    table = Table(
        "",
        "seconds",
        "of the processor",
        title=f"{options.params:,} parameters of {options.elements}",
    )
    for _ in range(options.rounds):
        for what, work in (
            ("save", lambda: checkpoint.save(folder, *held)),
            ("load", lambda: checkpoint.load(folder, *other)),
        ):
            seconds, used = timed(work)
            table.add_row(what, f"{seconds:.2f}", f"{used:.2f}")
    console.print(table)
    dist.destroy_process_group()


def holdings(options: Options) -> list[Holding]:
    """What ranks of ZeRO-1 hold: the model whole, equal flat ranges of the state, and its step
    counts."""
    side = math.isqrt(options.elements)
    names = [f"layers.{index}.weight" for index in range(options.params)]
    model = tuple(Held(f"model.{name}", torch.bfloat16, (side, side)) for name in names)
    numel, total = side * side, side * side * options.params
    result = []
    for rank in range(options.ranks):
        begin, end = rank * total // options.ranks, (rank + 1) * total // options.ranks
        steps: list[Held] = []
        parts: list[Held] = []
        for index in range(begin // numel, -(-end // numel)):
            first, last = max(begin, index * numel), min(end, (index + 1) * numel)
            places = boxes((side, side), first - index * numel, last - first)
            steps.append(Held(f"optimizer.state.step.{names[index]}", torch.float32, ()))
            parts += [
                Held(f"optimizer.state.{key}.{names[index]}", torch.float32, (side, side), places)
                for key in ("master_param", "exp_avg", "exp_avg_sq")
            ]
        result.append(Holding((*model, *steps), tuple(parts)))
    return result


def plan(options: Options, console: Console) -> None:
    """What the ranks do by themselves, what they tell, and what the first one decides."""
    every = holdings(options)
    alone, _ = timed(lambda: every[0].sheets)
    sheets = [holding.sheets for holding in every]
    told = {digest: sheet for own in sheets for digest, sheet in own.items()}
    sent = pickle.dumps((told, [holding.shards for holding in every]))
    received, _ = timed(lambda: pickle.loads(sent))
    decided, _ = timed(
        lambda: shares(told, [list(own) for own in sheets], [holding.shards for holding in every])
    )
    table = Table("", "", title=f"{options.ranks:,} ranks, {options.params:,} parameters")
    table.add_row("each rank digests what it holds", f"{alone:.2f} s")
    table.add_row("all of them tell the first", f"{len(sent) / 1e6:.1f} MB")
    table.add_row("which unpacks it", f"{received:.2f} s")
    table.add_row("and decides", f"{decided:.2f} s")
    console.print(table)


def main(options: Options) -> None:
    console = Console()
    torch.set_num_threads(1)
    set_host_threads(1)
    if options.planning:
        plan(options, console)
        return
    require_kernels()
    folder = options.folder or Path(tempfile.mkdtemp())
    try:
        measure(options, folder, console)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main(tyro.cli(Options, description=__doc__))
