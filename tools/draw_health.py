#!/usr/bin/env python
"""docs/images/health.png: a small language model meets bad batches and a layer that explodes, with
the rolling rule and without it. About two minutes on two CPU cores.

python tools/draw_health.py [FOLDER]
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import torch
from torch import Tensor

from mp_optim import OptimizerConfig
from training.config import DataConfig, ModelConfig, RunConfig, TrainConfig
from training.loop import Trainer, train
from training.metrics import StepRecord
from training.plot import draw_norms, draw_param_norms, draw_updates, smoothed, style

IMAGES = Path(__file__).parents[1] / "docs" / "images"
STEPS = 400
BAD_BATCHES = (180, 181, 182)
EXPLOSIONS = (280, 281)
FACTOR = 300.0
"""Of the outputs of the layer that explodes."""


class Spiked(Trainer):
    """A run in which some batches are noise, and a layer's outputs are multiplied in some steps."""

    def __init__(self, config: TrainConfig) -> None:
        super().__init__(config)
        layer = self.model.model.layers[1].mlp
        layer.register_forward_hook(self._explode)

    def _explode(self, module: object, inputs: object, output: Tensor) -> Tensor:
        is_due = self.step in EXPLOSIONS and torch.is_grad_enabled()
        return output * FACTOR if is_due else output

    def _loss(self, inputs: Tensor, targets: Tensor) -> Tensor:
        if self.step in BAD_BATCHES and torch.is_grad_enabled():
            noise = torch.Generator().manual_seed(self.step)
            targets = torch.randint(0, 256, targets.shape, generator=noise)
            return FACTOR * super()._loss(inputs, targets)
        return super()._loss(inputs, targets)


def run(sigma: float) -> list[StepRecord]:
    """Train, and skip what is more than so many sigma above the median."""
    settings: dict[str, Any] = {"lr": 3e-3, "clip_grad": 0.0, "bf16": True}
    config = TrainConfig(
        model=ModelConfig("llama", hidden_size=64, intermediate_size=128, num_layers=3),
        data=DataConfig(seq_length=64),
        optimizer=OptimizerConfig(
            **settings,
            skip_step_sigma_factor=sigma,
            log_param_grad_norms=5,
            log_update_ratios_interval=4,
        ),
        run=RunConfig(steps=STEPS, layout="single", device="cpu"),
    )
    return train(config, trainer=Spiked(config)).records


def draw(ruled: Sequence[StepRecord], bare: Sequence[StepRecord], path: Path) -> None:
    """The losses of both runs, and the health of the one with the rule."""
    figure, rows = plt.subplots(4, figsize=(8, 10), dpi=150, sharex=True)
    for records, color, label in (
        (bare, "#969696", "every step taken"),
        (ruled, "#08519c", "skip_step_sigma_factor=6"),
    ):
        taken = [record for record in records if not record.skipped]
        losses = smoothed([min(record.loss, 8.0) for record in taken])
        rows[0].plot([r.step + 1 for r in taken], losses, color=color, label=label)
    rows[0].set(ylabel="loss (nats per byte)")
    for axes, panel in zip(rows[1:], (draw_norms, draw_param_norms, draw_updates), strict=True):
        panel(axes, ruled)
    for axes in rows:
        style(axes)
    rows[-1].set(xlabel="step", xlim=(0, STEPS))
    figure.tight_layout()
    figure.savefig(path)
    plt.close(figure)


def main(folder: Path = IMAGES) -> None:
    draw(run(6.0), run(math.inf), folder / "health.png")


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
