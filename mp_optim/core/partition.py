"""Boxes of tensors: flat ranges and tensor-parallel parts as rectangular parts of the whole tensor.
All functions depend on shapes alone.

Tensor parallelism splits a tensor along one dimension, which has one or several blocks. For
example, a fused weight of gate and up (SwiGLU) has two blocks. Each block is split over the ranks,
and a rank stores its parts of all blocks in order.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from operator import add, sub
from typing import NamedTuple

from torch import Tensor


class Box(NamedTuple):
    """A rectangular part of a tensor.

    Attributes:
        offsets: index of the first element of the box, one number per dimension.
        sizes: shape of the box.
    """

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    @property
    def numel(self) -> int:
        return math.prod(self.sizes)

    def of(self, tensor: Tensor) -> Tensor:
        """Return the elements of this box in a tensor, as a view."""
        for dim, (first, size) in enumerate(zip(self.offsets, self.sizes, strict=True)):
            tensor = tensor.narrow(dim, first, size)
        return tensor

    def common(self, other: Box) -> Box | None:
        """Return the intersection of two boxes of one tensor, or None if it is empty."""
        offsets = tuple(map(max, self.offsets, other.offsets))
        ends = map(min, map(add, self.offsets, self.sizes), map(add, other.offsets, other.sizes))
        sizes = tuple(map(sub, ends, offsets))
        return Box(offsets, sizes) if all(size > 0 for size in sizes) else None


@lru_cache(maxsize=1024)
def whole_box(shape: tuple[int, ...]) -> Box:
    return Box((0,) * len(shape), tuple(shape))


@lru_cache(maxsize=1 << 16)
def boxes(shape: tuple[int, ...], start: int, count: int) -> tuple[Box, ...]:
    """Return elements ``[start, start + count)`` of a row-major tensor as disjoint boxes, in order.

    Each box is contiguous in row-major order. There are at most ``2 * len(shape) - 1`` boxes.
    An empty range has no boxes. An empty tensor has one empty box, so that checkpoints record it.

    Args:
        shape: shape of the tensor.
        start: first element of the range, row-major.
        count: number of elements.

    Raises:
        ValueError: the range is not inside the tensor.
    """
    if not 0 <= start <= start + count <= math.prod(shape):
        raise ValueError(
            f"elements [{start}, {start + count}) are not inside a tensor of shape {tuple(shape)}; "
            f"pass a range within [0, {math.prod(shape)})"
        )
    if math.prod(shape) == 0:
        return (whole_box(tuple(shape)),)
    return tuple(_boxes(tuple(shape), (), start, start + count)) if count else ()


def _boxes(shape: tuple[int, ...], outer: tuple[int, ...], begin: int, end: int) -> Iterator[Box]:
    """Yield the boxes of elements [begin, end) of a subtensor.

    Args:
        shape: shape of the subtensor.
        outer: index of the subtensor in the whole tensor.
        begin: first element, counted from the subtensor's first element.
        end: end of the range.
    """
    ones = (1,) * len(outer)
    if begin == 0 and end == math.prod(shape):
        yield Box(outer + (0,) * len(shape), ones + shape)
        return
    inner = math.prod(shape[1:])
    # Rows [first, last) are whole, so they are one box.
    first, last = -(-begin // inner), end // inner
    if first > last:  # The range is inside one row, so only that row has boxes.
        yield from _boxes(shape[1:], (*outer, last), begin - last * inner, end - last * inner)
        return
    if begin < first * inner:
        row = first - 1
        yield from _boxes(shape[1:], (*outer, row), begin - row * inner, inner)
    if first < last:
        offsets = (*outer, first) + (0,) * (len(shape) - 1)
        yield Box(offsets, (*ones, last - first, *shape[1:]))
    if last * inner < end:
        yield from _boxes(shape[1:], (*outer, last), 0, end - last * inner)


def box_views(flat: Tensor, parts: Sequence[Box]) -> Iterator[tuple[Box, Tensor]]:
    """Yield each box of a range with a view of its elements.

    Args:
        flat: the elements of all boxes in order, 1-D.
        parts: the boxes.
    """
    pieces = flat.split_with_sizes([box.numel for box in parts])
    for box, piece in zip(parts, pieces, strict=True):
        yield box, piece.view(box.sizes)


@dataclass(frozen=True)
class Partition:
    """The part of a tensor that a tensor-parallel rank has. The parts of all ranks have the same
    shape.

    Attributes:
        dim: the dimension that is split.
        blocks: this rank's length of each block; the sum is the length of the part along ``dim``.
        rank: index of this part.
        size: number of parts.
    """

    dim: int
    blocks: tuple[int, ...]
    rank: int
    size: int

    def whole_shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        """Return the shape of the whole tensor.

        Args:
            shape: shape of a part.
        """
        whole = list(shape)
        whole[self.dim] *= self.size
        return tuple(whole)

    def _spans(self) -> Iterator[tuple[int, int, int]]:
        """Yield three numbers for each block: the first index in the part, the first index in the
        whole tensor, and the length."""
        first = 0
        for length in self.blocks:
            yield first, first * self.size + length * self.rank, length
            first += length

    def cuts(self, box: Box) -> list[tuple[int, Box]]:
        """Return the boxes of the whole tensor that make up a box of the part, in order.

        Each box comes with the index of its first element in the given box, along the split
        dimension.

        Args:
            box: a box of the part.
        """
        offsets, sizes = box
        low, high = offsets[self.dim], offsets[self.dim] + sizes[self.dim]
        result = []
        for first, in_whole, length in self._spans():
            begin, end = max(low, first), min(high, first + length)
            if begin < end:
                place, shape = list(offsets), list(sizes)
                place[self.dim] = in_whole + begin - first
                shape[self.dim] = end - begin
                result.append((begin - low, Box(tuple(place), tuple(shape))))
        return result

    def whole_index(self, index: Tensor, shape: Sequence[int]) -> Tensor:
        """Convert row-major indices in a part to row-major indices in the whole tensor.

        Args:
            index: indices of elements in the part.
            shape: shape of the part.
        """
        inner = math.prod(shape[self.dim + 1 :])
        row = index // inner % shape[self.dim]
        before = index // (inner * shape[self.dim])
        place = row.clone()
        for first, in_whole, length in self._spans():
            inside = (row >= first) & (row < first + length)
            place[inside] = row[inside] + (in_whole - first)
        return (before * shape[self.dim] * self.size + place) * inner + index % inner


def partition(
    name: str,
    shape: Sequence[int],
    dim: int,
    form: tuple[int, Sequence[int] | None],
    rank: int,
    size: int,
) -> Partition:
    """Return a rank's part of a parameter, from Megatron's attributes.

    Args:
        name: FQN of the parameter, for messages.
        shape: shape of the part.
        dim: ``partition_dim``.
        form: ``partition_stride``, the number of equal blocks, and ``partition_sizes``, this rank's
            length of each block, or None if the blocks have equal sizes.
        rank: index of the part.
        size: number of parts.

    Raises:
        ValueError: the dimension does not exist, or cannot be split into the given blocks.
    """
    if dim >= len(shape):
        raise ValueError(
            f"{name}.partition_dim={dim}: a parameter of shape {tuple(shape)} has no such "
            "dimension; set the dimension that tensor parallelism splits"
        )
    length, (stride, sizes) = shape[dim], form
    if sizes is not None:
        if sum(sizes) != length or any(each < 0 for each in sizes):
            raise ValueError(
                f"{name}.partition_sizes={list(sizes)}: the sizes add up to {sum(sizes)}, but "
                f"dimension {dim} of {tuple(shape)} has length {length}; set this rank's length "
                "of each block"
            )
        return Partition(dim, tuple(sizes), rank, size)
    if stride < 1 or length % stride:
        raise ValueError(
            f"{name}.partition_stride={stride}: dimension {dim} of {tuple(shape)} cannot be split "
            f"into {stride} equal blocks; set the number of fused blocks"
        )
    return Partition(dim, (length // stride,) * stride, rank, size)


def check_cover(name: str, shape: tuple[int, ...], parts: Iterable[Box]) -> None:
    """Raise ValueError unless boxes cover every element of a tensor exactly once.

    Args:
        name: name of the tensor, for messages.
        shape: shape of the tensor.
        parts: distinct boxes.
    """
    parts = list(parts)
    covered, wanted = sum(box.numel for box in parts), math.prod(shape)
    if covered < wanted:
        raise ValueError(
            f"{name} of shape {shape}: the ranks that save hold {covered} of its {wanted} "
            "elements; save with all ranks on which the model and the optimizer were built. If "
            "some of these ranks have ended, build model and optimizer again and load the last "
            "checkpoint"
        )
    if covered > wanted or any_overlap(parts):
        raise ValueError(
            f"{name} of shape {shape}: ranks hold parts that overlap but are not the same; give "
            "each rank its own part, or equal copies"
        )


def any_overlap(parts: Sequence[Box]) -> bool:
    """True if two of the boxes, all non-empty and of one tensor, have a common element."""
    if len(parts) < 2:
        return False
    dims = range(len(parts[0].offsets))
    dim = max(dims, key=lambda at: len({box.offsets[at] for box in parts}))
    active: list[Box] = []
    for box in sorted(parts, key=lambda one: one.offsets[dim]):
        active = [
            other for other in active if other.offsets[dim] + other.sizes[dim] > box.offsets[dim]
        ]
        if any(box.common(other) for other in active):
            return True
        active.append(box)
    return False
