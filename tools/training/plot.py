"""loss.png, and health.png: gradient norms, limits and updates."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes

from training.metrics import StepRecord

_LIMIT = "skip_limit/grad_norm"
_NORM = "param_grad_norm/"
_MOST_NAMED = 6
"""Parameters with a line of their own."""


def smoothed(values: Sequence[float], weight: float = 0.85) -> list[float]:
    """Return the exponential moving average without the start's bias."""
    result, average = [], 0.0
    for i, value in enumerate(values, start=1):
        average = weight * average + (1 - weight) * value
        result.append(average / (1 - weight**i))
    return result


def plot_losses(records: Sequence[StepRecord], path: Path, title: str) -> None:
    """Draw training loss, raw and smoothed, evaluation loss and skipped steps."""
    steps, losses = [r.step + 1 for r in records], [r.loss for r in records]
    evaluated = [(r.step + 1, r.eval_loss) for r in records if r.eval_loss is not None]
    figure, axes = plt.subplots(figsize=(8, 4.5), dpi=150, layout="constrained")
    axes.plot(steps, losses, color="#9ecae1", linewidth=0.8, label="train, each step")
    axes.plot(steps, smoothed(losses), color="#08519c", linewidth=2, label="train, smoothed")
    if evaluated:
        label = f"eval, last {evaluated[-1][1]:.3f}"
        axes.plot(*zip(*evaluated, strict=True), "o-", color="#e6550d", markersize=4, label=label)
    for record in records:
        if record.skipped:
            axes.axvline(record.step + 1, color="#969696", linewidth=0.6, linestyle=":")
    axes.set(xlabel="step", ylabel="loss (nats per byte)", xlim=(0, steps[-1]))
    axes.set_title(title, loc="left", fontsize=11)
    _finish(axes)
    figure.savefig(path)
    plt.close(figure)


def plot_health(records: Sequence[StepRecord], path: Path) -> None:
    """Draw the gradient norm with its limit, and the largest norms of parameters."""
    panels = [_draw_norms]
    if any(name.startswith(_NORM) for record in records for name in record.health):
        panels.append(_draw_param_norms)
    size = (8, 2.6 * len(panels))
    figure, rows = plt.subplots(
        len(panels), figsize=size, dpi=150, sharex=True, squeeze=False, layout="constrained"
    )
    for draw, axes in zip(panels, rows[:, 0], strict=True):
        draw(axes, records)
        _finish(axes)
    rows[-1, 0].set(xlabel="step", xlim=(0, records[-1].step + 1))
    figure.savefig(path)
    plt.close(figure)


def _finish(axes: Axes) -> None:
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize=7, loc="upper right", ncols=3)


def _draw_norms(axes: Axes, records: Sequence[StepRecord]) -> None:
    steps, missing = [r.step + 1 for r in records], math.nan
    norms = [missing if r.grad_norm is None else r.grad_norm for r in records]
    limits = [r.health.get(_LIMIT, missing) for r in records]
    skipped = [norm if r.skipped else missing for r, norm in zip(records, norms, strict=True)]
    axes.semilogy(steps, norms, color="#08519c", linewidth=0.9, label="norm")
    axes.semilogy(steps, limits, color="#e6550d", label="limit")
    axes.semilogy(steps, skipped, "x", color="#a50f15", markersize=6, label="skipped")
    axes.set(ylabel="gradient norm")


def _draw_param_norms(axes: Axes, records: Sequence[StepRecord]) -> None:
    """Draw the norms of the parameters that were among the largest most often."""
    counts = Counter(name for r in records for name in r.health if name.startswith(_NORM))
    for name, _ in counts.most_common(_MOST_NAMED):
        points = [(r.step + 1, r.health.get(name, math.nan)) for r in records]
        label = name.removeprefix(_NORM).removesuffix(".weight")
        axes.semilogy(*zip(*points, strict=True), ".", markersize=2, label=label)
    low, high = axes.get_ylim()
    axes.set(ylabel="norms of parameters", ylim=(low, 30 * high))  # room for names
