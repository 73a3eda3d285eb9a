"""The orthogonal factor of matrices by Newton-Schulz iterations, in products of matrices only."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from mp_optim.process.torch_modes import without_autocast
from mp_optim.update.sums import sum_of_squares

_EPS = 1e-7
"""Norms are taken to be no less; torch.optim.Muon's."""


def orthogonalize(
    matrices: Tensor,
    polynomials: Sequence[tuple[float, float, float]],
    dtype: torch.dtype,
) -> Tensor:
    """U V^T, roughly, of each matrix U S V^T: the singular values come near one, not to one.

    Args:
        matrices: shape (..., rows, columns).
        polynomials: the steps (see :mod:`mp_optim.config.muon`).
        dtype: of the products: bfloat16 or float32. Matrices are rounded to it first, then divided
            by their norm.

    Returns:
        The same shape, in ``dtype``; zeros for zeros. On a CPU each matrix by itself, so that the
        bits do not depend on which others are in the stack; elsewhere all matrices of a stack in
        one product.
    """
    if not matrices.numel():
        return torch.zeros_like(matrices, dtype=dtype)
    stack = matrices.reshape(-1, *matrices.shape[-2:])
    with _full_precision(dtype), without_autocast(stack.device):
        if stack.device.type == "cpu":
            done = torch.stack(
                [iterate(matrix.to(dtype, copy=True), polynomials) for matrix in stack]
            )
        else:
            done = iterate(stack.to(dtype, copy=True), polynomials)
    return done.view(matrices.shape)


def iterate(x: Tensor, polynomials: Sequence[tuple[float, float, float]]) -> Tensor:
    """One matrix, or a stack; overwrites its argument."""
    x.div_(_norms(x).clamp(min=_EPS))
    tall = x.size(-2) > x.size(-1)
    x = x.mT if tall else x
    add_product = torch.addmm if x.dim() == 2 else torch.baddbmm
    for a, b, c in polynomials:
        gram = x @ x.mT
        x = add_product(x, add_product(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return (x.mT if tall else x).contiguous()


def _norms(x: Tensor) -> Tensor:
    """Frobenius norms, by the sums that are the same for any number of threads."""
    if x.dim() == 2:
        return sum_of_squares([x])[0].sqrt().to(x.dtype)
    return sum_of_squares(list(x)).sqrt().to(x.dtype)[:, None, None]


@contextmanager
def _full_precision(dtype: torch.dtype) -> Iterator[None]:
    """FP32 products in FP32, whatever the process allows elsewhere (TF32, bfloat16)."""
    if dtype != torch.float32:
        yield
        return
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)
