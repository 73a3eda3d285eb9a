#!/usr/bin/env python
"""CPU time of a step of many LoRA adapters, and of one AdamW over as many elements.

Usage: python tools/measure_tenants.py --tenants 64 --layers 32 --width 4096 --rank 8 --modules 2
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch
from torch import nn

import mp_optim


def lora(pairs: int, width: int, rank: int) -> list[nn.Parameter]:
    """Return bf16 parameters of an adapter, with gradients."""
    params = []
    for shape in [(rank, width), (width, rank)] * pairs:
        params.append(nn.Parameter((torch.randn(shape) * 0.02).bfloat16()))
        params[-1].grad = (torch.randn(shape) * 0.01).bfloat16()
    return params


def cpu_time(step: Callable[[], object]) -> float:
    start = time.process_time()
    step()
    return time.process_time() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    sizes = {"tenants": 64, "layers": 32, "width": 4096, "rank": 8, "modules": 2, "rounds": 21}
    for name, default in sizes.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    given = parser.parse_args()
    tenants = mp_optim.MultiTenantOptimizer(lr=1e-3, max_grad_norm=1.0)
    every: list[nn.Parameter] = []
    for number in range(given.tenants):  # Alternate, so that both have memory of the same kind.
        shape = given.layers * given.modules, given.width, given.rank
        tenants.add_tenant(str(number), lora(*shape))
        every += lora(*shape)
    one = mp_optim.AdamW(every, lr=1e-3, max_grad_norm=1.0)
    steps: list[Callable[[], object]] = [tenants.step, one.step]
    rounds = [list(map(cpu_time, steps)) for _ in range(given.rounds + 2)][2:]
    ratios = statistics.quantiles([many / alone for many, alone in rounds])
    print(
        f"{len(every) // given.tenants} tensors, {sum(map(torch.numel, every)) / 1e6:.0f} million "
        f"elements in all: {ratios[1]:.2f} ({ratios[0]:.2f} to {ratios[2]:.2f}) times one optimizer"
    )


if __name__ == "__main__":
    main()
