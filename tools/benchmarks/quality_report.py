"""The outcome of training with every form of state, as a table and a picture."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt


def write(folder: Path, runs: Sequence[dict[str, Any]], steps: int) -> None:
    """quality.md and quality.png; the first form is what the others are compared with."""
    folder.mkdir(parents=True, exist_ok=True)
    forms = list(dict.fromkeys(run["form"] for run in runs))
    (folder / "quality.md").write_text(_table(forms, runs, steps))
    _draw(folder / "quality.png", forms, runs)


def _table(forms: Sequence[str], runs: Sequence[dict[str, Any]], steps: int) -> str:
    base = [run["eval_loss"] for run in runs if run["form"] == forms[0]]
    lines = [
        f"Held-out loss (nats per byte) after {steps:,} steps, {len(base)} seeds. Spread of "
        f"{forms[0]} over the "
        f"seeds: {min(base):.4f} to {max(base):.4f}.",
        "",
        "| state | mean | per seed | mean within the spread |",
        "|---|---|---|---|",
    ]
    for form in forms:
        found = [run["eval_loss"] for run in runs if run["form"] == form]
        mean = statistics.mean(found)
        inside = "yes" if min(base) <= mean <= max(base) else "lower" if mean < min(base) else "no"
        lines.append(
            f"| {form} | {mean:.4f} | {', '.join(f'{value:.4f}' for value in found)} | {inside} |"
        )
    return "\n".join(lines) + "\n"


def _draw(path: Path, forms: Sequence[str], runs: Sequence[dict[str, Any]]) -> None:
    figure, axes = plt.subplots(figsize=(8, 4.5), layout="constrained")
    for form in forms:
        curves = [_smooth(run["losses"]) for run in runs if run["form"] == form]
        axes.plot(
            [statistics.mean(values) for values in zip(*curves, strict=True)],
            label=form,
            linewidth=1,
        )
    axes.set(xlabel="step", ylabel="training loss (mean of 50 steps and all seeds)")
    axes.legend(fontsize=7)
    figure.savefig(path, dpi=120)
    plt.close(figure)


def _smooth(losses: Sequence[float], width: int = 50) -> list[float]:
    return [statistics.mean(losses[max(0, at - width + 1) : at + 1]) for at in range(len(losses))]
