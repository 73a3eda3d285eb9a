"""Newton-Schulz steps on X X^T: X, which is longer, is multiplied once in two steps.

With G = X X^T, a step X <- (a I + b G + c G^2) X = P X makes G <- P G P. So several steps are one
product (... P2 P1) X, of a factor that is made in products of the smaller side. Rounding makes the
factor and G drift apart, so that in bfloat16 small singular values can grow without bound; hence G
is made anew of X after the first step, and after every second one from there on. The method is
Zhang, Amsel, Chen and Dao's (2026, https://dao-ailab.github.io/blog/2026/gram-newton-schulz/).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from mp_optim.config.muon import Polynomial


def iterate_grams(batch: Tensor, polynomials: Sequence[Polynomial]) -> None:
    """Steps of a batch of matrices of norm 1, in place; shape (n, rows, columns)."""
    is_tall = batch.size(-2) > batch.size(-1)
    x = batch.mT if is_tall else batch
    for start, stop in _segments(len(polynomials)):
        factor = _factor(x @ x.mT, polynomials[start:stop])
        if stop < len(polynomials):
            x = factor @ x
        elif is_tall:
            batch.copy_(x.mT @ factor.mT)
        else:
            batch.copy_(factor @ x)


def _segments(steps: int) -> list[tuple[int, int]]:
    """The first step, then two at a time."""
    starts = [0, *range(1, steps, 2)]
    return list(zip(starts, [*starts[1:], steps], strict=True))


def _factor(gram: Tensor, polynomials: Sequence[Polynomial]) -> Tensor:
    """The product of the factors of one or two steps, of G at their start."""
    (a, b, c), *second = polynomials
    change = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)
    factor = change.clone()
    factor.diagonal(dim1=-2, dim2=-1).add_(a)
    for next_a, next_b, next_c in second:
        half = torch.baddbmm(gram, gram, change, beta=a)
        gram = torch.baddbmm(half, change, half, beta=a)
        change = torch.baddbmm(gram, gram, gram, beta=next_b, alpha=next_c)
        factor = torch.baddbmm(factor, change, factor, beta=next_a)
    return factor
