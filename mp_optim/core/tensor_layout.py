"""Layouts of parameters, for rules that need whole matrices: the device of the model's tensor, and
its split over ranks."""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from mp_optim.core.param_attributes import (
    FlatRanges,
    is_tensor_parallel,
    partition_blocks,
    partition_dim,
    shard_info,
)
from mp_optim.core.partition import Box, Partition, boxes
from mp_optim.host.torch_types import is_dtensor

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor.placement_types import Placement

Boxes = tuple[Box, ...]
"""A rank's part of a matrix: rectangles, stored one after another in the rank's memory."""

_mesh = cache(DeviceMesh.from_group)
"""Function that returns the device mesh of a process group and a device type. Equal arguments give
one mesh object."""


def numel_of(part: Boxes) -> int:
    """Return the number of elements of a part."""
    return sum(box.numel for box in part)


def parts_of_range(part: Boxes, first: int, stop: int, matrices: int) -> list[Boxes]:
    """Return, for each matrix of a flattened stack, the boxes that elements [first, stop) contain.

    Args:
        part: the boxes of one matrix that the stack has; equal for all matrices.
        first: first element of the range, counted over the whole stack.
        stop: end of the range.
        matrices: number of matrices in the stack.
    """
    found: list[Boxes] = []
    for _ in range(matrices):
        inside: list[Box] = []
        for box in part:
            begin, end = max(first, 0), min(stop, box.numel)
            # At most three boxes: the end of a row, whole rows, and the start of a row.
            for offsets, sizes in boxes(box.sizes, begin, end - begin) if begin < end else ():
                inside.append(Box(tuple(map(operator.add, box.offsets, offsets)), sizes))
            first, stop = first - box.numel, stop - box.numel
        found.append(tuple(inside))
    return found


class Grid(NamedTuple):
    """Ranks along several axes, numbered in row-major order."""

    shape: tuple[int, ...]

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    def coordinates(self, rank: int) -> tuple[int, ...]:
        """Return the coordinates of a rank, one for each axis."""
        found = []
        for length in reversed(self.shape):
            rank, place = divmod(rank, length)
            found.append(place)
        return tuple(reversed(found))

    def block(self, *first: int) -> range:
        """Return the ranks that have the given coordinates along the first axes."""
        size = math.prod(self.shape[len(first) :])
        begin = 0
        for place, length in zip(first, self.shape, strict=False):
            begin = begin * length + place
        return range(begin * size, (begin + 1) * size)


@dataclass(frozen=True, eq=False)
class MatrixParts:
    """The split of the matrices of one parameter (or of a stack of matrices) over the ranks of a
    grid.

    Attributes:
        grid: the ranks. Each rank has a part of each matrix. A part may be empty.
        rows: number of rows of a whole matrix.
        columns: number of columns of a whole matrix.
        parts: for each matrix, the part of each rank, in grid order.
    """

    grid: Grid
    rows: int
    columns: int
    parts: tuple[tuple[Boxes, ...], ...]

    @cached_property
    def sizes(self) -> tuple[tuple[int, ...], ...]:
        """Number of elements of each rank's part, for each matrix."""
        sizes_of = {parts: tuple(map(numel_of, parts)) for parts in set(self.parts)}
        return tuple(sizes_of[parts] for parts in self.parts)

    def bounds(self, rank: int) -> list[int]:
        """Return the offset of each matrix in a rank's memory, and the total size, in elements."""
        return list(itertools.accumulate((sizes[rank] for sizes in self.sizes), initial=0))


