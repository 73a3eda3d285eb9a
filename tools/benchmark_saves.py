#!/usr/bin/env python
"""Measure how long a save keeps training from going on, against torch's, in one process.

python tools/benchmark_saves.py --millions 100                 # on an idle machine
python tools/benchmark_saves.py --millions 300 --no-with-model  # 18 GB of memory, 4 of disk
"""

from __future__ import annotations

import os
import shutil
import socket
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

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
    """What to measure."""

    millions: int = 100
    """Parameters, in millions; each has 12 bytes of state on the host and 2 in the model."""
    moments: Literal["fp32", "bf16"] = "fp32"
    """In which form; 8 bytes of state with bf16."""
    mode: Literal["sync", "overlap", "speculative"] = "speculative"
    """``offload_mode``."""
    with_model: bool = True
    """Save the model's parameters, too; False saves what the optimizer has on the host."""
    rounds: int = 3
    steps: int = 3
    """Steps right after the call."""
    opponents: Literal["all", "uncached", "none"] = "all"
    """Measure ``torch.distributed.checkpoint.async_save``, too: also with a stager that keeps its
    memory, as much as is saved, for the whole run; or only without."""
    folder: Path | None = None
    """Where to write; a temporary folder by default. What is written is deleted."""


class Run:
    """A model and its optimizer, which is on the host as a whole."""

    def __init__(self, options: Options) -> None:
        count = max(1, options.millions * 10**6 // _SIDE**2)
        shape = _SIDE, _SIDE
        self.model = nn.ParameterDict()
        for index in range(count):
            value = torch.randn(shape, dtype=torch.bfloat16)
            self.model[f"p{index}"] = nn.Parameter(value)
        config = OptimizerConfig(
            lr=1e-3,
            bf16=True,
            clip_grad=0.0,
            optimizer_cpu_offload=True,
            optimizer_offload_fraction=1.0,
            offload_mode=options.mode,
            use_precision_aware_optimizer=options.moments != "fp32",
            exp_avg_dtype=options.moments,
            exp_avg_sq_dtype=options.moments,
            store_param_remainders=options.moments == "fp32",
        )
        self.optimizer = get_megatron_optimizer(config, self.model)
        self.saved = self.model if options.with_model else nn.ParameterDict()
        self._factor = torch.randn(shape, dtype=torch.bfloat16)

    def step(self) -> float:
        """Seconds of a backward, which does next to nothing, and a step."""
        begun = time.perf_counter()
        for param in self.model.values():
            (param * self._factor).sum().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return time.perf_counter() - begun

    def tensors(self) -> dict[str, torch.Tensor]:
        """What a checkpoint holds, as the peers are given it."""
        entries = {f"model.{name}": value for name, value in self.saved.state_dict().items()}
        for index, state in self.optimizer.state_dict()["state"].items():
            entries |= {f"{key}.{index}": value for key, value in state.items()}
        return entries


@dataclass
class Measured:
    """One save.

    Attributes:
        blocked: seconds until the call returned (and its tensors may be written).
        done: seconds until it was on the disk.
        steps: seconds of the steps right after it.
    """

    blocked: float
    done: float
    steps: list[float]


def plain_write(run: Run, folder: Path, options: Options) -> Measured:
    """The same bytes by one thread, one after the other, and synced."""
    folder.mkdir()
    memories = []
    for tensor in run.tensors().values():
        memories.append(memoryview(tensor.detach().contiguous().view(-1).view(torch.uint8).numpy()))
    begun = time.perf_counter()
    with (folder / "plain").open("wb", buffering=0) as file:
        for memory in memories:
            for start in range(0, len(memory), _PIECE):
                file.write(memory[start : start + _PIECE])
        os.fsync(file.fileno())
    seconds = time.perf_counter() - begun
    return Measured(seconds, seconds, [])


def synchronous(run: Run, folder: Path, options: Options) -> Measured:
    begun = time.perf_counter()
    checkpoint.save(folder, run.saved, run.optimizer)
    seconds = time.perf_counter() - begun
    return Measured(seconds, seconds, [])


def background(run: Run, folder: Path, options: Options, steps: int = 0) -> Measured:
    begun = time.perf_counter()
    handle = checkpoint.save(folder, run.saved, run.optimizer, asynchronous=True)
    blocked = time.perf_counter() - begun
    taken = [run.step() for _ in range(steps)]
    handle.wait()
    return Measured(blocked, time.perf_counter() - begun, taken)


def background_with_steps(run: Run, folder: Path, options: Options) -> Measured:
    return background(run, folder, options, options.steps)


class Torch:
    """``async_save``, with a stager that keeps its memory from save to save, or without."""

    def __init__(self, staging: StagingOptions | None) -> None:
        self._stager = None if staging is None else DefaultStager(staging)

    def __call__(self, run: Run, folder: Path, options: Options) -> Measured:
        tensors = run.tensors()
        begun = time.perf_counter()
        response = dcp.async_save(tensors, checkpoint_id=str(folder), async_stager=self._stager)
        done = response
        if not hasattr(response, "result"):  # it has two futures
            response.staging_completion.result()
            done = response.upload_completion
        blocked = time.perf_counter() - begun
        done.result()
        return Measured(blocked, time.perf_counter() - begun, [])


@contextmanager
def one_rank() -> Iterator[None]:
    """A process group, as ``async_save`` needs one."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


Saving = Callable[[Run, Path, Options], Measured]


def measure(options: Options, root: Path) -> tuple[dict[str, list[Measured]], list[float]]:
    """Everything in turn, each round from another one on, as disks take the first gigabytes faster
    than the next; the first round is not counted. And seconds of steps alone."""
    run = Run(options)
    ways: dict[str, Saving] = {
        "plain write": plain_write,
        "save": synchronous,
        "background": background,
        "background, steps": background_with_steps,
    }
    if options.opponents != "none":
        ways["async_save"] = Torch(None)
    if options.opponents == "all":
        cached = StagingOptions(False, False, False, False)
        ways["async_save, cached"] = Torch(cached)
    found: dict[str, list[Measured]] = {name: [] for name in ways}
    alone: list[float] = []
    for _ in range(3):
        run.step()
    for number in range(options.rounds + 1):
        first = number % len(ways)
        for name in [*ways, *ways][first : first + len(ways)]:
            way = ways[name]
            taken = run.step()
            measured = way(run, root / "saved", options)
            shutil.rmtree(root / "saved")
            if number:
                alone.append(taken)
                found[name].append(measured)
    return found, alone


def _bytes(options: Options) -> int:
    each = {"fp32": 12, "bf16": 8}[options.moments]
    return options.millions * 10**6 * (each + 2 * options.with_model)


def report(found: dict[str, list[Measured]], alone: list[float], options: Options) -> Table:
    step = statistics.median(alone)
    title = (
        f"{options.millions} M parameters, {_bytes(options) / 1e9:.1f} GB, "
        f"{options.mode}, {options.moments} moments; a step alone: {step * 1e3:.0f} ms"
    )
    table = Table("", "blocked, s", "on disk, s", "GB/s", "steps after it, ms", title=title)
    for name, rounds in found.items():
        blocked = statistics.median(one.blocked for one in rounds)
        done = statistics.median(one.done for one in rounds)
        steps = [
            statistics.median(each) for each in zip(*(one.steps for one in rounds), strict=True)
        ]
        table.add_row(
            name,
            f"{blocked:.3f}",
            f"{done:.2f}",
            f"{_bytes(options) / 1e9 / done:.2f}",
            " ".join(f"{1e3 * seconds:.0f}" for seconds in steps),
        )
    return table


def main(options: Options) -> None:
    require_kernels()
    root = options.folder or Path(tempfile.mkdtemp())
    try:
        with one_rank():
            found, alone = measure(options, root)
    finally:
        shutil.rmtree(root / "saved", ignore_errors=True)
    Console(width=110).print(report(found, alone, options))


if __name__ == "__main__":
    main(tyro.cli(Options, description=__doc__))
