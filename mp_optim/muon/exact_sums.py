"""Exact sums of squares, with the same bits in any order and for any sharding of a parameter.

A square is split into two integers of 31 bits, relative to a power of two above the largest square.
The integers are summed separately, so only the final result is rounded. Squares below 2^-62 of the
largest square count as 0. Formulas: docs/numerics.md, "Exact sums".
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from mp_optim.core.partition import box_views, boxes
from mp_optim.core.tensor_layout import ShardRegion
from mp_optim.kernels.sums import Groups, reduce_over

_BITS = 31
_LOW = (1 << _BITS) - 1
_MOST = 1 << 21
"""Largest number of digits that FP64 adds without rounding, because 2^21 times 2^31 is
below 2^53."""

MatricesShape = tuple[int, int, int]


class MatrixBlock(NamedTuple):
    """A contiguous box of a stack of matrices.

    Attributes:
        values: elements, shape (matrices, rows, columns).
        matrix: index of the first matrix in the stack.
        row: index of the first row.
        column: index of the first column.
    """

    values: Tensor
    matrix: int
    row: int
    column: int


def matrices_shape(shape: Sequence[int]) -> MatricesShape:
    """Return a parameter's shape as a stack of matrices: (matrices, rows, columns).

    The last two dimensions are rows and columns. A parameter with one dimension is one row.
    """
    if len(shape) < 2:
        return 1, 1, math.prod(shape)
    return math.prod(shape[:-2]), shape[-2], shape[-1]


def matrix_blocks(region: ShardRegion, local: Tensor) -> list[MatrixBlock]:
    """Return a rank's elements of a parameter as blocks of matrices.

    Args:
        region: elements of the parameter that the rank has.
        local: contiguous tensor of these elements. The blocks are views of this tensor.
    """
    if not local.numel():
        return []
    if region.offsets is None:
        flat = local.view(-1)
        found = boxes(matrices_shape(region.shape), region.start, flat.numel())
        return [MatrixBlock(values, *box.offsets) for box, values in box_views(flat, found)]
    if local.dim() < 2:
        return [MatrixBlock(local.view(1, 1, -1), 0, 0, region.offsets[0] if region.offsets else 0)]
    return list(_boxed(local, region.offsets, region.shape, 0))


def _boxed(
    local: Tensor, offsets: tuple[int, ...], shape: torch.Size, matrix: int
) -> Iterator[MatrixBlock]:
    """Yield a box of a parameter as :class:`MatrixBlock` objects. The matrices of a block are
    neighbors in the parameter's stack of matrices.

    Args:
        local: elements of the box.
        offsets: first index of the box in each dimension of ``shape``.
        shape: shape of the parameter; in recursive calls, of its part at one index of the first
            dimensions.
        matrix: index, in the parameter's stack, of the first matrix of ``shape``.
    """
    rows, columns = local.shape[-2:]
    if local.dim() == 2:
        yield MatrixBlock(local[None], matrix, *offsets[-2:])
        return
    inner = math.prod(shape[1:-2])
    if local.shape[1:-2] == shape[1:-2]:
        yield MatrixBlock(local.view(-1, rows, columns), matrix + offsets[0] * inner, *offsets[-2:])
        return
    for index in range(local.shape[0]):
        first = matrix + (offsets[0] + index) * inner
        yield from _boxed(local[index], offsets[1:], shape[1:], first)


def piece_elements(device: torch.device) -> int:
    """Return the largest number of elements that :func:`digits_of` gets in one call.

    FP64 values of this number fit a CPU core's cache, or are enough to occupy an accelerator.
    """
    return 1 << 16 if device.type == "cpu" else _MOST


def digits_of(values: Tensor, top: float) -> tuple[Tensor, Tensor]:
    """Return the squares of FP32 values as two FP64 tensors of whole numbers below 2^31.

    Args:
        values: FP32 tensor.
        top: the largest magnitude of the parameter.
    """
    exponent = math.frexp(top)[1]
    squares = values.double().mul_(2.0**-exponent).square_().mul_(2.0**_BITS)
    high = squares.floor()
    return high, squares.sub_(high).mul_(2.0**_BITS).floor_()


def largest_magnitude(values: Tensor) -> Tensor:
    """Return the largest magnitude of contiguous FP32 values, FP32, shape ().

    The result is inf if a value is not finite, and 0 for an empty tensor.
    """
    if not values.numel():
        return torch.zeros((), dtype=torch.float32, device=values.device)
    low, high = torch.aminmax(values)
    top = torch.maximum(low.abs(), high.abs())
    return torch.where(top.isfinite(), top, torch.inf)


def row_digits(
    blocks: Sequence[MatrixBlock], top: float, shape: MatricesShape, device: torch.device
) -> Tensor:
    """Return the digits of each row's sum of squares: int64, shape (2, matrices, rows).

    Rows without elements on this rank have digits 0. So adding the digits of all ranks gives the
    digits of the whole rows.

    Args:
        blocks: this rank's elements.
        top: the largest magnitude of the whole parameter. With inf, all digits are 0.
        shape: shape of the parameter as a stack of matrices.
        device: device of the result.
    """
    by_row = torch.zeros(2, *shape[:2], dtype=torch.int64, device=device)
    for values, matrix, row, _ in blocks if math.isfinite(top) else ():
        deep, high, columns = values.shape
        sums = by_row.new_zeros(2, deep * high)
        wide = min(columns, piece_elements(device))
        together = max(1, piece_elements(device) // wide)
        for first, of_rows in enumerate(torch.split(values.view(-1, columns), together)):
            some = sums[:, first * together : (first + 1) * together]
            for piece in torch.split(of_rows, wide, dim=1):
                for digit, digits in enumerate(digits_of(piece, top)):
                    some[digit] += digits.sum(1).long()
        by_row[:, matrix : matrix + deep, row : row + high] += sums.view(2, deep, high)
    return by_row


def bounded_digits(values: Tensor, most: float) -> Tensor:
    """Return values as digits that can be added exactly: int64, shape (3, *values.shape).

    A value is rounded to a multiple of 2^-52 of ``most`` and split into two whole numbers; the unit
    of the first is 2^31 times that of the second. The third number is 1 for a NaN, whose value
    counts as 0.

    Args:
        values: FP64 values from 0 to ``most``.
        most: a power of two.
    """
    is_nan = values.isnan()
    units = values.masked_fill(is_nan, 0.0).double().mul_(2.0**52 / most).round_().long()
    return torch.stack([units >> _BITS, units.bitwise_and(_LOW), is_nan.long()])


def bounded_values(sums: Tensor, most: float) -> Tensor:
    """Return sums of :func:`bounded_digits` as FP64 values without the first dimension.

    Each value is rounded once. A value is NaN if one of its summands was NaN.
    """
    high, low, nans = sums.unbind()
    units = (high + (low >> _BITS)).double().mul_(2.0**_BITS).add_(low.bitwise_and(_LOW).double())
    return units.mul_(most * 2.0**-52).masked_fill_(nans > 0, math.nan)


def digits_to_values(digits: Tensor, top: float) -> Tensor:
    """Return sums of :func:`row_digits` as FP64 values without the first dimension.

    All values are NaN if ``top`` is not finite.
    """
    if not math.isfinite(top):
        return torch.full(digits.shape[1:], math.nan, dtype=torch.float64, device=digits.device)
    exponent = math.frexp(top)[1]
    values = digits[0].double().mul_(2.0**_BITS).add_(digits[1].double())
    return values.mul_(2.0 ** (2 * exponent - 2 * _BITS))


def over_shards(
    values: Sequence[Tensor], shard_groups: Sequence[Groups], largest_of: bool, doing: str
) -> list[Tensor]:
    """Reduce values of parameters over the ranks with their shards, and return the results.

    All parameters with the same groups are reduced together.

    Args:
        values: contiguous tensors of one dtype, one for each parameter. A tensor without groups is
            returned unchanged.
        shard_groups: for each parameter, the process groups over which the parameter is sharded.
        largest_of: True for the maximum, False for the sum.
        doing: description of the reduction, for the error if a rank is missing.
    """
    op = dist.ReduceOp.MAX if largest_of else dist.ReduceOp.SUM
    result = list(values)
    for groups in dict.fromkeys(filter(None, shard_groups)):
        members = [at for at, its_groups in enumerate(shard_groups) if its_groups == groups]
        flat = torch.cat([values[at].reshape(-1) for at in members])
        reduce_over(groups, flat, doing, op)
        sizes = [values[at].numel() for at in members]
        for at, piece in zip(members, torch.split(flat, sizes), strict=True):
            result[at] = piece.view(values[at].shape)
    return result