@cache
def parts_of_ranges(
    shape: tuple[int, ...],
    owned: FlatRanges | None,
    dim: int = 0,
    ranks: int = 1,
    blocks: tuple[int, ...] = (),
) -> MatrixParts:
    """Return the parts of a parameter that tensor parallelism splits, or that is flattened and
    split into one range of elements per rank, or both.

    Args:
        shape: shape of a tensor-parallel rank's part.
        owned: the range of elements of each rank; None if the part is not flattened. The ranks
            with ranges are the first axis of the grid, the tensor-parallel ranks the last.
        dim: dimension of the matrices that tensor parallelism splits: rows (0) or columns (1).
        ranks: number of tensor-parallel ranks; 1 without tensor parallelism.
        blocks: a rank's length of each block along ``dim``; empty for one block.
    """
    *leading, rows, columns = shape
    matrices = math.prod(leading)
    ranges = [(0, math.prod(shape))] if owned is None else owned.ranges()
    parts = _blocks(rows, columns, dim, ranks, blocks)
    of_ranks = [
        parts_of_range(part, start, stop, matrices) for start, stop in ranges for part in parts
    ]
    axes = [] if owned is None else [len(ranges)]
    grid = Grid((*axes, ranks) if ranks > 1 else tuple(axes))
    rows, columns = (rows * ranks, columns) if dim == 0 else (rows, columns * ranks)
    return MatrixParts(grid, rows, columns, tuple(zip(*of_ranks, strict=True)))


def _blocks(rows: int, columns: int, dim: int, ranks: int, blocks: tuple[int, ...]) -> list[Boxes]:
    """Return the part of each tensor-parallel rank in the whole matrix.

    Args:
        rows: number of rows of this rank's part.
        columns: number of columns of this rank's part.
        dim: dimension that is split: rows (0) or columns (1).
        ranks: number of tensor-parallel ranks.
        blocks: a rank's length of each block along ``dim``; empty for one block.
    """
    blocks = blocks or ((rows, columns)[dim],)
    cuts = [Partition(dim, blocks, rank, ranks).cuts for rank in range(ranks)]
    whole = [Box((0, 0), (rows, columns))]
    # A rank's memory is row-major: a row's elements of all blocks come before the next row. So cut
    # row by row, or the boxes would be in another order than the memory.
    if dim == 1 and len(blocks) > 1:
        whole = [Box((row, 0), (1, columns)) for row in range(rows)]
    return [tuple(cut for box in whole for _, cut in cuts_of_rank(box)) for cuts_of_rank in cuts]


@cache
def parts_on_mesh(
    shape: tuple[int, ...],
    cuts: tuple[Placement | None, ...],
    axes: tuple[int, ...],
    mesh: tuple[int, ...],
    coordinate: tuple[int, ...],
) -> MatrixParts | None:
    """Return the parts of a parameter on a device mesh; None if any part is not a rectangle.

    Args:
        shape: shape of the whole parameter.
        cuts: the placement along each mesh dimension; None where ranks have copies.
        axes: mesh dimensions along which matrices are split.
        mesh: shape of the mesh.
        coordinate: this rank's coordinate in the mesh.
    """
    last = len(shape) - 2
    grid = Grid(tuple(mesh[axis] for axis in axes))
    parts: list[Boxes] = []
    for rank in range(grid.size):
        place = list(coordinate)
        for axis, index in zip(axes, grid.coordinates(rank), strict=True):
            place[axis] = index
        down, across = (_indices(shape[dim], dim, cuts, mesh, place) for dim in (last, last + 1))
        if down is None or across is None:
            return None
        parts.append((Box((down.start, across.start), (len(down), len(across))),))
    leading = [_indices(shape[dim], dim, cuts, mesh, coordinate) for dim in range(last)]
    if None in leading:
        return None
    matrices = math.prod(len(indices) for indices in leading if indices is not None)
    return MatrixParts(grid, shape[-2], shape[-1], (tuple(parts),) * matrices)


def _indices(
    length: int,
    dim: int,
    cuts: Sequence[Placement | None],
    mesh: Sequence[int],
    coordinate: Sequence[int],
) -> range | None:
    """Return the indices along a tensor dimension that one rank of a mesh has; None if the indices
    are not a range."""
    from torch.distributed.tensor import Shard

    left = torch.arange(length, device="cpu").view([1] * dim + [length])
    for placement, ranks, place in zip(cuts, mesh, coordinate, strict=True):
        if placement is None or getattr(placement, "dim", None) != dim:
            continue
        pieces: Sequence[Tensor]
        if type(placement) is Shard:
            pieces = torch.chunk(left, ranks, dim)
        else:
            split: Any = placement._split_tensor  # type: ignore[attr-defined]
            pieces, _ = split(left, ranks, with_padding=False)
        left = pieces[place] if place < len(pieces) else left.narrow(dim, 0, 0)
    if not left.numel():
        return range(0)
    first = int(left.min())
    found = range(first, first + left.numel())
    expected = torch.arange(found.start, found.stop, device="cpu")
    return found if torch.equal(left.flatten(), expected) else None


