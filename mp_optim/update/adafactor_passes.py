"""Adafactor's passes over the elements of a parameter, in torch operations: the text that kernels
follow to the bit. Formulas: docs/numerics.md."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

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
    """Add a value to a moment; the value is spent."""
    moment.mul_(scalars.keep).add_(value.mul_(scalars.weight))


class ElementPasses:
    """Each method goes over contiguous FP32 elements once."""

    def largest(self, values: Tensor) -> Tensor:
        """See :func:`~mp_optim.update.exact_sums.largest`."""
        return largest(values)

    def total_digits(
        self, blocks: Sequence[Block], top: float, device: torch.device
    ) -> Tensor:
        """See :func:`~mp_optim.update.exact_sums.total_digits`."""
        return total_digits(blocks, top, device)

    def row_and_column_digits(
        self,
        blocks: Sequence[Block],
        top: float,
        shape: MatricesShape,
        device: torch.device,
    ) -> tuple[Tensor, Tensor]:
        """See :func:`~mp_optim.update.exact_sums.row_and_column_digits`."""
        return row_and_column_digits(blocks, top, shape, device)

    def turn_by_variance(
        self, grad: Tensor, variance: Tensor, scalars: Averages
    ) -> None:
        """Update the variance, and turn the gradient into the direction."""
        average(variance, grad * grad, scalars)
        grad.div_(_root(variance.clamp(min=scalars.squared_floor)))

    def turn_by_matrices(
        self,
        blocks: Sequence[Block],
        weights: Tensor,
        columns: Tensor,
        scalars: Averages,
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
                of_columns = columns[
                    matrix : matrix + deep, None, column : column + wide
                ]
                values.div_(
                    _root((of_rows * of_columns).clamp_(min=scalars.squared_floor))
                )

    def descend(
        self, main: Tensor, direction: Tensor, decay: float, size: float
    ) -> None:
        """Take the step; the direction is spent."""
        if decay != 0.0:
            main.sub_(main * decay)
        main.sub_(direction.mul_(size))


def _root(values: Tensor) -> Tensor:
    """Square roots, rounded once from FP64."""
    return values.double().sqrt_().float()
