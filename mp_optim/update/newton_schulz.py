"""The orthogonal factor of matrices by Newton-Schulz iterations, in products of matrices only."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from mp_optim.config.muon import Polynomial
from mp_optim.process.torch_modes import without_autocast
from mp_optim.update.backends import choose_backend
from mp_optim.update.backends.native_products import NativeProducts, NativeSteps
from mp_optim.update.gram_newton_schulz import iterate_grams
from mp_optim.update.matrix_products import TOGETHER, Products
from mp_optim.update.matrix_rooms import Rooms, side_by_side
from mp_optim.update.product_bits import kernels_of, products_of

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
    rooms: Rooms | None = None,
) -> list[Tensor]:
    """The same of many matrices, and stacks of them, of one dtype; overwrites them.

    Matrices of one shape go into products together, those that lie side by side without a copy.
    The bits of each are those that it has alone: where the library's are others in a batch, each
    is multiplied alone on a CPU, and each stack by itself elsewhere.

    Args:
        stacks: shapes (..., rows, columns), contiguous, on one device.
        method: ``standard``, or ``gram`` for matrices at least twice as long as wide
            (:func:`~mp_optim.update.gram_newton_schulz.iterate_grams`).
        rooms: memory for what is in between, of their device and dtype.

    Returns:
        Contiguous tensors of the same shapes.
    """
    done, shapes = list(stacks), _by_shape(stacks)
    if not shapes:
        return done
    rooms = rooms or Rooms(stacks[0].device, stacks[0].dtype)
    by_kernels: list[tuple[Tensor, NativeProducts]] = []
    with _full_precision(rooms.dtype), without_autocast(rooms.device):
        for shape, indices in shapes.items():
            each = [stacks[index] for index in indices]
            if _takes_grams(method, shape):
                _by_grams(each, polynomials)
                continue
            home = side_by_side(each)
            if kernels := kernels_of(home):
                by_kernels.append((home, kernels))
            else:
                _of_one_shape(home, each, polynomials, rooms)
            if home.data_ptr() != each[0].data_ptr():
                for index, result in zip(indices, _apart(home, each), strict=True):
                    done[index] = result
        if by_kernels:
            NativeSteps(by_kernels, polynomials, rooms).take()
    return done


def steps_in_place(
    stacks: Sequence[Tensor],
    polynomials: Sequence[Polynomial],
    method: str,
    rooms: Rooms,
) -> tuple[NativeSteps, list[list[int]]] | None:
    """What :func:`orthogonalize_each` would have the kernels do, and the indices of the tensors
    that each of their stacks consists of; None if there is nothing or something else to do."""
    found, shapes = [], _by_shape(stacks)
    for shape, indices in shapes.items():
        home = side_by_side([stacks[index] for index in indices])
        kernels = None if _takes_grams(method, shape) else kernels_of(home)
        if kernels is None or home.data_ptr() != stacks[indices[0]].data_ptr():
            return None
        found.append((home, kernels))
    if not found:
        return None
    return NativeSteps(found, polynomials, rooms), list(shapes.values())


def _by_shape(stacks: Sequence[Tensor]) -> dict[torch.Size, list[int]]:
    """Indices of what is not empty, by the shape of its matrices."""
    shapes: dict[torch.Size, list[int]] = {}
    for index, stack in enumerate(stacks):
        if stack.numel():
            shapes.setdefault(stack.shape[-2:], []).append(index)
    return shapes


def _takes_grams(method: str, shape: torch.Size) -> bool:
    return method == "gram" and max(shape) >= 2 * min(shape)


def _apart(home: Tensor, stacks: Sequence[Tensor]) -> Iterator[Tensor]:
    """Views of what was put side by side."""
    pieces = torch.split(home.view(-1), [each.numel() for each in stacks])
    return (piece.view(each.shape) for piece, each in zip(pieces, stacks, strict=True))


def _by_grams(stacks: Sequence[Tensor], polynomials: Sequence[Polynomial]) -> None:
    """In place; on a CPU of each matrix by itself, so that its bits do not depend on the others,
    elsewhere of each stack."""
    for stack in stacks:
        matrices = stack.view(-1, *stack.shape[-2:])
        for batch in torch.split(matrices, 1 if stack.is_cpu else len(matrices)):
            iterate_grams(batch.div_(_norms(batch)), polynomials)


def _of_one_shape(
    home: Tensor,
    stacks: Sequence[Tensor],
    polynomials: Sequence[Polynomial],
    rooms: Rooms,
) -> None:
    """In place, of matrices of one shape, (n, rows, columns), by torch's products."""
    for batch in torch.split(home, _together(home)):
        if products := products_of(batch):
            _iterate_together(batch, polynomials, products, rooms)
        elif home.is_cpu:
            for one in batch:
                one.copy_(iterate(one.clone(), polynomials))
        else:
            lengths = [each.numel() // home[0].numel() for each in stacks]
            for stack in torch.split(home, lengths):
                stack.copy_(iterate(stack.clone(), polynomials))
            break


def _together(home: Tensor) -> int:
    """How many matrices of a batch are multiplied together: one where only what is alone has the
    bits of what is alone."""
    most = max(1, min(len(home), TOGETHER // home[0].numel()))
    if products_of(home[:most]):
        return most
    return 1 if home.is_cpu else len(home)


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