@cache
def _splitting_placements() -> tuple[type, ...]:
    """Return the placement classes that give each rank a part.

    FSDP2 creates a ``_StridedShard`` for a dimension that tensor parallelism has split already. In
    some versions of torch ``_StridedShard.is_shard()`` returns False, so the class is compared.
    """
    from torch.distributed.tensor import Shard, placement_types

    return Shard, getattr(placement_types, "_StridedShard", Shard)


def splits(placement: Placement, name: str = "a parameter") -> bool:
    """True if a placement gives ranks different parts, rather than copies.

    Args:
        placement: placement along one mesh dimension.
        name: FQN of the parameter, for messages.

    Raises:
        ValueError: the placement is ``Partial``, so no rank has the value, or its class is unknown.
    """
    if isinstance(placement, _splitting_placements()):
        return True
    from torch.distributed.tensor import Partial, Replicate

    if isinstance(placement, Replicate):
        return False
    if isinstance(placement, Partial) or placement.is_partial():
        raise ValueError(
            f"{name}: placement {placement}: a Partial parameter has no value to step; "
            "redistribute the parameter to Shard or Replicate first"
        )
    raise ValueError(
        f"{name}: placement {placement!r} ({type(placement).__name__}) is not supported; "
        "redistribute the parameter to Shard or Replicate first"
    )


def split_dims(param: Tensor, name: str = "a parameter") -> tuple[int, ...]:
    """Return the mesh dimensions over which a DTensor is split; empty for other tensors.

    Args:
        param: the parameter.
        name: FQN of the parameter, for messages.

    Raises:
        ValueError: a placement is ``Partial`` or unknown.
    """
    if not is_dtensor(param):
        return ()
    cuts = [splits(placement, name) for placement in param.placements]
    return tuple(dim for dim, cut in enumerate(cuts) if cut)


def shard_groups_of(name: str, param: Tensor) -> tuple[ProcessGroup, ...]:
    """Return the process groups over which a parameter is split.

    A DTensor has one group for each split mesh dimension. For a part of a flat buffer, the groups
    are in the ``ShardInfo`` of the tensor.

    Args:
        name: FQN of the parameter, for messages.
        param: the parameter.

    Raises:
        ValueError: a placement is ``Partial`` or unknown.
    """
    if not is_dtensor(param):
        return shard_info(param).shard_groups
    return tuple(param.device_mesh.get_group(dim) for dim in split_dims(param, name))


def ranks_of_copies(param: DTensor) -> tuple[ProcessGroup, ...]:
    """Return the process groups over which ranks have copies of this rank's part of a DTensor."""
    mesh, cut = param.device_mesh, split_dims(param)
    return tuple(
        mesh.get_group(dim) for dim in range(mesh.ndim) if dim not in cut and mesh.size(dim) > 1
    )


@dataclass(frozen=True)
class ShardRegion:
    """The elements of a parameter that a rank has: a box, or a range of flattened elements.

    Attributes:
        shape: shape of the whole parameter.
        offsets: index of a box's first element; None for a range.
        start: first element of a range of the row-major flattened parameter.
    """

    shape: torch.Size
    offsets: tuple[int, ...] | None
    start: int = 0


def region_of(param: Tensor) -> ShardRegion:
    """Return the elements of the whole parameter that a tensor has: a box for a DTensor, a flat
    range if the tensor's ``ShardInfo`` describes one, and all elements for any other tensor."""
    if is_dtensor(param):
        splitting = [isinstance(each, _splitting_placements()) for each in param.placements]
        copied = [each.is_replicate() for each in param.placements]
        # Do not check for unsupported placements here: splits() refuses such placements, and its
        # error has the parameter's name.
        if any(splitting) and all(map(operator.or_, splitting, copied)):
            (chunk,) = param.__create_chunk_list__()  # type: ignore[no-untyped-call]
            return ShardRegion(param.shape, tuple(chunk.offsets))
    info = shard_info(param)
    if info.whole_shape is not None:
        return ShardRegion(info.whole_shape, None, info.first_element)
    return ShardRegion(param.shape, (0,) * param.dim())


