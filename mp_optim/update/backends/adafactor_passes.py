"""Adafactor's passes over the elements of a parameter: in torch operations, the text, and by the
compiled kernels of ``update/csrc``, which follow it to the bit. Formulas: docs/numerics.md."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mp_optim.update.backends.native_library import Adafactor, Matrices, NativeLibrary, thread_count
from mp_optim.update.chunking import tell_autograd
from mp_optim.update.exact_sums import (
    Block,
    MatricesShape,
    largest,
    pieces_of,
    row_and_column_digits,
    total_digits,
)
from mp_optim.update.kernel_args import fp32


@dataclass(frozen=True)
class Averages:
    """Scalars of the second moments, rounded to FP32 once."""

    keep: float
    weight: float
    floor: float
    squared_floor: float

    @classmethod
    def at(cls, group: Mapping[str, Any], step: int) -> Averages:
        """From a param group, at step ``step`` >= 1."""
        floor = group["eps"][0]
        floor = torch.finfo(torch.float32).eps if floor is None else float(floor)
        weight = step ** float(group["beta2_decay"])
        return cls(fp32(1.0 - weight), fp32(weight), fp32(floor), fp32(floor * floor))


def average(moment: Tensor, value: Tensor, scalars: Averages) -> None:
    """Add a value to a moment; the value is spent. What overflows becomes FP32's largest number:
    of an infinite moment nothing could be decayed, nor a mean be taken."""
    value.clamp_(max=LARGEST).mul_(scalars.weight)
    moment.mul_(scalars.keep).add_(value).clamp_(max=LARGEST)


class ElementPasses:
    """Each method goes over contiguous FP32 elements once."""

    def largest(self, values: Tensor) -> Tensor:
        """See :func:`~mp_optim.update.exact_sums.largest`."""
        return largest(values)

    def total_digits(self, blocks: Sequence[Block], top: float, device: torch.device) -> Tensor:
        """See :func:`~mp_optim.update.exact_sums.total_digits`."""
        return total_digits(blocks, top, device)

    def row_and_column_digits(
        self, blocks: Sequence[Block], top: float, shape: MatricesShape, device: torch.device
    ) -> tuple[Tensor, Tensor]:
        """See :func:`~mp_optim.update.exact_sums.row_and_column_digits`."""
        return row_and_column_digits(blocks, top, shape, device)

    def turn_by_variance(self, grad: Tensor, variance: Tensor, scalars: Averages) -> None:
        """Update the variance, and turn the gradient into the direction."""
        average(variance, grad * grad, scalars)
        grad.div_(_root(variance.clamp(min=scalars.squared_floor)))

    def turn_by_matrices(
        self, blocks: Sequence[Block], weights: Tensor, columns: Tensor, scalars: Averages
    ) -> None:
        """Turn gradients into directions.

        Args:
            weights: of all rows, over the mean of their matrix; shape (matrices, rows).
            columns: moments of all columns, shape (matrices, columns).
        """
        for block in blocks:
            for values, matrix, row, column in pieces_of(block):
                deep, high, wide = values.shape
                of_rows = weights[matrix : matrix + deep, row : row + high, None]
                of_columns = columns[matrix : matrix + deep, None, column : column + wide]
                values.div_(_root((of_rows * of_columns).clamp_(min=scalars.squared_floor)))

    def descend(self, main: Tensor, direction: Tensor, decay: float, size: float) -> None:
        """Take the step; the direction is spent."""
        if decay != 0.0:
            main.sub_(main * decay)
        main.sub_(direction.mul_(size))


def _root(values: Tensor) -> Tensor:
    """Square roots, rounded once from FP64."""
    return values.double().sqrt_().float()


# -- by the kernels, on all host threads ----------------------------------------------------------


class NativeElementPasses(ElementPasses):
    """Calls the library; bit for bit what the text in torch operations computes."""

    def __init__(self, library: NativeLibrary) -> None:
        self._library = library

    def largest(self, values: Tensor) -> Tensor:
        top = torch.zeros((), dtype=torch.float32, device="cpu")
        if values.numel():
            self._call("mp_largest", values.data_ptr(), values.numel(), top.data_ptr())
        return top

    def total_digits(self, blocks: Sequence[Block], top: float, device: torch.device) -> Tensor:
        total = torch.zeros(2, dtype=torch.int64, device=device)
        for block in blocks if math.isfinite(top) else ():
            values = block.values
            self._call(
                "mp_total_digits", values.data_ptr(), values.numel(), _scale(top), total.data_ptr()
            )
        return total

    def row_and_column_digits(
        self, blocks: Sequence[Block], top: float, shape: MatricesShape, device: torch.device
    ) -> tuple[Tensor, Tensor]:
        matrices, rows, columns = shape
        by_row = torch.zeros(2, matrices, rows, dtype=torch.int64, device=device)
        by_column = torch.zeros(2, matrices, columns, dtype=torch.int64, device=device)
        for block in blocks if math.isfinite(top) else ():
            box, to = _matrices(block, shape), (by_row.data_ptr(), by_column.data_ptr())
            self._call("mp_matrix_digits", box, _scale(top), *to)
        return by_row, by_column

    def turn_by_variance(self, grad: Tensor, variance: Tensor, scalars: Averages) -> None:
        if grad.numel():
            _check_alike(grad, variance)
            values = Adafactor(scalars.keep, scalars.weight, scalars.squared_floor)
            to = (grad.data_ptr(), variance.data_ptr(), grad.numel())
            self._call("mp_turn_by_variance", *to, ctypes.byref(values))

    def turn_by_matrices(
        self, blocks: Sequence[Block], weights: Tensor, columns: Tensor, scalars: Averages
    ) -> None:
        shape = (*weights.shape, columns.shape[1])
        moments = (weights.data_ptr(), columns.data_ptr(), scalars.squared_floor)
        for block in blocks:
            self._call("mp_turn_matrices", _matrices(block, shape), *moments)

    def descend(self, main: Tensor, direction: Tensor, decay: float, size: float) -> None:
        if main.numel():
            _check_alike(main, direction)
            tensors = (main.data_ptr(), direction.data_ptr(), main.numel())
            self._call("mp_descend", *tensors, decay, size)
            tell_autograd([main])

    def _call(self, name: str, *arguments: Any) -> None:
        self._library.call(name, *arguments, thread_count())


def _check_alike(one: Tensor, other: Tensor) -> None:
    """Kernels go by the first of the two.

    Raises:
        ValueError: the other has not as many elements, or one is not FP32 without gaps.
    """
    forms = [(each.numel(), each.dtype, each.is_contiguous()) for each in (one, other)]
    if forms != [(one.numel(), torch.float32, True)] * 2:
        raise ValueError(
            f"Adafactor's kernels were to step {list(one.shape)} by {list(other.shape)}: a "
            "parameter, its gradient or its state was given other memory (`tensor.data = ...`) "
            "that the optimizer was not told of"
        )


def _scale(top: float) -> float:
    """The power of two that brings all magnitudes below 1."""
    return float(2.0 ** -math.frexp(top)[1])


def _matrices(block: Block, shape: MatricesShape) -> Any:
    values = block.values
    return ctypes.byref(Matrices(values.data_ptr(), *values.shape, *block[1:], *shape))


LARGEST = torch.finfo(torch.float32).max
