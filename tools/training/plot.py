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


def smoothed(values: Sequence[float], weight: float = 0.85) -> list[float]:
    """Exponential moving average with the start's bias taken out."""
    result, average = [], 0.0
    for i, value in enumerate(values, start=1):
        average = weight * average + (1 - weight) * value
        result.append(average / (1 - weight**i))
    return result


def plot_losses(records: Sequence[StepRecord], path: Path, title: str) -> None:
    """Raw and smoothed training loss, evaluation loss, and the steps that were skipped, over
    steps."""
    steps, losses = [r.step + 1 for r in records], [r.loss for r in records]
    evaluated = [(r.step + 1, r.eval_loss) for r in records if r.eval_loss is not None]
    skipped = [r.step + 1 for r in records if r.skipped]
    figure, axes = plt.subplots(figsize=(8, 4.5), dpi=150)
    axes.plot(steps, losses, color="#9ecae1", linewidth=0.8, label="train, each step")
    axes.plot(steps, smoothed(losses), color="#08519c", linewidth=2, label="train, smoothed")
    if evaluated:
        x, y = zip(*evaluated, strict=True)
        axes.plot(
            x,
            y,
            color="#e6550d",
            marker="o",
            markersize=4,
            linewidth=1.2,
            label=f"eval, last {y[-1]:.3f}",
        )
    for i, step in enumerate(skipped):
        axes.axvline(
            step, color="#969696", linewidth=0.6, linestyle=":", label="skipped" if i == 0 else None
        )
    axes.set(xlabel="step", ylabel="loss (nats per byte)", xlim=(0, steps[-1]))
    axes.set_title(title, loc="left", fontsize=11)
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    figure.tight_layout()
    figure.savefig(path)
    plt.close(figure)


_LIMIT = "skip_limit/grad_norm"
_NORM = "param_grad_norm/"
_MOST_NAMED = 6
"""Parameters with a line of their own."""


def plot_health(records: Sequence[StepRecord], path: Path) -> None:
    """Gradient norm, its limit and the steps that were skipped; the parameters that had the largest
    norms; and how much of themselves steps added to the parameters."""
    panels = [draw_norms]
    if any(name.startswith(_NORM) for record in records for name in record.health):
        panels.append(draw_param_norms)
    if any("update_ratio" in record.health for record in records):
        panels.append(draw_updates)
    figure, rows = plt.subplots(
        len(panels), figsize=(8, 2.6 * len(panels)), dpi=150, sharex=True, squeeze=False
    )
    for draw, axes in zip(panels, rows[:, 0], strict=True):
        draw(axes, records)
        style(axes)
    rows[-1, 0].set(xlabel="step", xlim=(0, records[-1].step + 1))
    figure.tight_layout()
    figure.savefig(path)
    plt.close(figure)


def style(axes: Axes) -> None:
    """As all pictures are."""
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize=7, loc="upper right", ncols=3)


def draw_norms(axes: Axes, records: Sequence[StepRecord]) -> None:
    """The norm of all gradients, and above what a step is skipped."""
    known = [(r.step + 1, r.grad_norm) for r in records if r.grad_norm is not None]
    limits = [(r.step + 1, r.health.get(_LIMIT, math.inf)) for r in records]
    finite = [(step, limit) for step, limit in limits if math.isfinite(limit)]
    skipped = [(r.step + 1, r.grad_norm) for r in records if r.skipped]
    axes.semilogy(*zip(*known, strict=True), color="#08519c", linewidth=0.9, label="norm")
    if finite:
        axes.semilogy(*zip(*finite, strict=True), color="#e6550d", label="limit")
    if skipped:
        marks = zip(*skipped, strict=True)
        axes.semilogy(*marks, "x", color="#a50f15", markersize=6, label="skipped")
    axes.set(ylabel="gradient norm")


def draw_param_norms(axes: Axes, records: Sequence[StepRecord]) -> None:
    """The norms of those parameters that were among the largest most often."""
    counts = Counter(name for r in records for name in r.health if name.startswith(_NORM))
    for name, _ in counts.most_common(_MOST_NAMED):
        points = [(r.step + 1, r.health.get(name, math.nan)) for r in records]
        label = name.removeprefix(_NORM).removesuffix(".weight")
        axes.semilogy(*zip(*points, strict=True), ".", markersize=2, label=label)
    low, high = axes.get_ylim()
    axes.set(ylabel="norms of parameters", ylim=(low, 30 * high))  # room for names


def draw_updates(axes: Axes, records: Sequence[StepRecord]) -> None:
    """What the watched steps added to all parameters together, and to the one that changed most."""
    watched = [
        record
        for record in records
        if record.health.get("update_step") == record.step + 1 and not record.skipped
    ]
    steps = [r.step + 1 for r in watched]
    whole = [r.health["update_ratio"] for r in watched]
    axes.semilogy(steps, whole, color="#08519c", label="update / weight, all")
    ratios = [
        [value for name, value in r.health.items() if name.startswith("update_ratio/")]
        for r in watched
    ]
    if all(ratios) and ratios:
        axes.semilogy(steps, list(map(max, ratios)), color="#9ecae1", label="largest")
    axes.set(ylabel="update / weight")
