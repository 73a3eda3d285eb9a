"""Who has which part of a parameter's matrices, for each way to split it, from numbers alone."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache

import torch
from torch import Tensor
from torch.distributed.tensor import Shard
from torch.distributed.tensor.placement_types import Placement

from mp_optim.slots.matrix_parts import Box, Grid, MatrixParts, parts_of_range
from mp_optim.slots.param_attributes import FlatRanges


@cache
def parts_of_ranges(
    shape: tuple[int, ...], owned: FlatRanges, dim: int, ranks: int
) -> MatrixParts:
    """Of a parameter whose flattened elements ranks share.

    Args:
        shape: of what is flattened.
        dim, ranks: tensor parallelism has cut matrices before, into so many equal parts: along
            their rows (0) or columns (1).
    """
    *leading, rows, columns = shape
    matrices, ranges = math.prod(leading), owned.ranges()
    boxes = [Box(0, 0, rows, columns)]
    if ranks > 1 and dim == 0:
        boxes = [Box(rows * rank, 0, rows, columns) for rank in range(ranks)]
    elif ranks > 1:
        boxes = [Box(0, columns * rank, rows, columns) for rank in range(ranks)]
    of_ranks = [
        parts_of_range(box, start, stop, matrices)
        for start, stop in ranges
        for box in boxes
    ]
    grid = Grid((len(ranges), ranks) if ranks > 1 else (len(ranges),))
    rows, columns = (rows * ranks, columns) if dim == 0 else (rows, columns * ranks)
    return MatrixParts(grid, rows, columns, tuple(zip(*of_ranks, strict=True)))


@cache
def parts_on_mesh(
    shape: tuple[int, ...],
    cuts: tuple[Placement | None, ...],
    axes: tuple[int, ...],
    mesh: tuple[int, ...],
    coordinate: tuple[int, ...],
) -> MatrixParts | None:
    """Of a parameter on a mesh of ranks; None if some part is no rectangle.

    Args:
        shape: of the whole parameter.
        cuts: how it is split along each dimension of the mesh; None where ranks have copies.
        axes: the dimensions of the mesh along which matrices are split.
        mesh, coordinate: its shape, and the place of this rank in it.
    """
    last = len(shape) - 2
    grid = Grid(tuple(mesh[axis] for axis in axes))
    boxes: list[Box] = []
    for rank in range(grid.size):
        place = list(coordinate)
        for axis, index in zip(axes, grid.coordinates(rank), strict=True):
            place[axis] = index
        down, across = (
            _indices(shape[dim], dim, cuts, mesh, place) for dim in (last, last + 1)
        )
        if down is None or across is None:
            return None
        boxes.append(Box(down.start, across.start, len(down), len(across)))
    leading = [_indices(shape[dim], dim, cuts, mesh, coordinate) for dim in range(last)]
    if None in leading:
        return None
    matrices = math.prod(len(indices) for indices in leading if indices is not None)
    parts = tuple((box,) for box in boxes)
    return MatrixParts(grid, shape[-2], shape[-1], (parts,) * matrices)


def _indices(
    length: int,
    dim: int,
    cuts: Sequence[Placement | None],
    mesh: Sequence[int],
    coordinate: Sequence[int],
) -> range | None:
    """Which indices along a dimension a rank of a mesh has; None if they are no range."""
    left = torch.arange(length, device="cpu").view([1] * dim + [length])
    for placement, ranks, place in zip(cuts, mesh, coordinate, strict=True):
        if placement is not None and getattr(placement, "dim", None) == dim:
            pieces = _pieces(placement, left, ranks)
            left = pieces[place] if place < len(pieces) else left.narrow(dim, 0, 0)
    if not left.numel():
        return range(0)
    first = int(left.min())
    found = range(first, first + left.numel())
    expected = torch.arange(found.start, found.stop, device="cpu")
    return found if torch.equal(left.flatten(), expected) else None


def _pieces(placement: Placement, index: Tensor, ranks: int) -> Sequence[Tensor]:
    """What each rank along a dimension of a mesh has of what there is before it."""
    if type(placement) is Shard:
        return torch.chunk(index, ranks, placement.dim)
    split = placement._split_tensor(index, ranks, with_padding=False)  # type: ignore[attr-defined]
    pieces: Sequence[Tensor] = split[0]
    return pieces
