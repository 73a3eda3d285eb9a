#!/usr/bin/env python
"""Train one small mixture of experts with AdamW and with Muon, each at the best of several learning
rates.

python tools/benchmark_muon.py --steps 300 --output docs/benchmarks
"""

from __future__ import annotations

import dataclasses
import json
import os
import statistics
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
import tyro
from benchmark_quality import run_config
from measuring.kernels import require_kernels
from rich.progress import track

from mp_optim.kernels.native_library import set_host_threads
from training.config import TrainConfig
from training.loop import train

RULES: dict[str, dict[str, Any]] = {
    "AdamW": {},
    "Muon": {"optimizer": "muon", "muon_extra_scale_factor": 0.2, "muon_use_nesterov": True},
}
"""Settings by name. With this scale Muon's steps are about as long as AdamW's, so one learning rate
serves both rules of the stack, and both contenders have one number to tune."""


@dataclass
class Options:
    """What to train."""

    steps: int = 300
    rates: tuple[float, ...] = (1e-3, 2e-3, 4e-3, 8e-3, 16e-3)
    """Learning rates that each contender is tried at, with the first seed."""
    seeds: int = 3
    """Runs at the best of them."""
    jobs: int = os.cpu_count() or 1
    """Runs at a time, one thread each."""
    output: Path | None = None
    """Folder for muon.json and muon.md."""


@dataclass(frozen=True)
class Run:
    """One training run and its outcome: held-out loss at the end, and the training losses."""

    rule: str
    lr: float
    seed: int
    eval_loss: float
    losses: list[float]


def config_of(rule: str, lr: float, seed: int, steps: int) -> TrainConfig:
    """The mixture of experts of ``benchmark_quality.py`` with another rule and learning rate."""
    config = run_config("FP32", seed, steps)
    optimizer = dataclasses.replace(config.optimizer, lr=lr, min_lr=lr / 10, **RULES[rule])
    return dataclasses.replace(config, optimizer=optimizer)


def run_one(job: tuple[str, float, int, int]) -> Run:
    """Train once, on one thread."""
    torch.set_num_threads(1)
    set_host_threads(1)
    rule, lr, seed, steps = job
    records = train(config_of(rule, lr, seed, steps)).records
    return Run(
        rule,
        lr,
        seed,
        float(records[-1].eval_loss or float("nan")),
        [record.loss for record in records],
    )


def report(runs: Sequence[Run], best: dict[str, float], steps: int) -> str:
    """Two tables: every learning rate with the first seed, and the best ones over the seeds."""
    rates, first = sorted({run.lr for run in runs}), runs[0].seed
    lines = [
        f"Held-out loss (nats per byte) after {steps} steps, by learning rate:",
        "",
        f"| | {' | '.join(f'{lr:g}' for lr in rates)} |",
        "|---" * (len(rates) + 1) + "|",
    ]
    for rule in best:
        found = {run.lr: run.eval_loss for run in runs if run.rule == rule and run.seed == first}
        lines.append(
            f"| {rule} | {' | '.join(f'{found[lr]:.4f}' if lr in found else '' for lr in rates)} |"
        )
    marks = [at for at in (100, 200, 300, 500, 1000) if at <= steps]
    lines += [
        "",
        "At the best rate, over the seeds; training loss as the mean of the 20 steps before:",
        "",
        f"| | lr | {' | '.join(f'step {at}' for at in marks)} | held out | per seed |",
        "|---" * (len(marks) + 4) + "|",
    ]
    for rule, lr in best.items():
        mine = [run for run in runs if run.rule == rule and run.lr == lr]
        curve = [
            statistics.mean(statistics.mean(run.losses[at - 20 : at]) for run in mine)
            for at in marks
        ]
        held = [run.eval_loss for run in mine]
        lines.append(
            f"| {rule} | {lr:g} | {' | '.join(f'{value:.4f}' for value in curve)} | "
            f"{statistics.mean(held):.4f} | {', '.join(f'{value:.4f}' for value in held)} |"
        )
    return "\n".join(lines) + "\n"


def main(options: Options) -> None:
    require_kernels()
    first = 1000
    with ProcessPoolExecutor(options.jobs, mp_context=get_context("spawn")) as pool:
        jobs = [(rule, lr, first, options.steps) for rule in RULES for lr in options.rates]
        runs = list(track(pool.map(run_one, jobs), total=len(jobs), description="learning rates"))
        best = {
            rule: min((run for run in runs if run.rule == rule), key=lambda run: run.eval_loss).lr
            for rule in RULES
        }
        jobs = [
            (rule, lr, first + seed, options.steps)
            for rule, lr in best.items()
            for seed in range(1, options.seeds)
        ]
        runs += track(pool.map(run_one, jobs), total=len(jobs), description="seeds")
    text = report(runs, best, options.steps)
    print(text)
    if options.output is not None:
        options.output.mkdir(parents=True, exist_ok=True)
        (options.output / "muon.md").write_text(text)
        (options.output / "muon.json").write_text(
            json.dumps([dataclasses.asdict(run) for run in runs])
        )


if __name__ == "__main__":
    main(tyro.cli(Options, description=__doc__))
