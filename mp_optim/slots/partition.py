"""How tensor parallelism cuts a tensor along one dimension: pure functions of shapes.

The dimension consists of blocks (one, or several fused ones: gate and up of a SwiGLU), each of
which is split over the ranks. What a rank has is its parts of all blocks, one after the other.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor


class Cut(NamedTuple):
    """A box of a rank's tensor that lies in one piece in the whole.

    Attributes:
        begin: index of its first element along the dimension, counted from the box it was cut from.
        offsets: index of its first element in the whole. sizes: its shape.
    """

    begin: int
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]


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

    def cuts(self, offsets: Sequence[int], sizes: Sequence[int]) -> list[Cut]:
        """A box of the part as boxes of the whole, in order."""
        low, high = offsets[self.dim], offsets[self.dim] + sizes[self.dim]
        result = []
        for first, in_whole, length in self._spans():
            begin, end = max(low, first), min(high, first + length)
            if begin < end:
                place, shape = list(offsets), list(sizes)
                place[self.dim] = in_whole + begin - first
                shape[self.dim] = end - begin
                result.append(Cut(begin - low, tuple(place), tuple(shape)))
        return result

    def whole_index(self, index: Tensor, shape: Sequence[int]) -> Tensor:
        """Row-major indices of elements in the whole, from those in a part of a shape."""
        inner = 1
        for length in shape[self.dim + 1 :]:
            inner *= length
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