def first_element(param: Tensor) -> int:
    """Return the index of a tensor's first element in the whole parameter, row-major."""
    region = region_of(param)
    if region.offsets is None or not is_dtensor(param):
        return shard_info(param).first_element
    strides = torch.empty(region.shape, dtype=torch.uint8, device="meta").stride()
    return sum(map(operator.mul, region.offsets, strides))


@dataclass(frozen=True)
class ParamLayout:
    """The device of a model's own tensor, and its split over ranks.

    Attributes:
        device: device of the model's tensor, independent of the place where the parameter is
            stepped.
        mesh: the device mesh over which the tensor is split; None without a mesh.
        placements: placement along each mesh dimension.
        shape: shape of the whole parameter on the mesh. For a flat range, the shape of the
            flattened tensor, which may be a tensor-parallel part.
        stride: strides for ``shape``.
        group: for a flat range, the ranks over which the flattened parameter is split; else None.
        owned: for a flat range, the range of elements of each rank of ``group``; else None.
        blocks: for a tensor-parallel part, a rank's length of each block along the split dimension;
            empty for one block.
        tensor_parallel: the ranks that have the other tensor-parallel parts, or None.
        cut_dim: dimension of the matrices that tensor parallelism splits: rows (0) or columns (1).
    """

    device: torch.device
    mesh: DeviceMesh | None = None
    placements: tuple[Placement, ...] = ()
    shape: tuple[int, ...] = ()
    stride: tuple[int, ...] = ()
    group: ProcessGroup | None = None
    owned: FlatRanges | None = None
    blocks: tuple[int, ...] = ()
    tensor_parallel: ProcessGroup | None = None
    cut_dim: int | None = None

    def _whole_matrices(self) -> list[Placement]:
        """Return placements in which the last two dimensions are not split. Other dimensions stay
        split."""
        if not self.placements:
            return []
        from torch.distributed.tensor import Replicate

        leading = len(self.shape) - 2
        return [
            p if splits(p) and getattr(p, "dim", leading) < leading else Replicate()
            for p in self.placements
        ]

    def numel_per_rank(self, local: Tensor) -> int:
        """Return the number of the parameter's elements divided by the number of ranks over which
        the elements are split, rounded up. The result is equal on all ranks.

        Args:
            local: this rank's tensor. If the parameter is not split, return the number of elements
                of this tensor.
        """
        if self.group is not None:
            return math.ceil(math.prod(self.shape) / self.group.size())
        if self.mesh is None:
            return local.numel()
        axes = [dim for dim, each in enumerate(self.placements) if splits(each)]
        return math.ceil(math.prod(self.shape) / math.prod(map(self.mesh.size, axes)))

    def redistribute(self, tensor: Tensor, *, is_whole: bool) -> Tensor:
        """Gather the ranks' parts into whole matrices, or cut whole matrices to this rank's part.

        The result is on the mesh's device. Gathering is a collective over the mesh; cutting is not.

        Args:
            tensor: this rank's part of the parameter, or whole matrices.
            is_whole: True if ``tensor`` has whole matrices, which are to be cut.
        """
        from torch.distributed.tensor import DTensor

        source, target = list(self.placements), self._whole_matrices()
        if is_whole:
            source, target = target, source
        shape = torch.Size(self.shape)
        spread = DTensor.from_local(
            tensor, self.mesh, source, run_check=False, shape=shape, stride=self.stride
        )
        moved = spread.redistribute(placements=target).to_local()
        return getattr(moved, "wait", lambda: moved)().contiguous()

    def is_shared(self, blockwise: bool) -> bool:
        """True if ranks have to gather the matrices, because each rank has a part of a matrix.

        Args:
            blockwise: True if the parts on a mesh or of tensor-parallel ranks are treated as
                separate matrices.
        """
        return self.group is not None or (not blockwise and bool(self._axes()))

    def tensor_parallel_rows(self, rows: int) -> list[int]:
        """Return the row numbers in the whole matrix of this rank's rows. Only for a matrix that
        tensor parallelism splits along its rows.

        Args:
            rows: number of rows of this rank's part.
        """
        assert self.tensor_parallel is not None
        parts = _blocks(rows, 1, 0, self.tensor_parallel.size(), self.blocks)
        own = parts[self.tensor_parallel.rank()]
        spans = (range(box.offsets[0], box.offsets[0] + box.sizes[0]) for box in own)
        return list(itertools.chain.from_iterable(spans))

    def matrix_parts(self, blockwise: bool) -> tuple[tuple[ProcessGroup, ...], MatrixParts] | None:
        """Return the split of this rank's matrices over ranks, and the process groups that span the
        grid of ranks, one group for each axis. Return None if the matrices are not split, or if any
        part is not a rectangle.

        Args:
            blockwise: True if the parts on a mesh or of tensor-parallel ranks are treated as
                separate matrices.
        """
        if self.group is not None:
            if blockwise or self.cut_dim is None or self.tensor_parallel is None:
                return (self.group,), parts_of_ranges(self.shape, self.owned)
            cut = self.cut_dim, self.tensor_parallel.size(), self.blocks
            groups = self.group, self.tensor_parallel
            return groups, parts_of_ranges(self.shape, self.owned, *cut)
        if self.mesh is None or not self.is_shared(blockwise):
            return None
        axes = self._axes()
        parts: MatrixParts | None
        if self.blocks and self.cut_dim is not None:
            shape, ranks = list(self.shape), self.mesh.size()
            shape[self.cut_dim - 2] //= ranks
            parts = parts_of_ranges(tuple(shape), None, self.cut_dim, ranks, self.blocks)
        else:
            coordinate = self.mesh.get_coordinate()
            assert coordinate is not None
            cuts = tuple(each if splits(each) else None for each in self.placements)
            sides = tuple(self.mesh.shape), tuple(coordinate)
            parts = parts_on_mesh(self.shape, cuts, axes, *sides)
        return None if parts is None else (tuple(map(self.mesh.get_group, axes)), parts)

    def _axes(self) -> tuple[int, ...]:
        """Return the mesh dimensions along which matrices are split."""
        pairs = zip(self.placements, self._whole_matrices(), strict=True)
        return tuple(dim for dim, (now, keep) in enumerate(pairs) if now != keep)


