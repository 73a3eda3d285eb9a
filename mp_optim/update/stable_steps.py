"""How long StableAdamW's steps of single parameters are."""

from __future__ import annotations

import math
from collections.abc import Sequence

from mp_optim.update.exact_sums import bounded_value
from mp_optim.update.kernel_args import StableScalars, fp32

NOT_CLIPPED = 1.0 + 2.0**-20
"""Mean squares up to it count as 1, as all are at the first step, but for rounding."""

Step = tuple[float, float]
"""``step_size`` and ``decay`` of a parameter, FP32 values."""


def steps_of(
    scalars: StableScalars, sums: Sequence[Sequence[int]], sizes: Sequence[int]
) -> tuple[list[Step], list[bool]]:
    """The step of each parameter, and whether it is clipped; NaN if a gradient is.

    Args:
        sums: of whole parameters, as ``Backend.stable_adamw_sums`` gives them.
        sizes: elements of whole parameters.
    """
    means = [
        bounded_value(high, low, nans, scalars.limit) / max(1, size)
        for (high, low, nans), size in zip(sums, sizes, strict=True)
    ]
    clips = [1.0 if mean <= NOT_CLIPPED else math.sqrt(mean) for mean in means]
    steps = [(fp32(scalars.rate / c), fp32(scalars.decay_rate / c)) for c in clips]
    return steps, [clip != 1.0 for clip in clips]
