"""Decide on the device: the verdict as numbers that kernels read there, and that the host reads
when it has to.

Every operation is one IEEE operation in FP64 (root, product, quotient, comparison) and one rounding
to FP32, so the bits are those of :func:`~mp_optim.precision.verdict.decide`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from mp_optim.precision.measure import EXCLUDED, MAIN_NORM, Measurement
from mp_optim.precision.skip_rule import NUMBERS, RollingRule
from mp_optim.precision.verdict import StepResult, Verdict, finite, not_finite
from mp_optim.process.transfer import Transfer, transfer_for
from mp_optim.slots import DeviceMultiplier
from mp_optim.update.sums import root


@dataclass(frozen=True)
class VerdictNumbers:
    """A verdict's numbers on the device.

    Attributes:
        names: norm groups, in the order of the rows.
        controls: FP32, shape (names, 2): each group's multiplier, and 1 if the step is to be
            skipped, else 0.
        overflow: bool, shape (): some gradient is not finite.
        report: FP64, 1-D: overflow, skip (2 because ranks disagree), norms, multipliers, the number
            of zeros if they were counted, the rolling rule's numbers if there is one, what a
            verdict has as ``scaling``, and the sums of ``params`` parameters.
        counts_zeros: whether they were counted.
        threshold: the norm above which the step is skipped.
        rule: the rolling rule, if there is one.
        params: how many parameters' sums of squares are kept, 0 for none.
    """

    names: Sequence[str]
    controls: Tensor
    overflow: Tensor
    report: Tensor
    counts_zeros: bool
    threshold: float
    rule: RollingRule | None = None
    params: int = 0


def decide_on_device(
    measurement: Measurement,
    scaled_by: Sequence[Tensor],
    config: Any,
    rule: RollingRule | None = None,
) -> VerdictNumbers:
    """The verdict on the device of the measurement's sums, of which there is at least one; nothing
    waits. The step goes into the rule's window. Arguments as of
    :func:`~mp_optim.precision.verdict.decide`, on the same device."""
    names = list(measurement.sums)
    sums = torch.stack(list(measurement.sums.values()))
    norms = root(sums)
    if scaled_by:
        norms = norms * scaled_by[0].reshape(())
    multipliers = clip_coefficients(norms, config.clip_grad)
    if scaled_by:
        multipliers = multipliers * scaled_by[0].reshape(())
    multipliers = multipliers.float()
    overflow = ~(sums.amax() < math.inf)  # sums of squares: none is below 0
    skip, judged = overflow, norms[:0]
    if MAIN_NORM in measurement.sums:
        rows = dict(zip(names, multipliers.unbind(), strict=True))
        multipliers = torch.stack([rows[MAIN_NORM if name == EXCLUDED else name] for name in names])
        norm = norms[names.index(MAIN_NORM)]
        skip = overflow | (norm > config.grad_norm_skip_threshold)
        if rule is not None:
            spike, judged = rule.judge(norm)
            skip = skip | spike
            rule.take(torch.where(overflow, math.nan, norm))
    skips = skip.double()
    if measurement.disagreement is not None:
        disagrees = measurement.disagreement.to(sums.device) != 0.0
        skip = skip | disagrees
        skips = skip.double() + disagrees
    controls = torch.stack([multipliers, skip.float().expand_as(multipliers)], dim=1)
    decided = [overflow.double(), skips, norms, multipliers.double()]
    counted = [measurement.zeros, judged, *scaled_by, measurement.params]
    parts = [*decided, *(value for value in counted if value is not None)]
    return VerdictNumbers(
        names,
        controls,
        overflow,
        torch.cat([part.double().reshape(-1) for part in parts]),
        measurement.zeros is not None,
        config.grad_norm_skip_threshold,
        rule if len(judged) else None,
        0 if measurement.params is None else len(measurement.params),
    )


def clip_coefficients(norms: Tensor, limit: float) -> Tensor:
    """``limit / (norm + 1e-6)`` where that is below 1, else 1, also where it is not a number."""
    if not limit > 0.0:
        return torch.ones_like(norms)
    # not `limit / ...`, which torch computes as a reciprocal times limit: two roundings
    coefficients = torch.full_like(norms, limit) / (norms + 1e-6)
    return torch.fmin(coefficients, torch.ones_like(coefficients))


class Fetch:
    """A copy of an FP64 tensor that is on its way to the host from now on.

    Args:
        source: 1-D.
    """

    def __init__(self, source: Tensor) -> None:
        self._transfer = _transfer(source.device)
        host = self._transfer.empty_host(source.nbytes, True)
        self._copy = host.view(torch.float64)
        self._ticket = self._transfer.download([self._copy], [source])

    def read(self) -> Tensor:
        """The copy; waits until it has arrived."""
        self._transfer.wait(self._ticket)
        return self._copy


class DeviceVerdict:
    """A verdict that kernels on the device can follow, and whose copy to the host is on its way.

    The copy starts with the object, so settling waits for the verdict, not for kernels that were
    launched since.

    Attributes:
        multipliers: for each norm group, as in :class:`~mp_optim.precision.verdict.Verdict`.
        found_inf: bool tensor on the device, shape ().
        result: what the caller of ``step`` gets; looking at it settles.
        skip, norms: not as far as the host knows; the kernels look at the flag beside each
            multiplier.
    """

    skip = False
    norms: Mapping[str, float] = MappingProxyType({})

    def __init__(self, decided: VerdictNumbers) -> None:
        self._decided = decided
        self._report = Fetch(decided.report)
        self._verdict: Verdict | None = None
        self._told_to: list[Callable[[Verdict], None]] = []
        self.found_inf = decided.overflow
        self.multipliers = {
            name: DeviceMultiplier(row, lambda: self.settle().skip)
            for name, row in zip(decided.names, decided.controls.unbind(), strict=True)
        }
        self.result = StepResult.later(lambda: (*self.settle().result, self.settle().reason))

    def settle(self) -> Verdict:
        """The verdict in the host's numbers; waits until the device has formed it, once."""
        if self._verdict is None:
            self._verdict = _as_verdict(self._decided, self._report.read())
            told_to, self._told_to = self._told_to, []
            for tell in told_to:
                tell(self._verdict)
        return self._verdict

    def when_settled(self, tell: Callable[[Verdict], None]) -> None:
        """Call ``tell`` once, as soon as the verdict was waited for; now if it was. Those who asked
        first are told first."""
        if self._verdict is None:
            self._told_to.append(tell)
        else:
            tell(self._verdict)


def _as_verdict(decided: VerdictNumbers, read: Tensor) -> Verdict:
    count = len(read) - decided.params
    report, params = read[:count].tolist(), read[count:].clone() if decided.params else None
    numbers, names = iter(report), decided.names
    overflow, skip = bool(next(numbers)), next(numbers)
    norms = {name: next(numbers) for name in names}
    multipliers = {name: next(numbers) for name in names}
    num_zeros = int(next(numbers)) if decided.counts_zeros else None
    judged = [next(numbers) for _ in range(NUMBERS if decided.rule else 0)]
    scaling = tuple(numbers)
    if skip > 1.0:
        return Verdict(skip=True, disagrees=True, param_sums=params)
    if overflow:  # the norm is finite where the sum of squares is
        verdict = not_finite((n for n in names if not math.isfinite(norms[n])), scaling)
    else:
        judgement = decided.rule.judgement(judged) if decided.rule else None
        verdict = finite(multipliers, norms, decided.threshold, num_zeros, scaling, judgement)
    return replace(verdict, param_sums=params)


@cache
def _transfer(device: torch.device) -> Transfer:
    return transfer_for(device)
