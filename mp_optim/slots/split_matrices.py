"""Who has which part of a parameter's matrices, for each way to split it, from numbers alone."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache

import torch
from torch import Tensor
from torch.distributed.tensor import Shard
from torch.distributed.tensor.placement_types import Placement

from mp_optim.slots.matrix_parts import (
    Box,
    Grid,
    MatrixParts,
    Part,
    parts_of_range,
)
from mp_optim.slots.param_attributes import FlatRanges
from mp_optim.slots.partition import Partition


@cache
def parts_of_ranges(
    shape: tuple[int, ...],
    owned: FlatRanges,
    dim: int,
    ranks: int,
    blocks: tuple[int, ...] = (),
) -> MatrixParts:
    """Of a parameter whose flattened elements ranks share.

    Args:
        shape: of what is flattened.
        dim, ranks, blocks: tensor parallelism has cut matrices before, see
            :func:`parts_of_blocks`.
    """
    *leading, rows, columns = shape
    matrices, ranges = math.prod(leading), owned.ranges()
    parts = _blocks(rows, columns, dim, ranks, blocks)
    of_ranks = [
        parts_of_range(part, start, stop, matrices)
        for start, stop in ranges
        for part in parts
    ]
    grid = Grid((len(ranges), ranks) if ranks > 1 else (len(ranges),))
    rows, columns = (rows * ranks, columns) if dim == 0 else (rows, columns * ranks)
    return MatrixParts(grid, rows, columns, tuple(zip(*of_ranks, strict=True)))


@cache
def parts_of_blocks(
    shape: tuple[int, ...], dim: int, ranks: int, blocks: tuple[int, ...]
) -> MatrixParts:
    """Of a parameter that tensor parallelism cuts.

    Args:
        shape: of a rank's part.
        dim: of the matrices: into equal parts along their rows (0) or columns (1).
        blocks: what a rank has of each of the blocks along it, each of which is cut.
    """
    everything = FlatRanges((0, math.prod(shape)), 0, math.prod(shape))
    parts = parts_of_ranges(shape, everything, dim, ranks, blocks)
    return MatrixParts(Grid((ranks,)), parts.rows, parts.columns, parts.parts)


def _blocks(
    rows: int, columns: int, dim: int, ranks: int, blocks: tuple[int, ...]
) -> list[Part]:
    """What each tensor-parallel rank has of a matrix, from the shape of what this one has."""
    blocks = blocks or ((rows, columns)[dim],)
    cuts = [Partition(dim, blocks, rank, ranks).cuts for rank in range(ranks)]
    boxes = [((0, 0), (rows, columns))]
    if dim == 1 and len(blocks) > 1:  # in memory the blocks take turns, row by row
        boxes = [((row, 0), (1, columns)) for row in range(rows)]
    return [
        tuple(
            Box(*cut.offsets, *cut.sizes) for box in boxes for cut in cuts_of_rank(*box)
        )
        for cuts_of_rank in cuts
    ]


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
