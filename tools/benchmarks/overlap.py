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

import matplotlib.pyplot as plt
from rich.progress import track

from benchmarks import report, simulated_backward
from benchmarks.section import Section
from benchmarks.simulated_backward import Model, Setting
from mp_optim import MegatronOptimizer

MODES = ("sync", "overlap", "speculative")


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
    return Run(*simulated_backward.build(setting, mode), [], [], [])


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
        for _ in track(range(rounds), description=f"{setting.title}, {length:g}", transient=True):
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
    (folder / "overlap.json").write_text(json.dumps(values, indent=1) + "\n", encoding="utf-8")
    (folder / "overlap.md").write_text(report.tables(sections), encoding="utf-8")
    _plot(sections[0], folder / "overlap.png")


def _plot(section: Section, path: Path) -> None:
    """Bars in groups, one for each length of backward."""
    lengths = list(dict.fromkeys(name.split(", backward ")[1] for name in section.rows))
    shades = {"sync": "#bdbdbd", "overlap": "#6baed6", "speculative": "#08519c"}
    figure, axes = plt.subplots(figsize=(8, 1.2 * len(lengths) + 1.4), dpi=150)
    for place, (mode, shade) in enumerate(shades.items()):
        rows = [section.rows[f"{mode}, backward {length}"] for length in lengths]
        heights = [group + 0.28 * (place - 1) for group in range(len(lengths))]
        bars = axes.barh(heights, [row["ms"] for row in rows], 0.26, color=shade, label=mode)
        texts = [f"{row['ms']:.1f} ms, {row['hidden']:.0%} hidden" for row in rows]
        axes.bar_label(bars, texts, padding=4, fontsize=8)
    axes.set_yticks(range(len(lengths)), [f"backward as\nlong as {n}" for n in lengths])
    axes.invert_yaxis()
    axes.set_title(section.title, loc="left", fontsize=9)
    axes.set_xlabel("milliseconds that step() takes, less is better")
    axes.legend(title="offload_mode", loc="upper right", fontsize=8, title_fontsize=8)
    axes.spines[["top", "right"]].set_visible(False)
    axes.margins(x=0.45)
    figure.tight_layout()
    figure.savefig(path)
    plt.close(figure)
