#!/usr/bin/env python
"""Measure the work that each offload mode hides under backward: sync, overlap and speculative in
one process, in turn.

python tools/benchmark_overlap.py --params 30e6        # on an idle machine

Backward is simulated: autograd nodes sleep, as a host does while an accelerator computes, then
return gradients that were made before. The bus is simulated too.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import torch
import tyro
from measuring.kernels import require_kernels
from rich.console import Console
from rich.progress import track
from torch import Tensor, nn

from benchmarks import report
from benchmarks.section import Section
from mp_optim import MegatronOptimizer, OptimizerConfig, get_megatron_optimizer

CLIP = {"off": 0.0, "on, not firing": 1e9, "always firing": 1e-3}
MODES = {"sync": "#bdbdbd", "overlap": "#6baed6", "speculative": "#08519c"}
"""Each ``offload_mode`` with its color."""


@dataclass
class Options:
    """Sizes of the model, the bus and backward."""

    params: float = 30e6
    """Elements of the model, all stepped on the host."""
    tensors: int = 24
    rounds: int = 9
    lengths: tuple[float, ...] = (1.0, 1.5, 2.0, 4.0)
    """Lengths of backward, in steps of ``sync``."""
    bus: tuple[float, ...] = (0.0, 25.0)
    """GB/s in each direction; 0 for copies at the host's own rate."""
    output: Path | None = None
    """Folder for overlap.md and overlap.png; none are written without it."""


class Bus:
    """A transfer with the rate of a bus: each direction is one lane, in which copies queue."""

    is_same_place = False

    def __init__(self, gigabytes: float) -> None:
        self._rate = gigabytes * 1e9
        self._free_at = {"down": 0.0, "up": 0.0}

    def empty_host(self, num_bytes: int, pin: bool) -> Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8)

    def notes(self) -> tuple[str, ...]:
        return ()

    def mark(self) -> None: ...

    def _copy(self, lane: str, to: Sequence[Tensor], sources: Sequence[Tensor]) -> float:
        started = max(time.perf_counter(), self._free_at[lane])
        for destination, source in zip(to, sources, strict=True):
            destination.copy_(source)
        self._free_at[lane] = started + sum(source.nbytes for source in sources) / self._rate
        return self._free_at[lane]

    def download(self, to: Sequence[Tensor], sources: Sequence[Tensor], after: Any = None) -> float:
        return self._copy("down", to, sources)

    def upload(self, to: Sequence[Tensor], sources: Sequence[Tensor], after: Any = None) -> float:
        return self._copy("up", to, sources)

    def wait(self, ticket: float) -> None:
        time.sleep(max(0.0, ticket - time.perf_counter()))

    def join(self) -> None:
        """Do nothing: the accelerator waits for uploads, not the host."""


class _Layer(torch.autograd.Function):
    """A layer whose backward sleeps for its share of the time, then has a gradient."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, grad: Tensor, model: Model) -> Tensor:
        ctx.grad, ctx.model = grad, model
        return hidden.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        time.sleep(ctx.model.seconds / len(ctx.model.weights))
        return grad, ctx.grad, None, None


class Model(nn.Module):
    """Layers that compute nothing; ``seconds`` is the length of their backward together."""

    def __init__(self, params: int, tensors: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        values = [torch.randn(2, params // tensors).bfloat16() for _ in range(tensors)]
        self.weights = nn.ParameterList(value[0].clone() for value in values)
        self.grads = [1e-3 * value[1] for value in values]
        self.seconds = 0.0

    def forward(self) -> Tensor:
        hidden = torch.zeros(1, requires_grad=True)
        for weight, grad in zip(self.weights, self.grads, strict=True):
            hidden = _Layer.apply(hidden, weight, grad, self)  # type: ignore[no-untyped-call]
        return hidden.sum()


@dataclass
class Run:
    """One mode's model with its measured seconds and hidden shares, one a round."""

    model: Model
    optimizer: MegatronOptimizer
    step: list[float] = field(default_factory=list)
    whole: list[float] = field(default_factory=list)
    hidden: list[float] = field(default_factory=list)

    def once(self, seconds: float) -> None:
        """Take a forward, a backward of ``seconds``, and a step."""
        self.model.seconds = seconds
        self.optimizer.zero_grad()
        loss = self.model()
        started = time.perf_counter()
        loss.backward()
        between = time.perf_counter()
        self.optimizer.step()
        ended = time.perf_counter()
        metrics = self.optimizer.metrics()
        self.step.append(ended - between)
        self.whole.append(ended - started)
        self.hidden.append(metrics["hidden_ms"] / max(metrics["host_ms"], 1e-9))


