"""Boxes of tensors, and what flat ranges and tensor parallelism cut out of a tensor, as boxes: pure
functions of shapes.

Tensor parallelism cuts a tensor along one dimension, which consists of blocks (one, or several
fused ones: gate and up of a SwiGLU), each of which is split over the ranks. What a rank has is its
parts of all blocks, one after the other.
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
    """A box of a tensor: index of its first element, and its shape."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    @property
    def numel(self) -> int:
        return math.prod(self.sizes)

    def of(self, tensor: Tensor) -> Tensor:
        """Its elements, as a view."""
        for dim, (first, size) in enumerate(zip(self.offsets, self.sizes, strict=True)):
            tensor = tensor.narrow(dim, first, size)
        return tensor

    def common(self, other: Box) -> Box | None:
        """The elements that two boxes of one tensor have in common, if there are any."""
        offsets = tuple(map(max, self.offsets, other.offsets))
        ends = map(min, map(add, self.offsets, self.sizes), map(add, other.offsets, other.sizes))
        sizes = tuple(map(sub, ends, offsets))
        return Box(offsets, sizes) if all(size > 0 for size in sizes) else None


@lru_cache(maxsize=1024)
def whole_box(shape: tuple[int, ...]) -> Box:
    return Box((0,) * len(shape), tuple(shape))


@lru_cache(maxsize=1 << 16)
def boxes(shape: tuple[int, ...], start: int, count: int) -> tuple[Box, ...]:
    """Elements ``[start, start + count)`` of a row-major tensor as boxes, in order: disjoint,
    nothing else covered, each contiguous in row-major order.

    There are at most ``2 * len(shape) - 1`` of them. An empty range has none, unless the tensor
    itself is empty: that is one box of no elements, so that the tensor is on record.

    Raises:
        ValueError: the range is not inside the tensor.
    """
    if not 0 <= start <= start + count <= math.prod(shape):
        raise ValueError(
            f"elements [{start}, {start + count}) are not inside a tensor of shape {tuple(shape)}, "
            f"which has {math.prod(shape)}"
        )
    if math.prod(shape) == 0:
        return (whole_box(tuple(shape)),)
    return tuple(_boxes(tuple(shape), (), start, start + count)) if count else ()


def _boxes(shape: tuple[int, ...], outer: tuple[int, ...], begin: int, end: int) -> Iterator[Box]:
    """Those of a range that is counted from the subtensor at ``outer``."""
    ones = (1,) * len(outer)
    if begin == 0 and end == math.prod(shape):
        yield Box(outer + (0,) * len(shape), ones + shape)
        return
    inner = math.prod(shape[1:])
    first, last = -(-begin // inner), end // inner  # whole rows: [first, last)
    if first > last:  # inside one row
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


def box_views(flat: Tensor, places: Sequence[Box]) -> Iterator[tuple[Box, Tensor]]:
    """The boxes of a range, each with its elements, given all of these in a row."""
    pieces = flat.split_with_sizes([place.numel for place in places])
    for place, piece in zip(places, pieces, strict=True):
        yield place, piece.view(place.sizes)


@dataclass(frozen=True)
class Partition:
    """A rank's part of a tensor.

    Attributes:
        dim: the dimension that is cut.
        blocks: how much of each block the rank has; together its length along ``dim``.
        rank, size: which of how many parts this is; all are of the same shape.
    """

    dim: int
    blocks: tuple[int, ...]
    rank: int
    size: int

    def whole_shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        """The whole's shape, from that of a part."""
        whole = list(shape)
        whole[self.dim] *= self.size
        return tuple(whole)

    def _spans(self) -> Iterator[tuple[int, int, int]]:
        """For each block: first index in the part and in the whole, and length."""
        first = 0
        for length in self.blocks:
            yield first, first * self.size + length * self.rank, length
            first += length

    def cuts(self, box: Box) -> list[tuple[int, Box]]:
        """A box of the part as boxes of the whole, in order, each after the index of its first
        element along the dimension, counted from the box that it was cut from."""
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
        """Row-major indices of elements in the whole, from those in a part of a shape."""
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
    *,
    stride: int = 1,
    sizes: Sequence[int] | None = None,
    rank: int,
    size: int,
) -> Partition:
    """A rank's part of a parameter, from what Megatron says of it.

    Args:
        name: for messages. shape: of the part.
        dim: ``partition_dim``. stride: ``partition_stride``, the number of equal blocks.
        sizes: ``partition_sizes``, of blocks that are not equal.

    Raises:
        ValueError: the dimension is not there, or does not consist of such blocks.
    """
    if dim >= len(shape):
        raise ValueError(
            f"{name}.partition_dim={dim}: its shape is {tuple(shape)}; say the dimension along "
            "which tensor parallelism cuts it"
        )
    length = shape[dim]
    if sizes is not None:
        if sum(sizes) != length or any(each < 0 for each in sizes):
            raise ValueError(
                f"{name}.partition_sizes={list(sizes)}: they add up to {sum(sizes)}, and dimension "
                f"{dim} of {tuple(shape)} is {length} long"
            )
        return Partition(dim, tuple(sizes), rank, size)
    if stride < 1 or length % stride:
        raise ValueError(
            f"{name}.partition_stride={stride}: dimension {dim} of {tuple(shape)} is no {stride} "
            "equal blocks"
        )
    return Partition(dim, (length // stride,) * stride, rank, size)


def check_cover(name: str, shape: tuple[int, ...], places: Iterable[Box]) -> None:
    """Raise ValueError unless boxes that differ make up a tensor, each element once."""
    places = list(places)
    covered, wanted = sum(place.numel for place in places), math.prod(shape)
    if covered < wanted:
        raise ValueError(
            f"{name} of shape {shape}: the ranks that save hold {covered} of its {wanted} "
            "elements; save with all ranks that the model and the optimizer were built on. If some "
            "of them have ended, build both again and load the last checkpoint"
        )
    if covered > wanted or any_overlap(places):
        raise ValueError(
            f"{name} of shape {shape}: ranks hold parts of it that overlap but are not the same"
        )


def any_overlap(places: Sequence[Box]) -> bool:
    """Whether any two of some boxes of a tensor, none of them empty, have an element in common."""
    if len(places) < 2:
        return False
    dims = range(len(places[0].offsets))
    dim = max(dims, key=lambda at: len({place.offsets[at] for place in places}))
    active: list[Box] = []
    for place in sorted(places, key=lambda one: one.offsets[dim]):
        active = [
            other for other in active if other.offsets[dim] + other.sizes[dim] > place.offsets[dim]
        ]
        if any(place.common(other) for other in active):
            return True
        active.append(place)
    return False
