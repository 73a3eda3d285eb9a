"""How much of the host's work each offload mode hides: a model whose backward takes as long as it
is told to."""

from __future__ import annotations

import dataclasses
import json
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import torch
from rich.progress import track
from torch import Tensor, nn

from benchmarks import report
from benchmarks.sections import Section
from mp_optim import (
    HybridDeviceOptimizer,
    MegatronOptimizer,
    OptimizerConfig,
    get_megatron_optimizer,
)

MODES = ("sync", "overlap", "speculative")
_CLIP = {"off": 0.0, "on, not firing": 1e9, "always firing": 1e-3}


@dataclass(frozen=True)
class Setting:
    """What is measured.

    Attributes:
        params, tensors: size of the model. backward: ``sleep`` or ``busy``. bus: GB/s, or 0. clip:
            see ``_CLIP``.
    """

    params: int
    tensors: int
    backward: str
    bus: float
    clip: str

    @property
    def title(self) -> str:
        bus = f"bus {self.bus:g} GB/s" if self.bus else "no bus"
        return (
            f"{self.params / 1e6:g} M parameters in {self.tensors} tensors, backward "
            f"{self.backward}s, {bus}, "
            f"clipping {self.clip}"
        )


class Bus:
    """A transfer that takes as long as a bus would: each direction is one lane, and copies queue up
    in it."""

    def __init__(self, gigabytes: float) -> None:
        self._rate = gigabytes * 1e9
        self._free_at = {"down": 0.0, "up": 0.0}

    def empty_host(self, num_bytes: int, pin: bool) -> Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8)

    def notes(self) -> tuple[str, ...]:
        return ()

    def mark(self) -> None: ...

    def _copy(
        self, lane: str, to: Sequence[Tensor], sources: Sequence[Tensor]
    ) -> float:
        started = max(time.perf_counter(), self._free_at[lane])
        for destination, source in zip(to, sources, strict=True):
            destination.copy_(source)
        self._free_at[lane] = (
            started + sum(source.nbytes for source in sources) / self._rate
        )
        return self._free_at[lane]

    def download(
        self, to: Sequence[Tensor], sources: Sequence[Tensor], after: Any = None
    ) -> float:
        return self._copy("down", to, sources)

    def upload(self, to: Sequence[Tensor], sources: Sequence[Tensor]) -> float:
        return self._copy("up", to, sources)

    def wait(self, ticket: float) -> None:
        time.sleep(max(0.0, ticket - time.perf_counter()))

    def join(self) -> None:
        """The accelerator waits for uploads, not the host."""


class _Layer(torch.autograd.Function):
    """Takes its share of the time of backward, then has a gradient."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, model: Model, index: int
    ) -> Tensor:
        ctx.model, ctx.index = model, index
        return hidden.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        ctx.model.work()
        return (
            grad,
            ctx.model.grads[ctx.index].view(ctx.model.weights[ctx.index].shape),
            None,
            None,
        )


class Model(nn.Module):
    """Layers that compute nothing and take time."""

    def __init__(self, setting: Setting) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        size = setting.params // setting.tensors
        self.weights = nn.ParameterList(
            torch.randn(size, generator=generator).bfloat16()
            for _ in range(setting.tensors)
        )
        self.grads = [
            torch.randn(size, generator=generator).mul_(1e-3).bfloat16()
            for _ in range(setting.tensors)
        ]
        self.seconds = 0.0
        self.is_busy = setting.backward == "busy"

    def work(self) -> None:
        """One layer's share of backward."""
        until = time.perf_counter() + self.seconds / len(self.weights)
        if not self.is_busy:
            time.sleep(max(0.0, until - time.perf_counter()))
            return
        small = torch.ones(
            64, 64
        )  # too small for a second thread, and in cache: it keeps one core busy
        while time.perf_counter() < until:
            small = (small @ small).clamp_(0.0, 1.0)

    def forward(self) -> Tensor:
        hidden = torch.zeros(1, requires_grad=True)
        for index, weight in enumerate(self.weights):
            hidden = _Layer.apply(hidden, weight, self, index)
        return hidden.sum()


@dataclass
class Run:
    """One mode's model and what was measured of it."""

    model: Model
    optimizer: MegatronOptimizer
    step: list[float]
    whole: list[float]
    hidden: list[float]

    def once(self, seconds: float) -> None:
        """Forward, backward of so many seconds, and step."""
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


def build(setting: Setting, mode: str) -> Run:
    """A model in one mode."""
    model = Model(setting)
    config = OptimizerConfig(
        lr=1e-3,
        bf16=True,
        clip_grad=_CLIP[setting.clip],
        optimizer_cpu_offload=True,
        optimizer_offload_fraction=1.0,
        overlap_cpu_optimizer_d2h_h2d=True,
        offload_mode=mode,
    )
    optimizer = get_megatron_optimizer(config, model)
    if setting.bus:
        _ride(optimizer, Bus(setting.bus))
    return Run(model, optimizer, [], [], [])


def _ride(optimizer: MegatronOptimizer, bus: Bus) -> None:
    """Send copies over a simulated bus."""
    for part in optimizer.chained_optimizers:
        assert isinstance(part.inner, HybridDeviceOptimizer)
        part.inner.stepper.use_transfer(bus)


def measure(setting: Setting, lengths: Sequence[float], rounds: int) -> Section:
    """Visible milliseconds of ``step()`` for each mode and length of backward, and how much is
    hidden.

    Lengths are in steps of ``sync``, measured first. The modes take turns.
    """
    runs = {mode: build(setting, mode) for mode in MODES}
    for _ in range(3):
        for run in runs.values():
            run.once(0.0)
    alone = statistics.median(runs["sync"].step)
    section = Section(setting.title, {}, {})
    for length in lengths:
        for run in runs.values():
            run.step.clear(), run.whole.clear(), run.hidden.clear()
        for _ in track(
            range(rounds), description=f"{setting.title}, {length:g}", transient=True
        ):
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


def write(folder: Path, sections: Sequence[Section]) -> None:
    """``overlap.json``, ``overlap.md`` and ``overlap.png``."""
    folder.mkdir(parents=True, exist_ok=True)
    values = {
        "machine": report.machine(),
        "sections": [dataclasses.asdict(section) for section in sections],
    }
    (folder / "overlap.json").write_text(
        json.dumps(values, indent=1) + "\n", encoding="utf-8"
    )
    (folder / "overlap.md").write_text(report.tables(sections), encoding="utf-8")
    _plot(sections[0], folder / "overlap.png")


def _plot(section: Section, path: Path) -> None:
    figure, axes = plt.subplots(figsize=(8, 0.45 * len(section.rows) + 1.2), dpi=150)
    names = list(section.rows)[::-1]
    shades = {"sync": "#bdbdbd", "overlap": "#6baed6", "speculative": "#08519c"}
    bars = axes.barh(
        names,
        [section.rows[name]["ms"] for name in names],
        color=[shades[name.split(",")[0]] for name in names],
    )
    axes.bar_label(
        bars,
        [
            f"{section.rows[n]['ms']:.1f} ms, {section.rows[n]['hidden']:.0%} hidden"
            for n in names
        ],
        padding=4,
        fontsize=8,
    )
    axes.set_title(section.title, loc="left", fontsize=9)
    axes.set_xlabel("visible milliseconds of step(), less is better")
    axes.spines[["top", "right"]].set_visible(False)
    axes.margins(x=0.3)
    figure.tight_layout()
    figure.savefig(path)
    plt.close(figure)