def layout_of(param: Tensor, tensor_parallel: ProcessGroup | None = None) -> ParamLayout:
    """Return the layout of a parameter: a DTensor, a tensor-parallel part with Megatron's
    attributes (``tensor_model_parallel``, ``partition_dim``), a flat range with a ``ShardInfo``,
    or a whole plain tensor.

    Args:
        param: the parameter.
        tensor_parallel: the tensor-parallel ranks of parameters with Megatron's attributes.
    """
    if is_dtensor(param):
        return ParamLayout(
            param.to_local().device,
            param.device_mesh,
            tuple(param.placements),
            tuple(param.shape),
            tuple(param.stride()),
        )
    others = tensor_parallel if is_tensor_parallel(param) else None
    others = None if others is None or others.size() == 1 else others
    info, dim = shard_info(param), partition_dim(param)
    whole = param.shape if info.whole_shape is None else info.whole_shape
    is_flat = info.owned is not None and info.whole_shape is not None and len(whole) > 1
    if is_flat or others is None or dim is None:
        return ParamLayout(
            param.device,
            shape=tuple(whole),
            group=info.shard_groups[0] if is_flat else None,
            owned=info.owned if is_flat else None,
            blocks=info.partition_blocks,
            tensor_parallel=others,
            cut_dim=_of_matrix(info.partition_dim, whole, others),
        )
    from torch.distributed.tensor import Shard

    shape, blocks = list(param.shape), partition_blocks(param)
    shape[dim] *= others.size()
    return ParamLayout(
        param.device,
        _mesh(others, param.device.type),
        (Shard(dim),),
        tuple(shape),
        torch.empty(shape, dtype=torch.float32, device="meta").stride(),
        blocks=blocks if len(blocks) > 1 else (),
        tensor_parallel=others,
        cut_dim=_of_matrix(dim, shape, others),
    )


def _of_matrix(dim: int | None, shape: Sequence[int], others: ProcessGroup | None) -> int | None:
    """Convert a dimension of a tensor to dimension 0 or 1 of its matrices. Return None if the
    dimension is not one of the last two, or if no other ranks have parts."""
    first = len(shape) - 2
    return None if others is None or dim is None or dim < first else dim - first
