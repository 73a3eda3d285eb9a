#!/usr/bin/env python
"""Train a small language model over bytes with an mp_optim optimizer.

python tools/train.py --config tools/configs/quickstart.yaml --optimizer.optimizer-offload-fraction
1.0 torchrun --nproc-per-node 2 tools/train.py --config tools/configs/quickstart.yaml --run.layout
zero1
"""

from __future__ import annotations

import sys
from pathlib import Path

from rich.console import Console

from training import ranks
from training.config import TrainConfig
from training.display import LiveProgress, print_summary
from training.loading import parse_command_line
from training.loop import Trainer, train
from training.metrics import JsonLines, TensorBoard, TrainResult, read_records
from training.plot import plot_losses


def main(config: TrainConfig, console: Console) -> TrainResult:
    """Train with everything shown and written to `run.output_dir`."""
    output = Path(config.run.output_dir)
    metrics, figure = output / "metrics.jsonl", output / "loss.png"
    try:
        trainer = Trainer(config)
    except (
        ValueError,
        TypeError,
        RuntimeError,
    ) as error:  # a setting that does not fit the model or another one
        sys.exit(f"{type(error).__name__}: {error}")
    if ranks.rank() > 0:  # the first process shows and writes
        return train(config, trainer=trainer)
    console.print(
        f"{config.model.family}, {trainer.num_params / 1e6:.2f} M params, on {trainer.device}",
        highlight=False,
    )
    console.print(str(trainer.optimizer.describe()), markup=False, highlight=False)
    if config.run.resume:
        console.print(
            f"resuming at step {trainer.step}"
            if trainer.checkpoint
            else "no checkpoint yet: starting afresh"
        )
    result = train(
        config,
        observers=[
            lambda t: JsonLines(metrics, t.step),
            lambda t: TensorBoard(output / "tensorboard", t.step),
            lambda t: LiveProgress(console, t.step, config.run.steps),
        ],
        trainer=trainer,
    )
    history = read_records(metrics)
    if history:
        plot_losses(
            history,
            figure,
            f"{config.model.family}, {result.num_params / 1e6:.1f} M params",
        )
    result.paths = {
        "metrics": metrics,
        "figure": figure,
        "tensorboard": output / "tensorboard",
    }
    if result.checkpoint is not None:
        result.paths["checkpoint"] = result.checkpoint
    print_summary(console, result, history)
    return result


if __name__ == "__main__":
    main(parse_command_line(), Console())
