"""Decide: from a few scalars to what happens with this step."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from mp_optim.precision.measure import EXCLUDED, MAIN, Measurement
from mp_optim.precision.result import StepResult
from mp_optim.precision.skip_rule import Judgement, RollingRule
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
        reason: why the step is skipped, in words; empty for one that is taken.
        scaling: the inverse loss scale, and the grad scaler's trackers, as they were before this
            step; empty without a scaler.
        judgement: what the rolling rule said; None without one, or if the step was not finite.
        is_spike: it is for that rule that the step is skipped.
        param_sums: sum of squares of each parameter's gradient, still scaled, FP64 on the host, in
            slot order; None if they are not kept.
    """

    multipliers: dict[str, float] = field(default_factory=dict)
    skip: bool = False
    found_inf: bool = False
    norms: dict[str, float] = field(default_factory=dict)
    num_zeros: int | None = None
    disagrees: bool = False
    reason: str = ""
    scaling: tuple[float, ...] = ()
    judgement: Judgement | None = None
    is_spike: bool = False
    param_sums: Tensor | None = field(default=None, compare=False)

    @property
    def grad_norm(self) -> float | None:
        """The global norm, or None if it is not a number."""
        return None if self.found_inf else self.norms.get(MAIN, 0.0)

    @property
    def values(self) -> tuple[bool, float | None, int | None, str]:
        """What ``step`` reports."""
        zeros = None if self.found_inf else self.num_zeros
        return not self.skip, self.grad_norm, zeros, self.reason

    @property
    def cause(self) -> str:
        """Of a skipped step, as metrics have it."""
        if self.disagrees:
            return "disagreement"
        if self.is_spike:
            return "spike"
        return "not_finite" if self.found_inf else "over_threshold"

    @property
    def result(self) -> StepResult:
        """What the caller of ``step`` gets."""
        return StepResult(*self.values)

    def when_settled(self, tell: Callable[[Verdict], None]) -> None:
        """Call ``tell`` now, for the host knows it."""
        tell(self)


def not_finite(groups: Iterable[str], scaling: tuple[float, ...]) -> Verdict:
    """The verdict on gradients of some norm groups that are not finite."""
    reason = f"the gradients of norm group {', '.join(groups)} hold an inf or nan"
    return Verdict(skip=True, found_inf=True, reason=reason, scaling=scaling)


def finite(
    multipliers: dict[str, float],
    norms: dict[str, float],
    threshold: float,
    num_zeros: int | None,
    scaling: tuple[float, ...],
    judgement: Judgement | None = None,
) -> Verdict:
    """The verdict on finite gradients: the step is taken if the norm is not above a threshold, and
    is no spike."""
    norm, spike = norms.get(MAIN, 0.0), ""
    over = norm > threshold
    if over:
        reason = f"the gradient norm is {norm:g}, over grad_norm_skip_threshold={threshold:g}"
    else:
        reason = spike = "" if judgement is None else judgement.reason(norm)
    return Verdict(
        multipliers,
        bool(reason),
        norms=norms,
        num_zeros=num_zeros,
        reason=reason,
        scaling=scaling,
        judgement=judgement,
        is_spike=bool(spike),
    )


def decide(
    measurement: Measurement,
    inv_scale: Tensor | None,
    config: Any,
    trackers: Sequence[Tensor] = (),
    rule: RollingRule | None = None,
) -> Verdict:
    """The step's verdict, formed in double; reads the device once.

    Args:
        measurement: agreed sums of squares of the gradients as they are (still scaled).
        inv_scale: reciprocal of the scale that was used in backward, shape (1,) FP64, or None for
            1.
        config: reads ``clip_grad`` (<= 0: off) and ``grad_norm_skip_threshold``.
        trackers: the grad scaler's.
        rule: judges the step, which was begun on the host; its window stays as it is.
    """
    scaled = [] if inv_scale is None else [inv_scale, *trackers]
    optional = measurement.disagreement, measurement.zeros
    scalars = [*scaled, *(value for value in optional if value is not None)]
    read, params = _read([*measurement.sums.values(), *scalars], measurement.params)
    values = iter(read)
    sums = {name: next(values) for name in measurement.sums}
    scaling = tuple(next(values) for _ in scaled)
    inverse = scaling[0] if scaling else 1.0
    if measurement.disagreement is not None and next(values) != 0.0:
        return Verdict(skip=True, disagrees=True)
    num_zeros = None if measurement.zeros is None else int(next(values))
    if bad := [name for name, value in sums.items() if not math.isfinite(value)]:
        return replace(not_finite(bad, scaling), param_sums=params)
    norms = {name: math.sqrt(value) * inverse for name, value in sums.items()}
    multipliers = {
        name: fp32(inverse * _clip_coefficient(norm, config.clip_grad))
        for name, norm in norms.items()
    }
    multipliers[EXCLUDED] = multipliers.get(MAIN, fp32(inverse))
    judgement = None if rule is None else rule.judge_on_host(norms.get(MAIN, 0.0))
    verdict = finite(
        multipliers,
        norms,
        config.grad_norm_skip_threshold,
        num_zeros,
        scaling,
        judgement,
    )
    return replace(verdict, param_sums=params)


def _read(
    scalars: Sequence[Tensor], more: Tensor | None
) -> tuple[list[float], Tensor | None]:
    """Tensors of one element as numbers, and one of many on the host, by one transfer."""
    if not scalars:
        return [], more
    device, parts = scalars[0].device, [*scalars, *([] if more is None else [more])]
    read = torch.cat(
        [value.to(device, torch.float64).reshape(-1) for value in parts]
    ).cpu()
    count = len(scalars)
    return read[:count].tolist(), None if more is None else read[count:]


def _clip_coefficient(norm: float, limit: float) -> float:
    """``limit / (norm + 1e-6)`` where that is below 1, else 1 (Megatron's and torch's
    definition)."""
    return min(1.0, limit / (norm + 1e-6)) if limit > 0.0 else 1.0