def build(options: Options, rate: float, clip: str, mode: str) -> Run:
    """Return a model in one mode, over a bus of ``rate`` GB/s."""
    model = Model(int(options.params), options.tensors)
    config = OptimizerConfig(
        lr=1e-3,
        bf16=True,
        clip_grad=CLIP[clip],
        optimizer_cpu_offload=True,
        optimizer_offload_fraction=1.0,
        overlap_cpu_optimizer_d2h_h2d=True,
        offload_mode=mode,
    )
    optimizer = get_megatron_optimizer(config, model)
    if rate:
        (part,) = optimizer.chained_optimizers
        part.optimizer.stepper.use_transfer(Bus(rate))
    return Run(model, optimizer)


def measure(options: Options, rate: float, clip: str) -> Section:
    """Return visible milliseconds of ``step()`` and hidden shares, by mode and length of backward.

    Lengths are in steps of ``sync``, measured first. The modes take turns.
    """
    runs = {mode: build(options, rate, clip, mode) for mode in MODES}
    for _ in range(3):
        for run in runs.values():
            run.once(0.0)
    alone = statistics.median(runs["sync"].step)
    size = f"{options.params / 1e6:g} M parameters in {options.tensors} tensors"
    bus = f"bus {rate:g} GB/s" if rate else "no bus"
    section = Section(f"{size}, backward sleeps, {bus}, clipping {clip}")
    for length in options.lengths:
        for run in runs.values():
            run.step.clear(), run.whole.clear(), run.hidden.clear()
        for _ in track(range(options.rounds), description=f"{clip}, {length:g}", transient=True):
            for run in runs.values():
                run.once(length * alone)
        for mode, run in runs.items():
            shorter = [a / b for a, b in zip(runs["sync"].step, run.step, strict=True)]
            section.rows[f"{mode}, backward {length:g} steps"] = {
                "ms": 1e3 * statistics.median(run.step),
                "hidden": statistics.median(run.hidden),
                "step_shorter": statistics.median(shorter),
                "iteration_ms": 1e3 * statistics.median(run.whole),
            }
    return section


def draw(section: Section, path: Path) -> None:
    """Draw bars of the visible milliseconds in groups, one for each length of backward."""
    lengths = list(dict.fromkeys(name.split(", backward ")[1] for name in section.rows))
    figure, axes = plt.subplots(figsize=(8, 1.2 * len(lengths) + 1.4), layout="constrained")
    for place, (mode, color) in enumerate(MODES.items()):
        rows = [section.rows[f"{mode}, backward {length}"] for length in lengths]
        heights = [group + 0.28 * (place - 1) for group in range(len(lengths))]
        bars = axes.barh(heights, [row["ms"] for row in rows], 0.26, color=color, label=mode)
        texts = [f"{row['ms']:.1f} ms, {row['hidden']:.0%} hidden" for row in rows]
        axes.bar_label(bars, texts, padding=4, fontsize=8)
    axes.set_yticks(range(len(lengths)), [f"backward as\nlong as {n}" for n in lengths])
    axes.invert_yaxis()
    axes.set_title(section.title, loc="left", fontsize=9)
    axes.set_xlabel("milliseconds that step() takes, less is better")
    axes.legend(title="offload_mode", loc="upper right", fontsize=8)
    axes.margins(x=0.45)
    figure.savefig(path, dpi=150)
    plt.close(figure)


def main(options: Options) -> None:
    """Measure every bus, with the first one every kind of clipping."""
    require_kernels()
    console, found = Console(), []
    for rate in options.bus:
        for clip in CLIP if rate == options.bus[0] else ("off",):
            found.append(measure(options, rate, clip))
            report.show(console, found[-1])
            gc.collect()
    if options.output is not None:
        options.output.mkdir(parents=True, exist_ok=True)
        (options.output / "overlap.md").write_text(report.tables(found), encoding="utf-8")
        draw(found[0], options.output / "overlap.png")


if __name__ == "__main__":
    main(tyro.cli(Options, description=__doc__))
