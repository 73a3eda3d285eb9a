"""Which parameters are stepped on the host: a pure function of their sizes."""

from __future__ import annotations

import math
from collections.abc import Sequence


def plan_offload(sizes: Sequence[int], fraction: float) -> frozenset[int]:
    """Choose whole parameters that together hold at least ``fraction`` of all elements.

    The policy, in order: parameters are considered from the last to the first, because backward
    produces their gradients in that order and the host can start earliest on them; one that would
    overshoot is passed over; what is still missing at the end is covered by the smallest parameter
    left, and what that made unnecessary is dropped again, largest first. So the fraction is always
    reached, and the same sizes always give the same plan.

    Args:
        sizes: elements of each parameter, in slot order.
        fraction: between 0 (nothing) and 1 (everything that has elements).

    Returns:
        Indices into ``sizes``.

    Raises:
        ValueError: if ``fraction`` is outside [0, 1].
    """
    if not 0.0 <= fraction <= 1.0:
        raise ValueError(f"offload_fraction={fraction!r}: must be between 0 and 1")
    missing = math.ceil(fraction * sum(sizes))
    chosen: set[int] = set()
    for index in reversed(range(len(sizes))):
        if 0 < sizes[index] <= missing:
            chosen.add(index)
            missing -= sizes[index]
    if missing > 0:
        left = [
            index
            for index in range(len(sizes))
            if index not in chosen and sizes[index] > 0
        ]
        chosen.add(min(left, key=lambda index: (sizes[index], -index)))
    excess = sum(sizes[index] for index in chosen) - math.ceil(fraction * sum(sizes))
    for index in sorted(chosen, key=lambda index: (-sizes[index], index)):
        if sizes[index] <= excess:
            chosen.remove(index)
            excess -= sizes[index]
    return frozenset(chosen)
