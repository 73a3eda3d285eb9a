"""Decide on the device: the verdict as numbers that kernels read there, and that the host reads
when it has to.

Every operation is one IEEE operation in FP64 (root, product, quotient, comparison) and one rounding
to FP32, so the bits are those of :func:`~mp_optim.precision.verdict.decide`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from mp_optim.placement.transfer import Transfer, transfer_for
from mp_optim.precision.measure import EXCLUDED, MAIN, Measurement
from mp_optim.precision.result import StepResult
from mp_optim.precision.verdict import Verdict
from mp_optim.slots import DeviceMultiplier
from mp_optim.update.sums import root


@dataclass(frozen=True)
class Formed:
    """A verdict's numbers on the device.

    Attributes:
        names: norm groups, in the order of the rows.
        controls: FP32, shape (names, 2): each group's multiplier, and 1 if the step is to be
            skipped, else 0.
        overflow: bool, shape (): some gradient is not finite.
        report: FP64, shape (2 + 2 * names,), or one more with the number of zeros: overflow, skip
            (2 because ranks disagree), norms, multipliers.
    """

    names: Sequence[str]
    controls: Tensor
    overflow: Tensor
    report: Tensor


def form(measurement: Measurement, inv_scale: Tensor | None, config: Any) -> Formed:
    """The verdict on the device of the measurement's sums, of which there is at least one; nothing
    waits."""
    names = list(measurement.sums)
    sums = torch.stack(list(measurement.sums.values()))
    inverse: Tensor | float = 1.0 if inv_scale is None else inv_scale.reshape(())
    norms = root(sums) * inverse
    multipliers = (clip_coefficients(norms, config.clip_grad) * inverse).float()
    overflow = ~sums.isfinite().all()
    skip = overflow
    if MAIN in measurement.sums:
        rows = dict(zip(names, multipliers.unbind(), strict=True))
        multipliers = torch.stack(
            [rows[MAIN if name == EXCLUDED else name] for name in names]
        )
        skip = overflow | (norms[names.index(MAIN)] > config.grad_norm_skip_threshold)
    skips = skip.double()
    if measurement.disagreement is not None:
        disagrees = measurement.disagreement.to(sums.device) != 0.0
        skip = skip | disagrees
        skips = skip.double() + disagrees
    controls = torch.stack([multipliers, skip.float().expand_as(multipliers)], dim=1)
    parts = [
        overflow.double().reshape(1),
        skips.reshape(1),
        norms,
        multipliers.double(),
    ]
    if measurement.zeros is not None:
        parts.append(measurement.zeros.double().reshape(1))
    return Formed(names, controls, overflow, torch.cat(parts))


def clip_coefficients(norms: Tensor, limit: float) -> Tensor:
    """``limit / (norm + 1e-6)`` where that is below 1, else 1, also where it is not a number."""
    if not limit > 0.0:
        return torch.ones_like(norms)
    # not `limit / ...`, which torch computes as a reciprocal times limit: two roundings
    coefficients = torch.full_like(norms, limit) / (norms + 1e-6)
    return torch.where(coefficients < 1.0, coefficients, 1.0)


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

    def __init__(self, formed: Formed) -> None:
        self._names = formed.names
        self._transfer = _transfer(formed.report.device)
        host = self._transfer.empty_host(formed.report.nbytes, True)
        self._report = host.view(torch.float64)
        self._ticket = self._transfer.download([self._report], [formed.report])
        self._verdict: Verdict | None = None
        self._told_to: Callable[[Verdict], None] | None = None
        self.found_inf = formed.overflow
        self.multipliers = {
            name: DeviceMultiplier(row, lambda: self.settle().skip)
            for name, row in zip(formed.names, formed.controls.unbind(), strict=True)
        }
        self.result = StepResult.later(lambda: self.settle().values)

    def settle(self) -> Verdict:
        """The verdict in the host's numbers; waits until the device has formed it, once."""
        if self._verdict is None:
            self._transfer.wait(self._ticket)
            self._verdict = _as_verdict(self._names, self._report.tolist())
            if (tell := self._told_to) is not None:
                self._told_to = None
                tell(self._verdict)
        return self._verdict

    def when_settled(self, tell: Callable[[Verdict], None]) -> None:
        """Call ``tell`` once, as soon as the verdict was waited for; now if it was."""
        if self._verdict is None:
            self._told_to = tell
        else:
            tell(self._verdict)


def _as_verdict(names: Sequence[str], report: Sequence[float]) -> Verdict:
    overflow, skip, count = bool(report[0]), bool(report[1]), len(names)
    if report[1] > 1.0:
        return Verdict(skip=True, disagrees=True)
    if overflow:
        return Verdict(skip=True, found_inf=True)
    norms = dict(zip(names, report[2 : 2 + count], strict=True))
    multipliers = dict(zip(names, report[2 + count : 2 + 2 * count], strict=True))
    zeros = report[2 + 2 * count :]
    return Verdict(multipliers, skip, False, norms, int(zeros[0]) if zeros else None)


@cache
def _transfer(device: torch.device) -> Transfer:
    return transfer_for(device)


def decide_on_device(
    measurement: Measurement, inv_scale: Tensor | None, config: Any
) -> DeviceVerdict:
    """As :func:`~mp_optim.precision.verdict.decide`, on the device and without waiting for it.

    Args:
        measurement: at least the sum of the main norm group, on one device.
        inv_scale: on the same device, shape (1,) FP64; or None for 1.
        config: reads ``clip_grad`` and ``grad_norm_skip_threshold``.
    """
    return DeviceVerdict(form(measurement, inv_scale, config))
