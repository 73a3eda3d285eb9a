"""Which host slots travel and step together, and how much host memory that takes: plans, made of
sizes alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from mp_optim.process.host_memory import aligned_bytes
from mp_optim.slots import Slot

SMALLEST = 4 << 20
"""Staging bytes below which a bucket's fixed costs show."""

PER_ROUND = 16
"""Buckets a model is cut into, unless they were smaller than :data:`SMALLEST` or larger than
allowed: the last one arrives with the end of backward and is the one that cannot be hidden."""


@dataclass(frozen=True)
class HostSlot:
    """A slot of the host's optimizer, and what is expected to travel for it: a gradient and a
    parameter of the model's dtype.

    Attributes:
        share: elements per rank that holds a part of it, the same number on every rank.
        numel: elements of this rank.
    """

    slot: Slot
    share: int
    numel: int
    dtype: torch.dtype

    @property
    def shared_bytes(self) -> int:
        """By which buckets are filled: ranks that reduce together get the same number."""
        return 2 * self.share * self.dtype.itemsize

    @property
    def staging_bytes(self) -> int:
        """Host memory that its gradient and its parameter take on this rank."""
        return 2 * aligned_bytes(self.numel, self.dtype)


@dataclass(frozen=True)
class BucketPlan:
    """Buckets of slots, each slot in one of them.

    Attributes:
        buckets: in the order in which their gradients are expected.
        bucket_of: index of each slot's bucket.
    """

    buckets: tuple[tuple[Slot, ...], ...]
    bucket_of: dict[Slot, int]


def plan_buckets(
    slots: Sequence[Slot], sizes: Sequence[int], bucket_bytes: int
) -> BucketPlan:
    """Cut slots into buckets of at most ``bucket_bytes``; a larger slot is a bucket by itself.

    Args:
        slots: in the order in which their gradients are expected.
        sizes: staging bytes of each. Ranks that reduce together pass the same numbers and cut the
            same buckets.
    """
    buckets: list[list[Slot]] = []
    filled = 0
    for slot, size in zip(slots, sizes, strict=True):
        if not buckets or filled + size > bucket_bytes:
            buckets.append([])
            filled = 0
        buckets[-1].append(slot)
        filled += size
    bucket_of = {slot: index for index, bucket in enumerate(buckets) for slot in bucket}
    return BucketPlan(tuple(map(tuple, buckets)), bucket_of)


def fitting_bucket_bytes(total: int, most: int) -> int:
    """Staging bytes per bucket for ``total`` of them: small enough to start early, large enough to
    be worth it."""
    return max(1, min(most, max(SMALLEST, -(-total // PER_ROUND))))


def staging_sizes(buckets: Sequence[int], in_flight: int) -> list[int]:
    """Bytes of each piece of staging memory: one for every bucket, or, if there are more buckets
    than may be in flight at a time, a ring of pieces that each hold the largest."""
    if len(buckets) <= in_flight:
        return list(buckets)
    return [max(buckets)] * in_flight
