#!/usr/bin/env python
"""Train one small mixture of experts with every form of optimizer state, over several seeds.

python tools/benchmark_quality.py --steps 2000 --output build/quality
"""

from __future__ import annotations

import os
import statistics
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import matplotlib
import torch
import tyro
from measuring.kernels import require_kernels
from rich.progress import track

from mp_optim import OptimizerConfig
from mp_optim.kernels.native_library import set_host_threads
from training.config import DataConfig, ModelConfig, RunConfig, SchedulerConfig, TrainConfig
from training.loop import train

matplotlib.use("Agg")
import matplotlib.pyplot as plt


def _compact(moments: str, bits: int | str = 16, **more: Any) -> dict[str, Any]:
    remainder = {} if bits == 16 else {"param_remainder_bits": bits}
    dtypes = {"exp_avg_dtype": moments, "exp_avg_sq_dtype": moments}
    return {"use_precision_aware_optimizer": True, **dtypes, **remainder, **more}


FORMS: dict[str, dict[str, Any]] = {
    "FP32": {},
    "bf16 moments, 16-bit remainder": _compact("bfloat16"),
    "bf16 moments, 16-bit remainder, stochastic": _compact("bfloat16", stochastic_rounding=True),
    "fp16 moments, 16-bit remainder": _compact("float16"),
    "8-bit moments, 16-bit remainder": _compact("uint8"),
    "4-bit and 8-bit moments, 16-bit remainder": {**_compact("uint8"), "exp_avg_dtype": "uint4"},
    "8-bit moments, 8-bit remainder": _compact("uint8", 8),
    "8-bit moments, 8-bit remainder, stochastic": _compact("uint8", 8, stochastic_rounding=True),
    "bf16 moments, no main params": _compact("bfloat16", 0, stochastic_rounding=True),
}
"""Forms of state by name; the others are compared with the first."""
FLOAT8 = {"float8 weights, a scale each": "tensor", "float8 weights, a scale a row": "row"}
"""Model weights in 8 bits by name, with the extent of their scales."""


@dataclass
class Options:
    """The forms to train; those of float8 weights have to be named."""

    steps: int = 2000
    seeds: int = 3
    jobs: int = os.cpu_count() or 1
    """Runs at a time, one thread each."""
    lr: float = 3e-3
    """The highest learning rate, which falls to a tenth."""
    forms: tuple[str, ...] = tuple(FORMS)
    output: Path | None = None
    """Folder for quality.md and quality.png."""


@dataclass(frozen=True)
class Run:
    """One training run: held-out loss at the end, and the training losses."""

    form: str
    eval_loss: float
    losses: list[float]


def run_config(form: str, seed: int, steps: int, lr: float = 3e-3) -> TrainConfig:
    """Return a mixture of experts small enough to train often."""
    return TrainConfig(
        model=ModelConfig(
            hidden_size=64,
            intermediate_size=128,
            num_layers=2,
            num_heads=4,
            num_kv_heads=2,
            num_experts=4,
            num_experts_per_tok=2,
            float8_weights=FLOAT8.get(form, "none"),
        ),
        data=DataConfig(source="stdlib", seq_length=128, max_megabytes=16.0),
        optimizer=OptimizerConfig(
            lr=lr,
            min_lr=lr / 10,
            weight_decay=0.1,
            adam_beta2=0.99,
            clip_grad=1.0,
            bf16=True,
            **FORMS.get(form, {}),
        ),
        scheduler=SchedulerConfig(lr_warmup_steps=steps // 20),
        run=RunConfig(
            steps=steps,
            global_batch_size=8,
            micro_batch_size=8,
            seed=seed,
            device="cpu",
            eval_interval=steps,
            eval_batches=64,
        ),
    )


def run_one(job: tuple[str, int, int, float]) -> Run:
    """Train once, on one thread."""
    torch.set_num_threads(1)
    set_host_threads(1)
    records = train(run_config(*job)).records
    losses = [record.loss for record in records]
    return Run(job[0], float(records[-1].eval_loss or float("nan")), losses)


def table(runs: Sequence[Run], forms: Sequence[str], steps: int) -> str:
    """Return the held-out losses by form, next to the spread of the first form's."""
    base = [run.eval_loss for run in runs if run.form == forms[0]]
    lines = [
        f"Held-out loss (nats per byte) after {steps:,} steps, {len(base)} seeds. Spread of "
        f"{forms[0]} over the seeds: {min(base):.4f} to {max(base):.4f}.",
        "",
        "| state | mean | per seed | mean within the spread |",
        "|---|---|---|---|",
    ]
    for form in forms:
        found = [run.eval_loss for run in runs if run.form == form]
        mean = statistics.mean(found)
        inside = "yes" if min(base) <= mean <= max(base) else "lower" if mean < min(base) else "no"
        seeds = ", ".join(f"{value:.4f}" for value in found)
        lines.append(f"| {form} | {mean:.4f} | {seeds} | {inside} |")
    return "\n".join(lines) + "\n"


def draw(runs: Sequence[Run], forms: Sequence[str], path: Path, width: int = 50) -> None:
    """Draw the training losses, each the mean of ``width`` steps and all seeds."""
    figure, axes = plt.subplots(figsize=(8, 4.5), layout="constrained")
    for form in forms:
        curves = [run.losses for run in runs if run.form == form]
        means = [statistics.mean(values) for values in zip(*curves, strict=True)]
        ends = range(1, len(means) + 1)
        smooth = [statistics.mean(means[max(0, end - width) : end]) for end in ends]
        axes.plot(smooth, label=form, linewidth=1)
    axes.set(xlabel="step", ylabel=f"training loss (mean of {width} steps and all seeds)")
    axes.legend(fontsize=7)
    figure.savefig(path, dpi=120)
    plt.close(figure)


def main(options: Options) -> None:
    """Train every form with every seed; print the table, and write it with a picture."""
    require_kernels()
    jobs = [
        (form, 1000 + seed, options.steps, options.lr)
        for seed in range(options.seeds)
        for form in options.forms
    ]
    with ProcessPoolExecutor(options.jobs, mp_context=get_context("spawn")) as pool:
        runs = list(track(pool.map(run_one, jobs), total=len(jobs), description="training"))
    text = table(runs, options.forms, options.steps)
    print(text)
    if options.output is not None:
        options.output.mkdir(parents=True, exist_ok=True)
        (options.output / "quality.md").write_text(text)
        draw(runs, options.forms, options.output / "quality.png")


if __name__ == "__main__":
    main(tyro.cli(Options, description=__doc__))
