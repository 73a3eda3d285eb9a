"""loss.png."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

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
    axes.plot(
        steps, smoothed(losses), color="#08519c", linewidth=2, label="train, smoothed"
    )
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
            step,
            color="#969696",
            linewidth=0.6,
            linestyle=":",
            label="skipped" if i == 0 else None,
        )
    axes.set(xlabel="step", ylabel="loss (nats per byte)", xlim=(0, steps[-1]))
    axes.set_title(title, loc="left", fontsize=11)
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    figure.tight_layout()
    figure.savefig(path)
    plt.close(figure)
