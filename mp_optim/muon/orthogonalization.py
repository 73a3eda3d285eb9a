"""Muon's directions from momenta: settings, batches and devices of the orthogonalization.

NorMuon has a second moment for each row of a matrix (Li et al. 2025, arXiv:2510.05491). Rows of a
direction are scaled to equal norms, and the norm of the whole direction is kept. Sums are sums of
whole numbers, so the bits do not depend on the layout. Formulas: docs/numerics.md.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from mp_optim.config.rules import coefficients, scale_factor
from mp_optim.core import SlotUpdates
from mp_optim.core.tensor_layout import MatrixParts, ParamLayout, ShardRegion
from mp_optim.kernels.chunking import runs_of
from mp_optim.kernels.kernel_args import fp32
from mp_optim.kernels.sums import Groups, root
from mp_optim.muon.exact_sums import (
    MatricesShape,
    MatrixBlock,
    bounded_digits,
    bounded_values,
    digits_to_values,
    largest_magnitude,
    matrices_shape,
    matrix_blocks,
    over_shards,
    row_digits,
)
from mp_optim.muon.matrix_exchange import Exchange, MatrixOwners, newton_schulz_flops
from mp_optim.muon.newton_schulz import orthogonalize_each

_DTYPES = {"medium": torch.bfloat16, "highest": torch.float32}
_TOGETHER = 1 << 26
"""Largest number of elements of parameters that are orthogonalized together. Each parameter needs
memory for a rounded momentum and for a direction."""
_TOGETHER_ON_HOST = 15 << 20
"""Largest number of bytes that a process orthogonalizes together on the host. Small batches reuse
memory, whereas the operating system clears new memory page by page."""


class Direction(NamedTuple):
    """Value to subtract from a parameter: ``fp32(values) * factor``, rounded once.

    Attributes:
        values: bfloat16 or float32, contiguous, in the parameter's shape and on its device.
        factor: factor that is exact in FP32.
    """

    values: Tensor
    factor: float


@dataclass(frozen=True)
class Orthogonalization:
    """Settings of a group for orthogonalizing and scaling matrices.

    Attributes:
        polynomials: coefficients of the Newton-Schulz steps.
        method: ``standard`` or ``gram``.
        dtype: dtype of the products.
        scale_mode: rule for the factor of a direction.
        lr: learning rate times ``extra_scale_factor``.
        blockwise: True if a rank's tensor-parallel shard is orthogonalized as a matrix.
        parts: numbers of rows of Q, K and V for one query group of a fused matrix; None if matrices
            are not fused.
        is_normalized: True if rows are scaled to equal norms afterwards (NorMuon).
        beta2: decay of NorMuon's second moment.
    """

    polynomials: tuple[tuple[float, float, float], ...]
    method: str
    dtype: torch.dtype
    scale_mode: str
    lr: float
    blockwise: bool
    parts: tuple[int, ...] | None
    is_normalized: bool
    beta2: float

    @classmethod
    def of(cls, group: Mapping[str, Any]) -> Orthogonalization:
        """Return the settings of a param group."""
        return cls(
            coefficients(group["coefficient_type"], group["num_ns_steps"]),
            group["ns_method"],
            _DTYPES[group["fp32_matmul_prec"]],
            group["scale_mode"],
            float(group["lr"]) * group["extra_scale_factor"],
            group["tp_mode"] == "blockwise",
            group["qkv_split_shapes"],
            bool(group.get("moment2_method")),
            float(group.get("beta2", 0.0)),
        )

    def factor(self, rows: int, columns: int) -> float:
        """Return the FP32 factor of an orthogonal matrix of this shape."""
        return fp32(self.lr * scale_factor(self.scale_mode, rows, columns))


def runs(
    params: Sequence[Tensor], layouts: Sequence[ParamLayout | None], blockwise: bool
) -> Iterator[tuple[list[int], bool]]:
    """Yield runs of parameters that are orthogonalized together.

    A run has the indices of parameters, and True if these parameters are whole and on the device of
    the matrix products. Runs of sharded parameters depend only on the shapes of whole parameters,
    so they are equal on all ranks with shards.

    Args:
        params: this rank's tensors.
        layouts: layout of each parameter; empty if unknown.
        blockwise: True if a rank's tensor-parallel shard is orthogonalized as a matrix.
    """
    split, elsewhere, here = [], [], []
    for index, (param, layout) in enumerate(zip_longest(params, layouts)):
        if layout is not None and layout.is_shared(blockwise):
            split.append((index, layout.numel_per_rank(param)))
        elif layout is not None and layout.device != param.device:
            elsewhere.append((index, param.numel()))
        else:
            here.append((index, param.numel()))
    for sizes in (split, elsewhere):
        for members in runs_of(sizes, _TOGETHER):
            yield members, False
    most = _TOGETHER_ON_HOST if params[0].is_cpu else _TOGETHER
    for members in runs_of(here, most):
        yield members, True


def runs_of_wholes(regions: Sequence[ShardRegion]) -> Iterator[tuple[list[int], bool]]:
    """Yield runs of parameters for steps that read sums over whole parameters.

    All ranks that share a parameter have the same runs, even if a rank has none of its elements.
    """
    for members in runs_of(enumerate(region.shape.numel() for region in regions), _TOGETHER):
        yield members, False


def directions(
    rule: Orthogonalization,
    rounded: Sequence[Tensor],
    layouts: Sequence[ParamLayout | None],
    owners: MatrixOwners,
) -> list[Direction]:
    """Return the direction of each parameter of a run, for this rank's shard.

    Collective if a parameter is sharded over ranks.

    Args:
        rule: settings of the group.
        rounded: momenta of this rank's shards in ``rule.dtype``, contiguous, on the device of the
            step; overwritten.
        layouts: layout of each model parameter, which has the device of the products.
        owners: object that assigns sharded matrices to ranks.

    Raises:
        ValueError: the rows of a fused matrix are not a multiple of the rows of one query group.
    """
    done: dict[int, Direction] = {}
    split: dict[tuple[ProcessGroup, ...], dict[int, MatrixParts]] = {}
    here: dict[torch.device, dict[int, Tensor]] = {}
    for index, (part, layout) in enumerate(zip(rounded, layouts, strict=True)):
        found = None if layout is None else layout.matrix_parts(rule.blockwise)
        if found is None:
            whole = part
            if layout is not None and layout.is_shared(rule.blockwise):
                whole = layout.redistribute(part, is_whole=False)
            elif layout is not None:
                whole = part.to(layout.device)
            here.setdefault(whole.device, {})[index] = whole
        else:
            groups, parts = found
            split.setdefault(groups, {})[index] = parts
    for wholes in here.values():
        made = whole_directions(rule, list(wholes.values()))
        for index, (values, factor) in zip(wholes, made, strict=True):
            layout = layouts[index]
            if layout is not None and layout.is_shared(rule.blockwise):
                values = layout.redistribute(values, is_whole=True)
            done[index] = Direction(values.to(rounded[index].device), factor)
    for groups, parts_of in split.items():
        some, layout = [rounded[index] for index in parts_of], layouts[next(iter(parts_of))]
        assert layout is not None
        owned = _by_owners(rule, some, [*parts_of.values()], groups, layout.device, owners)
        done.update(zip(parts_of, owned, strict=True))
    return [done[index] for index in range(len(rounded))]


def _by_owners(
    rule: Orthogonalization,
    rounded: Sequence[Tensor],
    parts: Sequence[MatrixParts],
    groups: Sequence[ProcessGroup],
    device: torch.device,
    owners: MatrixOwners,
) -> list[Direction]:
    """Return the directions of parameters that the same ranks share. Collective.

    Args:
        rule: settings of the group.
        rounded: this rank's part of each parameter.
        parts: for each parameter, the parts of each rank.
        groups: process groups that span the grid of these ranks.
        device: device of the collectives.
        owners: object that assigns matrices to ranks.
    """
    pieces = [pieces_of(rule, each.rows, each.columns) for each in parts]
    steps, method = len(rule.polynomials), rule.method
    flops = [sum(newton_schulz_flops(*one, steps, method) for one in each) for each in pieces]
    # Results of fused matrices are scaled FP32 values, because each part has another factor.
    fused = rule.parts is not None and not rule.is_normalized
    dtype = torch.float32 if fused else rule.dtype
    factors = [1.0 if fused else rule.factor(*each[0]) for each in pieces]
    values = [torch.empty_like(part, dtype=dtype) for part in rounded]
    planned = owners.plan(parts, groups, flops, dtype.itemsize)

    exchange = Exchange(
        planned,
        parts,
        groups,
        rounded,
        values,
        device,
        lambda wholes: [direction.values for direction in whole_directions(rule, wholes)],
    )
    exchange.run()
    owners.bytes_sent += exchange.bytes_sent
    return list(map(Direction, values, factors))


def pieces_of(rule: Orthogonalization, rows: int, columns: int) -> list[tuple[int, int]]:
    """Return the shapes of the parts of a matrix that are orthogonalized separately.

    Raises:
        ValueError: the rows of a fused matrix are not a multiple of the rows of one query group.
    """
    if rule.parts is None:
        return [(rows, columns)]
    groups = _query_groups(rule.parts, rows)
    return [(size * groups, columns) for size in rule.parts]


def _query_groups(parts: tuple[int, ...], rows: int) -> int:
    groups, left = divmod(rows, sum(parts))
    if left:
        raise ValueError(
            f"qkv_split_shapes={parts}: the {rows} rows of a matrix are not a multiple of "
            f"{sum(parts)}, the sum of these numbers; correct the numbers, or set "
            "qkv_split_shapes=None"
        )
    return groups


def whole_directions(rule: Orthogonalization, wholes: Sequence[Tensor]) -> list[Direction]:
    """Return the directions of whole matrices and stacks on this rank. Not collective.

    Q, K and V of a fused matrix are orthogonalized separately. Results of fused matrices are scaled
    FP32 values, unless the rows are normalized later.

    Args:
        rule: settings of the group.
        wholes: contiguous tensors in ``rule.dtype`` on one device; overwritten.
    """
    parts = rule.parts
    if parts is None:
        orthogonalize_each(wholes, rule.polynomials, rule.method)
        return [Direction(whole, rule.factor(*whole.shape[-2:])) for whole in wholes]
    pieces, targets = [], []
    dtype = rule.dtype if rule.is_normalized else torch.float32
    results = [torch.empty_like(whole, dtype=dtype) for whole in wholes]
    for whole, result in zip(wholes, results, strict=True):
        for piece, target in zip(_cut(whole, parts), _cut(result, parts), strict=True):
            *stack, groups, rows, columns = piece.shape
            pieces.append(piece.reshape(*stack, groups * rows, columns).contiguous())
            targets.append(target)
    orthogonalize_each(pieces, rule.polynomials, rule.method)
    for values, target in zip(pieces, targets, strict=True):
        target.copy_(values.view(target.shape))
        if not rule.is_normalized:
            target.mul_(rule.factor(*values.shape[-2:]))
    return [Direction(result, 1.0) for result in results]


def _cut(fused: Tensor, parts: tuple[int, ...]) -> Sequence[Tensor]:
    """Return views of Q, K and V of fused matrices, shape (..., groups, rows, columns)."""
    *stack, rows, columns = fused.shape
    grouped = fused.view(*stack, _query_groups(parts, rows), sum(parts), columns)
    return torch.split(grouped, list(parts), dim=-2)


_EPS = 1e-8
"""Number that is added to the root of the second moment, as in dion."""
_DOING = "adding up the squares of NorMuon's rows"


def normalized(
    rule: Orthogonalization,
    found: Sequence[Direction],
    moments: Sequence[Tensor],
    updates: SlotUpdates,
    regions: Sequence[ShardRegion],
) -> list[Direction]:
    """Scale the rows of directions to equal norms, and update the second moments.

    Collective if a parameter is sharded over ranks.

    Args:
        rule: settings of the group.
        found: directions; may be overwritten. Their factors are ignored.
        moments: second moment of all rows of each parameter, FP32, shape (..., rows, 1).
        updates: updates of the launch.
        regions: for each parameter, the region of the parameter that this rank has.

    Returns:
        Scaled directions in FP32.
    """
    layouts, shards = updates.slots.layouts, updates.slots.shard_groups
    params = [_Param.of(*each) for each in zip(found, moments, regions, layouts, strict=True)]
    every = [param.ranks_over(own, 0, 1) for param, own in zip(params, shards, strict=True)]
    largest = [largest_magnitude(param.values)[None] for param in params]
    tops = [float(top) for top in over_shards(largest, every, largest_of=True, doing=_DOING)]
    pairs = list(zip(params, tops, strict=True))
    squares = [
        row_digits(param.blocks, top, param.shape, param.values.device) for param, top in pairs
    ]
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
    """A parameter whose direction is being normalized.

    Attributes:
        values: the direction of this rank's shard, FP32.
        blocks: views of ``values`` as blocks of matrices.
        moment: second moment of all rows, shape (matrices, rows). With tensor parallelism, only the
            rows of this rank.
        shape: the parameter's shape as a stack of matrices.
        layout: split of the parameter over ranks.
        dim: dimension that plain tensor parallelism shards: 0 for rows, 1 for columns, or None.
        sizes: factor of each row, computed from the moment, FP64.
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
        """Return the groups of ranks with other parts of the parameter.

        These are the given groups, and the tensor-parallel group if tensor parallelism shards one
        of the given dimensions.
        """
        if self.layout is None or self.layout.tensor_parallel is None or self.dim not in dims:
            return shards
        return (*shards, self.layout.tensor_parallel)

    def _ranks(self, dim: int) -> int:
        """Return the number of ranks over which tensor parallelism shards a dimension."""
        groups = self.ranks_over((), dim)
        return groups[0].size() if groups else 1

    def norms(self, rule: Orthogonalization, digits: Tensor, top: float) -> Tensor:
        """Update the second moment, and return squared norms as digits that ranks can add.

        The squared norms are returned for each separately orthogonalized part: first before, then
        after the rows are divided by the roots of the moment.

        Args:
            rule: settings of the group.
            digits: digits of each row's sum of squares.
            top: the largest magnitude of the parameter.

        Returns:
            int64, shape (5, matrices, parts): two digits of each squared norm before the division,
            and three numbers (:func:`bounded_digits`) after the division.
        """
        matrices, _, columns = self.shape
        sums = digits_to_values(digits, top)
        # Divide by a tensor. For a division by a number, a GPU multiplies by the reciprocal, which
        # gives other bits.
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
        """Scale the direction in place, so that the optimizer can subtract the direction from the
        parameter."""
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
        """Return a power of two above all squared row norms after the rows are divided by the roots
        of the moments.

        The moment is at least (1 - beta2) times the row's mean square.
        """
        columns = max(self.shape[2] * self._ranks(1), 1)
        return 2.0 ** math.frexp(columns / (1.0 - rule.beta2))[1]

    def _pieces(self, rule: Orthogonalization) -> tuple[Tensor, list[tuple[int, int]]]:
        """Return the index of each row's part, and the shapes of the parts that are orthogonalized
        separately."""
        _, rows, columns = self.shape
        pieces = pieces_of(rule, rows * self._ranks(0), columns * self._ranks(1))
        numbers = torch.arange(rows, device="cpu")
        if self.layout is not None and self.ranks_over((), 0):
            own = self.layout.tensor_parallel_rows(rows)
            numbers = torch.tensor(own, dtype=torch.long, device="cpu")
        if rule.parts is not None:
            order = torch.arange(len(rule.parts), device="cpu")
            of_group = order.repeat_interleave(torch.tensor(rule.parts, device="cpu"))
            index = of_group[numbers % sum(rule.parts)]
        else:
            index = torch.zeros_like(numbers)
        return index.to(self.values.device), pieces
