"""Seconds that a save of device state blocks training, and its bits."""

from __future__ import annotations

import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import torch
from torch import nn

from benchmarks.section import Section
from lab.gpu.speed import ours
from mp_optim import MegatronOptimizer, OptimizerConfig, checkpoint
from mp_optim import get_megatron_optimizer as build
from mp_optim.apps.cli.inspect import compare
from mp_optim.checkpoint.reading import open_checkpoint

_SIDE = 2048
_ROUNDS = 3


class _Run:
    """A model with its optimizer on the device."""

    def __init__(self, device: torch.device, numel: int) -> None:
        self.device = device
        shape, count = (_SIDE, _SIDE), max(1, numel // _SIDE**2)
        weights = [torch.randn(shape, device=device).bfloat16() for _ in range(count)]
        self.model = nn.ParameterList(map(nn.Parameter, weights))
        config = OptimizerConfig(lr=1e-3, bf16=True, fused_backend=ours(device))
        self.optimizer: MegatronOptimizer = build(config, self.model)
        for param in self.model:
            param.grad = torch.full_like(param, 1e-3)

    def finish(self) -> None:
        """Wait for the device."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def step(self) -> None:
        self.optimizer.step()
        self.finish()


def _seconds(work: Callable[[], object]) -> float:
    begun = time.perf_counter()
    work()
    return time.perf_counter() - begun


@dataclass
class _Round:
    """Seconds of a save, of a step alone, and of a save in the background: until the call returned,
    until nothing of the device was borrowed any more, until it was on the disk, and of the step
    right after the call.

    Attributes:
        differing: entries that differ from those of the first save.
    """

    save: float
    step: float
    blocked: float
    borrowed: float
    done: float
    first_step: float
    differing: int


def _measured(run: _Run, folder: Path) -> _Round:
    step = _seconds(run.step)
    model, optimizer = cast(nn.Module, run.model), run.optimizer
    save = _seconds(lambda: checkpoint.save(folder / "now", model, optimizer))
    begun = time.perf_counter()
    handle = checkpoint.save(folder / "later", model, optimizer, asynchronous=True)
    blocked = time.perf_counter() - begun
    handle.wait_for_device()
    borrowed = time.perf_counter() - begun
    handle.wait()
    done = time.perf_counter() - begun
    handle = checkpoint.save(folder / "later", model, optimizer, asynchronous=True)
    first_step = _seconds(run.step)
    run.step()
    handle.wait()
    both = compare(open_checkpoint(folder / "now"), open_checkpoint(handle.path))
    differing = [row.name for row in both if row.what != "equal"]
    return _Round(save, step, blocked, borrowed, done, first_step, len(differing))


def saves(device: torch.device, numel: int, rounds: int) -> Section:
    section = Section("Saves of a model and optimizer on the device")
    folder = Path(tempfile.mkdtemp())
    try:
        run = _Run(device, numel)
        run.step()
        found = [_measured(run, folder) for _ in range(min(rounds, _ROUNDS) + 1)][1:]
    finally:
        shutil.rmtree(folder)

    def median(name: str) -> float:
        return statistics.median(getattr(one, name) for one in found)

    save = median("save")
    for label, name in {
        "save": "save",
        "in the background: the call": "blocked",
        "in the background: nothing borrowed of the device": "borrowed",
        "in the background: on the disk": "done",
        "a step alone": "step",
        "a step right after the call": "first_step",
    }.items():
        section.rows[label] = {"ms": 1e3 * median(name), "of_save": median(name) / save}
    differing = float(max(one.differing for one in found))
    section.rows["entries that are not those of the call"] = {"count": differing}
    return section
