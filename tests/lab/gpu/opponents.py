"""Opponents of the whole mixed-precision step: Megatron-core's own optimizer, and the sequence of
operations that a training loop writes around a fused Adam."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from benchmarks import megatron
from benchmarks.opponents import Composite
from benchmarks.section import Step

ADAMS = ("torch fused AdamW", "apex FusedAdam", "Transformer Engine FusedAdam")


class Opponent(NamedTuple):
    """A contender of the whole step.

    Attributes:
        name: the row's label, made of its operations or of its library.
        wide: True if it reads FP32 gradients.
        build: takes bf16 params and gradients, and returns the step.
    """

    name: str
    wide: bool
    build: Callable[[list[Tensor], list[Tensor]], Step]


def opponents() -> Iterator[Opponent]:
    """Yield the sequence with each Adam; building one raises ImportError without its library."""
    for adam in ADAMS:
        name = f"unfused sequence: upcast, norm, clip, {adam}, downcast"
        yield Opponent(name, False, lambda *both, kind=adam: Composite(*both, kind).usual)


def megatron_core(wide: bool) -> Opponent:
    """Return Megatron-core's own optimizer, with the Adam that it finds.

    Args:
        wide: True for FP32 ``main_grad``, False for bf16.
    """
    name = f"Megatron-core with {megatron.adam()}, {'FP32' if wide else 'bf16'} main_grad"
    dtype = torch.float32 if wide else torch.bfloat16
    return Opponent(
        name,
        wide,
        lambda params, grads: megatron.megatron_step(
            params, [grad.to(dtype) for grad in grads], fused=True
        ),
    )
