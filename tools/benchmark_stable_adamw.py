#!/usr/bin/env python
"""What StableAdamW costs in a step on the host, and what Adam without a first moment saves: python
tools/benchmark_stable_adamw.py

The whole bf16 step (norm, clip, rule, FP32 and bf16 parameters) of AdamW, of AdamW with beta1 = 0
and of StableAdamW, in turn in one process."""

from __future__ import annotations

import tyro
from measuring.steps import Form, compare_steps

RULES = {
    "adam": Form(30),
    "adam, beta1 = 0": Form(22, {"adam_beta1": 0.0}),
    "stable_adamw": Form(36, {"optimizer": "stable_adamw"}),
}


def main(params: float = 100e6, rounds: int = 15) -> None:
    """Print milliseconds of a step, and ratios to AdamW's.

    Args:
        params: parameters of the model.
        rounds: steps of each, after one that is not counted.
    """
    compare_steps("rule", RULES, int(params), rounds)


if __name__ == "__main__":
    tyro.cli(main)
