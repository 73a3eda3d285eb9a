#!/usr/bin/env python
"""What averages of the weights cost in a step on the host: python tools/benchmark_averages.py

The whole bf16 step (norm, clip, AdamW, FP32 and bf16 parameters) without averages and with them in
both dtypes, in turn in one process."""

from __future__ import annotations

import tyro
from measuring.steps import Form, compare_steps

COMPACT = {"ema_decay": 0.999, "ema_dtype": "bfloat16", "stochastic_rounding": True}
FORMS = {"none": Form(30), "float32": Form(38, {"ema_decay": 0.999}), "bfloat16": Form(34, COMPACT)}
"""By dtype of the averages."""


def main(params: float = 100e6, rounds: int = 15) -> None:
    """Print milliseconds of a step, and ratios to a step without averages.

    Args:
        params: parameters of the model.
        rounds: steps of each, after one that is not counted.
    """
    compare_steps("averages", FORMS, int(params), rounds)


if __name__ == "__main__":
    tyro.cli(main)
