#!/usr/bin/env python
"""Measure how long a save keeps training from going on, against torch's, in one process.

python tools/benchmark_saves.py --millions 100                 # on an idle machine
python tools/benchmark_saves.py --millions 300 --no-with-model  # 18 GB of memory, 4 of disk
"""

from __future__ import annotations

import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import tyro
from measuring.kernels import require_kernels
from rich.console import Console
from rich.table import Table
from torch import nn
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

from mp_optim import OptimizerConfig, checkpoint, get_megatron_optimizer

_SIDE = 2048
_PIECE = 16 << 20


@dataclass
class Options:
    """Sizes, and the contents of a checkpoint."""

    millions: int = 100
    """Parameters, in millions; each has 12 bytes of state on the host and 2 in the model."""
    with_model: bool = True
    """Save the model's parameters, too; False saves the optimizer's state alone."""
    rounds: int = 3
    steps: int = 3
    """Steps right after the call."""
    folder: Path | None = None
    """Where to write; a temporary folder by default. Files that are written are deleted."""

    @property
    def bytes(self) -> int:
        return self.millions * 10**6 * (12 + 2 * self.with_model)


class Run:
    """A model and its optimizer, which is on the host as a whole."""

    def __init__(self, options: Options) -> None:
        self.model = nn.ParameterDict()
        for index in range(max(1, options.millions * 10**6 // _SIDE**2)):
            value = torch.randn(_SIDE, _SIDE, dtype=torch.bfloat16)
            self.model[f"p{index}"] = nn.Parameter(value)
        config = OptimizerConfig(
            lr=1e-3,
            bf16=True,
            clip_grad=0.0,
            optimizer_cpu_offload=True,
            optimizer_offload_fraction=1.0,
            offload_mode="speculative",
        )
        self.optimizer = get_megatron_optimizer(config, self.model)
        self.saved = self.model if options.with_model else nn.ParameterDict()
        self._factor = torch.randn(_SIDE, _SIDE, dtype=torch.bfloat16)

    def step(self) -> float:
        """Return the seconds of a short backward and a step."""
        begun = time.perf_counter()
        for param in self.model.values():
            (param * self._factor).sum().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return time.perf_counter() - begun

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return the tensors of a checkpoint, as other libraries are given them."""
        entries = {f"model.{name}": value for name, value in self.saved.state_dict().items()}
        for index, state in self.optimizer.state_dict()["state"].items():
            entries |= {f"{key}.{index}": value for key, value in state.items()}
        return entries


class Measured(NamedTuple):
    """One save: seconds until the call returned, until its files were written, and of steps."""

    blocked: float
    done: float
    steps: list[float]


def plain_write(run: Run, folder: Path) -> Measured:
    """Write the same bytes by one thread, one after the other, and sync."""
    folder.mkdir()
    flat = [tensor.detach().contiguous().view(-1) for tensor in run.tensors().values()]
    begun = time.perf_counter()
    with (folder / "plain").open("wb", buffering=0) as file:
        for tensor in flat:
            memory = memoryview(tensor.view(torch.uint8).numpy())
            for start in range(0, len(memory), _PIECE):
                file.write(memory[start : start + _PIECE])
        os.fsync(file.fileno())
    seconds = time.perf_counter() - begun
    return Measured(seconds, seconds, [])


def synchronous(run: Run, folder: Path) -> Measured:
    begun = time.perf_counter()
    checkpoint.save(folder, run.saved, run.optimizer)
    seconds = time.perf_counter() - begun
    return Measured(seconds, seconds, [])


def background(run: Run, folder: Path, steps: int) -> Measured:
    begun = time.perf_counter()
    handle = checkpoint.save(folder, run.saved, run.optimizer, asynchronous=True)
    blocked = time.perf_counter() - begun
    taken = [run.step() for _ in range(steps)]
    handle.wait()
    return Measured(blocked, time.perf_counter() - begun, taken)


def by_torch(run: Run, folder: Path, stager: DefaultStager | None) -> Measured:
    """Save by ``async_save``; a stager keeps its memory from save to save."""
    tensors = run.tensors()
    begun = time.perf_counter()
    response = dcp.async_save(tensors, checkpoint_id=str(folder), async_stager=stager)
    done = response
    if not hasattr(response, "result"):  # it has two futures
        response.staging_completion.result()
        done = response.upload_completion
    blocked = time.perf_counter() - begun
    done.result()
    return Measured(blocked, time.perf_counter() - begun, [])


def measure(options: Options, root: Path) -> tuple[dict[str, list[Measured]], list[float]]:
    """Return the saves of every way, and seconds of steps alone.

    Each round begins with another way, as disks take the first gigabytes faster than the next. The
    first round is not counted.
    """
    run, stager = Run(options), DefaultStager(StagingOptions(False, False, False, False))
    ways: dict[str, Callable[[Run, Path], Measured]] = {
        "plain write": plain_write,
        "save": synchronous,
        "background": lambda run, folder: background(run, folder, 0),
        "background, steps": lambda run, folder: background(run, folder, options.steps),
        "async_save": lambda run, folder: by_torch(run, folder, None),
        "async_save, cached": lambda run, folder: by_torch(run, folder, stager),
    }
    found: dict[str, list[Measured]] = {name: [] for name in ways}
    alone: list[float] = []
    for _ in range(3):
        run.step()
    for number in range(options.rounds + 1):
        first = number % len(ways)
        for name in [*ways, *ways][first : first + len(ways)]:
            taken = run.step()
            measured = ways[name](run, root / "saved")
            shutil.rmtree(root / "saved")
            if number:
                alone.append(taken)
                found[name].append(measured)
    return found, alone


def report(found: dict[str, list[Measured]], alone: list[float], options: Options) -> Table:
    """Return medians over rounds."""
    step = 1e3 * statistics.median(alone)
    title = f"{options.millions} M parameters, {options.bytes / 1e9:.1f} GB; a step: {step:.0f} ms"
    table = Table("", "blocked, s", "on disk, s", "GB/s", "steps after it, ms", title=title)
    for name, rounds in found.items():
        blocked = statistics.median(one.blocked for one in rounds)
        done = statistics.median(one.done for one in rounds)
        steps = map(statistics.median, zip(*(one.steps for one in rounds), strict=True))
        rate = f"{options.bytes / 1e9 / done:.2f}"
        later = " ".join(f"{1e3 * seconds:.0f}" for seconds in steps)
        table.add_row(name, f"{blocked:.3f}", f"{done:.2f}", rate, later)
    return table


def main(options: Options) -> None:
    """Measure, print and delete."""
    require_kernels()
    root = options.folder or Path(tempfile.mkdtemp())
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        found, alone = measure(options, root)
    finally:
        shutil.rmtree(root / "saved", ignore_errors=True)
        dist.destroy_process_group()
    Console(width=110).print(report(found, alone, options))


if __name__ == "__main__":
    main(tyro.cli(Options, description=__doc__))
