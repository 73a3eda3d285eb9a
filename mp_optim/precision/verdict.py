"""Decide: from a few scalars to what happens with this step."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from mp_optim.precision.measure import EXCLUDED, MAIN, Measurement
from mp_optim.precision.result import StepResult
from mp_optim.update.kernel_args import fp32


@dataclass(frozen=True)
class Verdict:
    """One step's decision.

    Attributes:
        multipliers: FP32 value for each norm group: inverse loss scale times clip coefficient.
        skip: leave everything as it is.
        found_inf: some gradient is not finite.
        norms: unscaled norm of each norm group.
        num_zeros: zero gradient elements, if counted.
        disagrees: ranks that share split parameters would step them otherwise; nothing is stepped.
    """

    multipliers: dict[str, float] = field(default_factory=dict)
    skip: bool = False
    found_inf: bool = False
    norms: dict[str, float] = field(default_factory=dict)
    num_zeros: int | None = None
    disagrees: bool = False

    @property
    def grad_norm(self) -> float | None:
        """The global norm, or None if it is not a number."""
        return None if self.found_inf else self.norms.get(MAIN, 0.0)

    @property
    def values(self) -> tuple[bool, float | None, int | None]:
        """What ``step`` reports."""
        return not self.skip, self.grad_norm, None if self.found_inf else self.num_zeros

    @property
    def result(self) -> StepResult:
        """What the caller of ``step`` gets."""
        return StepResult(*self.values)

    def when_settled(self, tell: Callable[[Verdict], None]) -> None:
        """Call ``tell`` now, for the host knows it."""
        tell(self)


def decide(measurement: Measurement, inv_scale: Tensor | None, config: Any) -> Verdict:
    """The step's verdict, formed in double; reads the device once.

    Args:
        measurement: agreed sums of squares of the gradients as they are (still scaled).
        inv_scale: reciprocal of the scale that was used in backward, shape (1,) FP64, or None for
            1.
        config: reads ``clip_grad`` (<= 0: off) and ``grad_norm_skip_threshold``.
    """
    optional = inv_scale, measurement.disagreement, measurement.zeros
    scalars = [value for value in optional if value is not None]
    values = iter(_read([*measurement.sums.values(), *scalars]))
    sums = {name: next(values) for name in measurement.sums}
    inverse = 1.0 if inv_scale is None else next(values)
    if measurement.disagreement is not None and next(values) != 0.0:
        return Verdict(skip=True, disagrees=True)
    num_zeros = None if measurement.zeros is None else int(next(values))
    if not all(math.isfinite(value) for value in sums.values()):
        return Verdict(skip=True, found_inf=True)
    norms = {name: math.sqrt(value) * inverse for name, value in sums.items()}
    multipliers = {
        name: fp32(inverse * _clip_coefficient(norm, config.clip_grad))
        for name, norm in norms.items()
    }
    multipliers[EXCLUDED] = multipliers.get(MAIN, fp32(inverse))
    too_large = norms.get(MAIN, 0.0) > config.grad_norm_skip_threshold
    return Verdict(multipliers, too_large, False, norms, num_zeros)


def _read(scalars: Sequence[Tensor]) -> list[float]:
    """Tensors of one element as numbers, by one transfer."""
    if not scalars:
        return []
    device = scalars[0].device
    values: list[float] = torch.cat(
        [value.to(device).reshape(1) for value in scalars]
    ).tolist()
    return values


def _clip_coefficient(norm: float, limit: float) -> float:
    """``limit / (norm + 1e-6)`` where that is below 1, else 1 (Megatron's and torch's
    definition)."""
    return min(1.0, limit / (norm + 1e-6)) if limit > 0.0 else 1.0
