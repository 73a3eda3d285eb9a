"""The orthogonal factor of matrices by Newton-Schulz iterations, in products of matrices only."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from mp_optim.config.muon import Polynomial
from mp_optim.process.torch_modes import without_autocast
from mp_optim.update.backends import choose_backend
from mp_optim.update.gram_newton_schulz import iterate_grams
from mp_optim.update.matrix_products import TOGETHER, Products
from mp_optim.update.matrix_rooms import Rooms
from mp_optim.update.product_bits import products_of

_EPS = 1e-7
"""Norms are taken to be no less; torch.optim.Muon's."""


def orthogonalize(
    matrices: Tensor, polynomials: Sequence[Polynomial], dtype: torch.dtype
) -> Tensor:
    """U V^T, roughly, of each matrix U S V^T: the singular values come near one, not to one.

    Args:
        matrices: shape (..., rows, columns).
        polynomials: the steps (see :mod:`mp_optim.config.muon`).
        dtype: of the products: bfloat16 or float32. Matrices are rounded to it first, then divided
            by their norm.

    Returns:
        The same shape, in ``dtype``; zeros for zeros. See :func:`orthogonalize_each`.
    """
    stack = matrices.to(dtype, copy=True).contiguous()
    return orthogonalize_each([stack], polynomials)[0]


def orthogonalize_each(
    stacks: Sequence[Tensor],
    polynomials: Sequence[Polynomial],
    method: str = "standard",
) -> list[Tensor]:
    """The same of many matrices, and stacks of them, of one dtype; overwrites them.

    Matrices of one shape go into products together, those that lie side by side without a copy.
    The bits of each are those that it has alone: where the library's are others in a batch, each
    is multiplied alone on a CPU, and each stack by itself elsewhere.

    Args:
        stacks: shapes (..., rows, columns), contiguous, on one device.
        method: ``standard``, or ``gram`` for matrices at least twice as long as wide
            (:func:`~mp_optim.update.gram_newton_schulz.iterate_grams`).

    Returns:
        Contiguous tensors of the same shapes.
    """
    done = list(stacks)
    shapes: dict[torch.Size, list[int]] = {}
    for index, stack in enumerate(stacks):
        if stack.numel():
            shapes.setdefault(stack.shape[-2:], []).append(index)
    if not shapes:
        return done
    rooms = Rooms(stacks[0].device, stacks[0].dtype)
    with _full_precision(rooms.dtype), without_autocast(rooms.device):
        for shape, indices in shapes.items():
            each = [stacks[index].view(-1, *shape) for index in indices]
            if method == "gram" and max(shape) >= 2 * min(shape):
                found = _by_grams(each, polynomials)
            else:
                found = _of_one_shape(each, polynomials, rooms)
            for index, result in zip(indices, found, strict=True):
                done[index] = result.view(stacks[index].shape)
    return done


def _by_grams(stacks: list[Tensor], polynomials: Sequence[Polynomial]) -> list[Tensor]:
    """In place; on a CPU of each matrix by itself, so that its bits do not depend on the others,
    elsewhere of each stack."""
    for stack in stacks:
        for batch in torch.split(stack, 1 if stack.is_cpu else len(stack)):
            iterate_grams(batch.div_(_norms(batch)), polynomials)
    return stacks


def _of_one_shape(
    stacks: list[Tensor], polynomials: Sequence[Polynomial], rooms: Rooms
) -> list[Tensor]:
    """The same of stacks of one shape of matrices, (n, rows, columns)."""
    home = rooms.side_by_side(stacks)
    lengths = [len(each) for each in stacks]
    for batch in torch.split(home, _together(home)):
        if products := products_of(batch):
            _iterate_together(batch, polynomials, products, rooms)
        elif home.is_cpu:
            for one in batch:
                one.copy_(iterate(one.clone(), polynomials))
        else:
            for stack in torch.split(home, lengths):
                stack.copy_(iterate(stack.clone(), polynomials))
            break
    return list(torch.split(home, lengths))


def _together(home: Tensor) -> int:
    """How many matrices of a batch are multiplied together: the most that is good for whoever does
    it; one where only what is alone has the bits of what is alone."""
    elements = home[0].numel()
    most = max(1, min(len(home), TOGETHER // elements))
    products = products_of(home[:most])
    if products is None:
        return 1 if home.is_cpu else len(home)
    return min(most, products.most(elements))


def _iterate_together(
    batch: Tensor, polynomials: Sequence[Polynomial], by: Products, rooms: Rooms
) -> None:
    """In place; of a tall batch from and to its transpose, as it lies."""
    spare = rooms.like("spare", batch)
    start, other = (spare, batch) if len(polynomials) % 2 else (batch, spare)
    x = torch.div(batch, _norms(batch), out=start)
    if _is_tall(batch):
        x, other = x.mT, other.view(x.mT.shape)
    for a, b, c in polynomials[:-1]:
        factor = by.square(by.gram(x, rooms), b, c, rooms)
        to = by.left(factor, x, a, other, rooms)
        x, other = to, start.view(to.shape) if x.data_ptr() == start.data_ptr() else x
    a, b, c = polynomials[-1]
    factor = by.square(by.gram(x, rooms), b, c, rooms)
    if not _is_tall(batch):
        by.left(factor, x, a, batch, rooms)
    elif len(polynomials) > 1 and by.turns:
        by.turned(factor, x, a, batch, rooms)
    else:
        wide = by.left(factor, x, a, rooms.take("wide", *x.shape), rooms)
        for matrix, turned in zip(batch, wide, strict=True):
            matrix.copy_(turned.mT)  # one by one torch does it in tiles


def _is_tall(x: Tensor) -> bool:
    return x.size(-2) > x.size(-1)


def iterate(x: Tensor, polynomials: Sequence[Polynomial]) -> Tensor:
    """One matrix, or a stack; overwrites its argument. The order of operations that defines the
    bits."""
    x.div_(_norms(x))
    tall = _is_tall(x)
    x = x.mT if tall else x
    add_product = torch.addmm if x.dim() == 2 else torch.baddbmm
    for a, b, c in polynomials:
        gram = x @ x.mT
        x = add_product(x, add_product(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return (x.mT if tall else x).contiguous()


def _norms(x: Tensor) -> Tensor:
    """Frobenius norms, not less than 1e-7, by the sums that are the same for any number of
    threads; shape () of a matrix, (n, 1, 1) of a stack."""
    matrices = [x] if x.dim() == 2 else list(x)
    sums = choose_backend("auto", x.device)[0].sum_of_squares(matrices)
    norms = sums.sqrt().to(x.dtype).clamp_(min=_EPS)
    return norms[0] if x.dim() == 2 else norms[:, None, None]


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
