"""Orthogonal factors of matrices by Newton-Schulz iterations, which consist of matrix products."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from mp_optim.config.rules import Polynomial
from mp_optim.host.calls import without_autocast
from mp_optim.kernels import choose_backend

_EPS = 1e-7
"""Smallest divisor of a matrix, as in torch.optim.Muon."""


def orthogonalize_each(
    stacks: Sequence[Tensor], polynomials: Sequence[Polynomial], method: str = "standard"
) -> None:
    """Replace each matrix U S V^T by approximately U V^T, so that its singular values are near 1.

    A matrix is first divided by its norm; a zero matrix stays 0. On a CPU, each matrix has separate
    products. On an accelerator, a stack of matrices is one batch. So the bits of a matrix do not
    depend on the other tensors of a call.

    Args:
        stacks: contiguous tensors on one device, shape (..., rows, columns), bfloat16 or float32;
            overwritten. The products have the same dtype.
        polynomials: coefficients of the steps (see :mod:`mp_optim.config.rules`).
        method: ``standard``, or ``gram`` for matrices at least twice as long as wide
            (:func:`~mp_optim.muon.newton_schulz.iterate_grams`).
    """
    filled = [stack for stack in stacks if stack.numel()]
    if not filled:
        return
    with _full_precision(filled[0].dtype), without_autocast(filled[0].device):
        for stack in filled:
            short, long = sorted(stack.shape[-2:])
            steps = iterate_grams if method == "gram" and long >= 2 * short else iterate
            whole = stack.view(-1, *stack.shape[-2:])
            for matrices in whole if stack.is_cpu or stack.dim() == 2 else [whole]:
                matrices.div_(_norms(matrices))
                if stack.size(-2) > short:
                    matrices = matrices.mT
                matrices.copy_(steps(matrices, polynomials))


def iterate(x: Tensor, polynomials: Sequence[Polynomial]) -> Tensor:
    """Return the result of all Newton-Schulz steps for one matrix or a stack.

    The order of operations defines the bits.

    Args:
        x: shape (rows, columns) or (n, rows, columns), with at least as many columns as rows; each
            matrix has norm 1.
        polynomials: coefficients (a, b, c) of each step.
    """
    for a, b, c in polynomials:
        gram = x @ x.mT
        x = _add_product(x, _add_product(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x


def iterate_grams(x: Tensor, polynomials: Sequence[Polynomial]) -> Tensor:
    """Return the result of all Newton-Schulz steps for one matrix or a stack, computed from X X^T.

    With G = X X^T, a step X <- (a I + b G + c G^2) X = P X changes G to P G P. So several steps are
    one product (... P2 P1) X, whose factor has products of the smaller side only. Rounding errors
    of the factor and of G differ, so in bfloat16 small singular values could grow without bound.
    Therefore G is computed from X again after the first step, and then after every second step. The
    method is from Zhang, Amsel, Chen and Dao (2026,
    https://dao-ailab.github.io/blog/2026/gram-newton-schulz/).

    Args:
        x: shape (rows, columns) or (n, rows, columns), with at least as many columns as rows; each
            matrix has norm 1.
        polynomials: coefficients (a, b, c) of each step.
    """
    starts = [0, *range(1, len(polynomials), 2)]
    for start, stop in zip(starts, [*starts[1:], len(polynomials)], strict=True):
        x = _factor(x @ x.mT, polynomials[start:stop]) @ x
    return x


def _factor(gram: Tensor, polynomials: Sequence[Polynomial]) -> Tensor:
    """Return the product of the factors P of one or two steps, computed from the matrix G before
    the first of these steps."""
    (a, b, c), *second = polynomials
    change = _add_product(gram, gram, gram, beta=b, alpha=c)
    factor = change.clone()
    factor.diagonal(dim1=-2, dim2=-1).add_(a)
    for next_a, next_b, next_c in second:
        half = _add_product(gram, gram, change, beta=a)
        gram = _add_product(half, change, half, beta=a)
        change = _add_product(gram, gram, gram, beta=next_b, alpha=next_c)
        factor = _add_product(factor, change, factor, beta=next_a)
    return factor


def _add_product(
    summand: Tensor, left: Tensor, right: Tensor, beta: float, alpha: float = 1.0
) -> Tensor:
    add_product = torch.addmm if summand.dim() == 2 else torch.baddbmm
    return add_product(summand, left, right, beta=beta, alpha=alpha)


def _norms(x: Tensor) -> Tensor:
    """Return Frobenius norms of at least 1e-7. The bits do not depend on the number of threads.

    Returns:
        Shape () for a matrix, (n, 1, 1) for a stack.
    """
    matrices = [x] if x.dim() == 2 else list(x)
    sums = choose_backend("auto", x.device)[0].sum_of_squares(matrices)
    norms = sums.sqrt().to(x.dtype).clamp_(min=_EPS)
    return norms[0] if x.dim() == 2 else norms[:, None, None]


@contextmanager
def _full_precision(dtype: torch.dtype) -> Iterator[None]:
    """Compute FP32 products of the block in FP32, even if the process allows TF32 or bfloat16."""
    if dtype != torch.float32:
        yield
        return
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)
