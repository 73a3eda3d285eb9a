#!/usr/bin/env python
"""Train a small language model over bytes with an mp_optim optimizer.

python tools/train.py --config tools/configs/quickstart.yaml --optimizer.lr 2e-3

torchrun --nproc-per-node 2 tools/train.py --config tools/configs/quickstart.yaml --run.layout zero1

Ctrl-C saves a checkpoint; the same command with --resume goes on from there, with a larger
--run.steps beyond the end.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

from rich.console import Console

from training import ranks
from training.config import TrainConfig
from training.display import Progress, params_in_words, print_summary
from training.interruption import STATUS, Interruption
from training.loading import parse_command_line
from training.loop import Trainer, train
from training.metrics import JsonLines, Observer, TrainResult, read_records
from training.plot import plot_health, plot_losses


def main(config: TrainConfig, console: Console) -> TrainResult:
    """Train with everything shown and written to `run.output_dir`."""
    output = Path(config.run.output_dir)
    metrics, figure = output / "metrics.jsonl", output / "loss.png"
    trainer = _trainer(config)
    observers: list[Callable[[Trainer], Observer]] = []
    if ranks.rank() == 0:  # the first process shows and writes
        _introduce(trainer, console)
        observers = [
            lambda t: JsonLines(metrics, t.step),
            lambda t: Progress(console, config.run.steps),
        ]
    with Interruption() as interruption:
        result = train(config, observers, trainer, lambda: interruption.asked)
    if result.interrupted:
        if ranks.rank() == 0:
            console.print(
                f"interrupted after step {trainer.step} of {config.run.steps}, saved to "
                f"{result.checkpoint}: the same command with --resume goes on",
                highlight=False,
                soft_wrap=True,
            )
        sys.exit(STATUS)
    if ranks.rank() > 0:
        return result
    history = read_records(metrics)
    if history:
        plot_losses(history, figure, f"{config.model.family}, {params_in_words(result.num_params)}")
        if any(record.health for record in history):
            plot_health(history, output / "health.png")
    result.paths = {"metrics": metrics, "figure": figure}
    if result.checkpoint is not None:
        result.paths["checkpoint"] = result.checkpoint
    print_summary(console, result, history)
    return result


def _trainer(config: TrainConfig) -> Trainer:
    if config.optimizer.lr is None:
        sys.exit(
            "there is no learning rate: give --optimizer.lr 1e-3, or --config FILE, such as "
            "tools/configs/quickstart.yaml"
        )
    try:
        return Trainer(config)
    except (
        ValueError,
        TypeError,
        RuntimeError,
    ) as error:  # a setting that does not fit the model or another one
        sys.exit(f"{type(error).__name__}: {error}")


def _introduce(trainer: Trainer, console: Console) -> None:
    run, family = trainer.config.run, trainer.config.model.family
    console.print(
        f"{family}, {params_in_words(trainer.num_params)}, on {trainer.device}", highlight=False
    )
    console.print(str(trainer.optimizer.describe()), markup=False, highlight=False)
    if run.resume and trainer.checkpoint is None:
        console.print("no checkpoint yet: starting afresh")
    elif run.resume and trainer.step >= run.steps:
        console.print(f"all {trainer.step} steps were done: --run.steps N goes on to step N")
    elif run.resume:
        console.print(f"resuming at step {trainer.step} of {run.steps}")


if __name__ == "__main__":
    try:
        main(parse_command_line(), Console())
    except KeyboardInterrupt:
        sys.exit(STATUS)
