"""NorMuon's second moment of each neuron, a row of a matrix (Li et al. 2025, arXiv:2510.05491):
rows of a direction come to one size, and its norm stays what it was. Sums are whole numbers, so
that no layout shows in the bits. Formulas: docs/numerics.md.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from mp_optim.slots import SlotUpdates
from mp_optim.slots.tensor_layout import ParamLayout, ShardRegion
from mp_optim.update.adafactor import ElementPasses, passes_by
from mp_optim.update.backends import Backend
from mp_optim.update.exact_sums import (
    MatricesShape,
    MatrixBlock,
    bounded_digits,
    bounded_values,
    digits_to_values,
    matrices_shape,
    matrix_blocks,
    over_shards,
)
from mp_optim.update.orthogonalization import Direction, Orthogonalization, pieces_of
from mp_optim.update.sums import Groups, root

_EPS = 1e-8
"""Added to the root of the moment; dion's."""
_DOING = "adding up the squares of NorMuon's rows"


def normalized(
    rule: Orthogonalization,
    found: Sequence[Direction],
    moments: Sequence[Tensor],
    updates: SlotUpdates,
    regions: Sequence[ShardRegion],
    backend: Backend,
) -> list[Direction]:
    """Directions with rows of one size, scaled already, and FP32; updates the moments. Collective
    if some are split over ranks.

    Args:
        found: unscaled, whatever their factors; may be overwritten.
        moments: of all rows of each parameter, FP32, shape (..., rows, 1).
        updates, regions: of a launch, as many.
    """
    layouts = updates.layouts or [None] * len(updates)
    passes, shards = passes_by(backend), updates.shard_groups
    params = [_Param.of(*each) for each in zip(found, moments, regions, layouts, strict=True)]
    every = [param.ranks_over(own, 0, 1) for param, own in zip(params, shards, strict=True)]
    largest = [passes.largest(param.values)[None] for param in params]
    tops = [float(top) for top in over_shards(largest, every, largest_of=True, doing=_DOING)]
    pairs = list(zip(params, tops, strict=True))
    squares = [param.squares(passes, top) for param, top in pairs]
    within = [param.ranks_over(own, 1) for param, own in zip(params, shards, strict=True)]
    squares = over_shards(squares, within, largest_of=False, doing=_DOING)
    sums = [
        param.norms(rule, digits, top) for (param, top), digits in zip(pairs, squares, strict=True)
    ]
    others = [param.ranks_over((), 0) for param in params]
    sums = over_shards(sums, others, largest_of=False, doing=_DOING)
    for (param, top), norms in zip(pairs, sums, strict=True):
        param.scale(rule, norms, top)
    return [Direction(param.values, 1.0) for param in params]


@dataclass
class _Param:
    """A parameter under way.

    Attributes:
        values: its direction, FP32; of what this rank has.
        moment: of all rows that there are but for tensor parallelism, shape (matrices, rows).
        shape: these matrices.
        layout: how it is split. dim: along which plain tensor parallelism cuts matrices.
        sizes: what is made of the moment: of each row, FP64.
    """

    values: Tensor
    blocks: list[MatrixBlock]
    moment: Tensor
    shape: MatricesShape
    layout: ParamLayout | None
    dim: int | None
    sizes: Tensor

    @classmethod
    def of(
        cls, found: Direction, moment: Tensor, region: ShardRegion, layout: ParamLayout | None
    ) -> _Param:
        values, shape = found.values.float(), matrices_shape(region.shape)
        dim = None if layout is None else layout.cut_dim
        blocks, moment = matrix_blocks(region, values), moment.view(shape[:2])
        return cls(values, blocks, moment, shape, layout, dim, moment)

    def ranks_over(self, shards: Groups, *dims: int) -> Groups:
        """Ranks that have other parts: those it is sharded over, and those of tensor parallelism if
        it cuts matrices along one of some dimensions."""
        if self.layout is None or self.layout.tensor_parallel is None or self.dim not in dims:
            return shards
        return (*shards, self.layout.tensor_parallel)

    def _ranks(self, dim: int) -> int:
        """How many ranks tensor parallelism cuts a dimension over."""
        groups = self.ranks_over((), dim)
        return groups[0].size() if groups else 1

    def squares(self, passes: ElementPasses, top: float) -> Tensor:
        """Digits of each row's sum of squares; of what this rank has."""
        device = self.values.device
        return passes.row_and_column_digits(self.blocks, top, self.shape, device)[0]

    def norms(self, rule: Orthogonalization, digits: Tensor, top: float) -> Tensor:
        """Update the moment. Squares of the norms of what is orthogonalised by itself, before and
        after rows are divided by the moment's roots, in whole numbers that may be added up; int64,
        shape (5, matrices, pieces).

        Args:
            digits: of each row's sum of squares.
            top: the largest magnitude.
        """
        matrices, _, columns = self.shape
        sums = digits_to_values(digits, top)
        # NOTE: a GPU's division by a number is a product with its reciprocal, which has other bits.
        count = sums.new_full((), max(columns * self._ranks(1), 1))
        fresh = sums.div(count).mul_(1.0 - rule.beta2)
        self.moment.copy_(self.moment.double().mul_(rule.beta2).add_(fresh))
        self.sizes = root(self.moment.double()).add_(_EPS).reciprocal_()
        after = bounded_digits(sums.mul_(self.sizes).mul_(self.sizes), self._most(rule))
        of_rows = torch.cat([digits, after])
        index, pieces = self._pieces(rule)
        empty = of_rows.new_zeros(len(of_rows), matrices, len(pieces))
        return empty.index_add_(2, index, of_rows)

    def scale(self, rule: Orthogonalization, norms: Tensor, top: float) -> None:
        """Make the direction what is subtracted from the parameter."""
        before = root(digits_to_values(norms[:2], top))
        after = root(bounded_values(norms[2:], self._most(rule)))
        kept = torch.where(after == 0.0, after, before / after)
        index, pieces = self._pieces(rule)
        kept *= kept.new_tensor([rule.factor(*piece) for piece in pieces])
        factors = kept.index_select(1, index).mul_(self.sizes).float()
        for block in self.blocks:
            deep, high, _ = block.values.shape
            rows = factors[block.matrix : block.matrix + deep, block.row : block.row + high]
            block.values.mul_(rows[:, :, None])

    def _most(self, rule: Orthogonalization) -> float:
        """A power of two that the square of no row exceeds once it is divided by the moment's root:
        the moment is at least (1 - beta2) of its mean square."""
        columns = max(self.shape[2] * self._ranks(1), 1)
        return 2.0 ** math.frexp(columns / (1.0 - rule.beta2))[1]

    def _pieces(self, rule: Orthogonalization) -> tuple[Tensor, list[tuple[int, int]]]:
        """Of each row, which of the pieces it is of that are orthogonalised by themselves; and
        their shapes."""
        _, rows, columns = self.shape
        pieces = pieces_of(rule, rows * self._ranks(0), columns * self._ranks(1))
        numbers = torch.arange(rows, device="cpu")
        if self.layout is not None and self.ranks_over((), 0):
            own = self.layout.tensor_parallel_rows(rows)
            numbers = torch.tensor(own, dtype=torch.long, device="cpu")
        if rule.head_rows is not None:
            index = numbers // rule.head_rows
        elif rule.parts is not None:
            order = torch.arange(len(rule.parts), device="cpu")
            of_group = order.repeat_interleave(torch.tensor(rule.parts, device="cpu"))
            index = of_group[numbers % sum(rule.parts)]
        else:
            index = torch.zeros_like(numbers)
        return index.to(self.values.device), pieces
