"""Which rank owns which elements: whole numbers in, whole numbers out.

Parameters are laid one after another, row-major, into buckets; a bucket is cut into as many shards
as there are ranks, equal ones or between parameters, and a rank owns one of them. Every parameter
and every shard starts at a multiple of :data:`ALIGNMENT` elements.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

ALIGNMENT = 256
"""Elements: a block of the compact state formats, and at least a cache line of any dtype. So blocks
of a fragment are blocks of the whole parameter, and vector loads are aligned."""


@dataclass(frozen=True, slots=True)
class ParamRange:
    """One parameter in a bucket: its index in the list that was planned, its first element's place,
    its size."""

    param: int
    start: int
    numel: int

    @property
    def elements(self) -> slice:
        """Where it lies in the bucket."""
        return slice(self.start, self.start + self.numel)


@dataclass(frozen=True, slots=True)
class BucketPlan:
    """Where parameters lie in one bucket.

    Attributes:
        placed: the parameters, in the order of their places; they do not overlap.
        bounds: where each rank's shard begins, and where the last one ends.
    """

    placed: tuple[ParamRange, ...]
    bounds: tuple[int, ...]

    @classmethod
    def even(cls, placed: Sequence[ParamRange], shard: int, ranks: int) -> BucketPlan:
        """Shards of one size."""
        return cls(tuple(placed), tuple(range(0, shard * ranks + 1, shard)))

    @property
    def ranks(self) -> int:
        """How many ranks share the bucket."""
        return len(self.bounds) - 1

    @property
    def numel(self) -> int:
        """Elements of the bucket, padding included."""
        return self.bounds[-1]

    def owned(self, rank: int) -> tuple[int, int]:
        """First element of a rank's shard, and the one after its last."""
        return self.bounds[rank], self.bounds[rank + 1]

    def fragment(self, item: ParamRange, rank: int) -> tuple[int, int]:
        """What a rank owns of a parameter, as [start, stop) within the parameter; (0, 0) if
        nothing."""
        first, last = self.owned(rank)
        start, stop = max(first - item.start, 0), min(last - item.start, item.numel)
        return (start, stop) if start < stop else (0, 0)

    def is_whole(self, item: ParamRange) -> bool:
        """Whether one rank's shard has all of a parameter."""
        everything = (0, item.numel)
        return any(
            self.fragment(item, rank) == everything for rank in range(self.ranks)
        )


def aligned(numel: int) -> int:
    """``numel`` rounded up to a multiple of :data:`ALIGNMENT`."""
    return -(-numel // ALIGNMENT) * ALIGNMENT


def plan_flat(
    sizes: Sequence[int], ranks: int, bucket_size: int | None = None
) -> list[BucketPlan]:
    """Buckets whose shards may begin and end anywhere in a parameter.

    Parameters are taken from the last to the first, because backward produces their gradients in
    that order.

    Args:
        sizes: elements of each parameter. One without elements lies in no bucket.
        ranks: how many ranks share the buckets.
        bucket_size: a bucket is closed as soon as it holds so many elements; None makes one bucket.
    """
    _check(ranks, bucket_size)
    buckets: list[BucketPlan] = []
    placed: list[ParamRange] = []
    filled = 0
    for index in reversed(range(len(sizes))):
        if not sizes[index]:
            continue
        placed.append(ParamRange(index, filled, sizes[index]))
        filled += aligned(sizes[index])
        if bucket_size is not None and filled >= bucket_size:
            buckets.append(BucketPlan.even(placed, aligned(-(-filled // ranks)), ranks))
            placed, filled = [], 0
    if placed:
        buckets.append(BucketPlan.even(placed, aligned(-(-filled // ranks)), ranks))
    return buckets


def plan_whole(sizes: Sequence[int], ranks: int) -> list[BucketPlan]:
    """One bucket in which every parameter lies in a single shard, for rules that need whole
    matrices.

    The largest parameter left goes to the rank that holds least (Graham's LPT rule: the fullest
    shard is at most 4/3 of the best possible). Shards are as large as what is in them: one of an
    embedding beside those of small layers costs the others nothing.

    Args:
        sizes: elements of each parameter. One without elements lies in no shard.
        ranks: how many ranks share the bucket.
    """
    _check(ranks, None)
    loads, members = [0] * ranks, [[0] * 0 for _ in range(ranks)]
    for index in sorted(range(len(sizes)), key=lambda index: (-sizes[index], index)):
        if sizes[index]:
            rank = min(range(ranks), key=lambda rank: (loads[rank], rank))
            loads[rank] += aligned(sizes[index])
            members[rank].append(index)
    placed = []
    bounds = (0, *itertools.accumulate(loads))
    for start, indices in zip(bounds, members, strict=False):
        for index in sorted(indices, reverse=True):
            placed.append(ParamRange(index, start, sizes[index]))
            start += aligned(sizes[index])
    return [BucketPlan(tuple(placed), bounds)] if placed else []


def _check(ranks: int, bucket_size: int | None) -> None:
    if ranks < 1:
        raise ValueError(f"ranks={ranks}: must be at least 1")
    if bucket_size is not None and bucket_size < 1:
        raise ValueError(f"bucket_size={bucket_size}: must be at least 1 element")
