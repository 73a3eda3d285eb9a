"""Which host slots travel and step together: a fixed plan in the order in which backward produces
gradients."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from mp_optim.slots import Slot

__all__ = ["BucketPlan", "fitting_bucket_bytes", "plan_buckets"]

SMALLEST = 4 << 20
"""Staging bytes below which a bucket's fixed costs show."""

PER_ROUND = 16
"""Buckets a model is cut into, unless they were smaller than :data:`SMALLEST` or larger than
allowed: the last one arrives with the end of backward and is the one that cannot be hidden."""


@dataclass(frozen=True)
class BucketPlan:
    """Buckets of slots, each slot in one of them.

    Attributes:
        buckets: in the order in which their gradients are expected.
        bucket_of: index of each slot's bucket.
    """

    buckets: tuple[tuple[Slot, ...], ...]
    bucket_of: dict[Slot, int] = field(default_factory=dict)


def plan_buckets(slots: Sequence[Slot], sizes: Sequence[int], bucket_bytes: int) -> BucketPlan:
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
    return BucketPlan(
        tuple(map(tuple, buckets)),
        {slot: at for at, bucket in enumerate(buckets) for slot in bucket},
    )


def fitting_bucket_bytes(total: int, most: int) -> int:
    """Staging bytes per bucket for ``total`` of them: small enough to start early, large enough to
    be worth it."""
    return max(1, min(most, max(SMALLEST, -(-total // PER_ROUND))))
