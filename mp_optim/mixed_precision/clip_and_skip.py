"""The decision of a step, from a few scalars, on the host or on the device; and the counts of
steps, including skipped ones."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from types import MappingProxyType
from typing import Any, ClassVar

import torch
from torch import Tensor

from mp_optim.core import DeviceMultiplier
from mp_optim.host.calls import weak_method
from mp_optim.host.transfer import Transfer, fetch, transfer_for
from mp_optim.kernels.kernel_args import fp32
from mp_optim.kernels.sums import index_on, root
from mp_optim.mixed_precision.grad_norm import EXCLUDED, MAIN_NORM, Measurement
from mp_optim.mixed_precision.observer import Observer

_Values = tuple[bool, float | None, int | None, str]


DISAGREEMENT, NOT_FINITE = "disagreement", "not_finite"
"""Causes of a skipped step: see :class:`Verdict`."""


class StepResult(Sequence[Any]):
    """The result of a step. It unpacks as Megatron's tuple ``(success, grad_norm,
    num_zeros_in_grad)``, and equals it.

    After a step that the host did not wait for, the first read of any value waits for the device;
    :attr:`is_known` is False then. Immutable; a pickled result holds values.

    Attributes:
        success: True if parameters were updated.
        grad_norm: global L2 norm of the unscaled gradients before clipping; None after an overflow.
        num_zeros_in_grad: zero gradient elements if ``log_num_zeros_in_grad``, else None.
        reason: the reason for a skip, in words; empty for a step that was taken. Not in the tuple.
    """

    __slots__ = ("_read", "_values")
    _values: _Values | None
    _read: Callable[[], _Values] | None

    def __init__(
        self,
        success: bool,
        grad_norm: float | None,
        num_zeros_in_grad: int | None,
        reason: str = "",
    ) -> None:
        self._values, self._read = (success, grad_norm, num_zeros_in_grad, reason), None

    @classmethod
    def later(cls, read: Callable[[], _Values]) -> StepResult:
        """Return a result that calls ``read`` for its values, once, when it is looked at."""
        result = cls.__new__(cls)
        result._values, result._read = None, read
        return result

    @property
    def is_known(self) -> bool:
        """Whether looking does not wait for the device."""
        return self._values is not None

    def _known(self) -> _Values:
        if self._values is None:
            assert self._read is not None
            self._values, self._read = self._read(), None
        return self._values

    @property
    def success(self) -> bool:
        return self._known()[0]

    @property
    def grad_norm(self) -> float | None:
        return self._known()[1]

    @property
    def num_zeros_in_grad(self) -> int | None:
        return self._known()[2]

    @property
    def reason(self) -> str:
        return self._known()[3]

    def __len__(self) -> int:
        return 3

    def __getitem__(self, index: Any) -> Any:
        return self._known()[:3][index]

    def __eq__(self, other: object) -> bool:
        return tuple(self) == tuple(other) if isinstance(other, (tuple, StepResult)) else False

    def __hash__(self) -> int:
        return hash(tuple(self))

    def __repr__(self) -> str:
        success, norm, zeros, reason = self._known()
        why = f", reason={reason!r}" if reason else ""
        values = f"success={success!r}, grad_norm={norm!r}, num_zeros_in_grad={zeros!r}"
        return f"StepResult({values}{why})"

    def __reduce__(self) -> tuple[Any, ...]:
        return StepResult, self._known()


@dataclass(frozen=True)
class Verdict:
    """One step's decision.

    Attributes:
        multipliers: FP32 value for each norm group: inverse loss scale times clip coefficient.
        cause: why nothing is stepped: ``not_finite``, ``over_threshold``, ``spike`` (an observer
            judged so), or ``disagreement`` of ranks that share parameters; empty for a step that is
            taken.
        norms: unscaled norm of each norm group.
        num_zeros: zero gradient elements, if counted.
        reason: why the step is skipped, in words; empty for one that is taken.
        scaling: the inverse loss scale before this step; empty without a scaler.
        limits: metrics of the observer that judged the step.
        param_sums: sum of squares of each parameter's gradient, still scaled, FP64 on the host, in
            slot order; None if they are not kept.
    """

    multipliers: dict[str, float] = field(default_factory=dict)
    cause: str = ""
    norms: dict[str, float] = field(default_factory=dict)
    num_zeros: int | None = None
    reason: str = ""
    scaling: tuple[float, ...] = ()
    limits: Mapping[str, float] = field(default_factory=dict)
    param_sums: Tensor | None = field(default=None, compare=False)

    @property
    def found_inf(self) -> bool:
        """True if some gradient is not finite."""
        return self.cause == NOT_FINITE

    @property
    def disagrees(self) -> bool:
        """True if ranks that share parameters would step them differently."""
        return self.cause == DISAGREEMENT

    @property
    def grad_norm(self) -> float | None:
        """The global norm, or None if it is not a number."""
        return None if self.found_inf else self.norms.get(MAIN_NORM, 0.0)

    @property
    def result(self) -> StepResult:
        """Return the result for the caller of ``step``."""
        if self.cause == NOT_FINITE:
            return StepResult(False, None, None, self.reason)
        norm = self.norms.get(MAIN_NORM, 0.0)
        return StepResult(not self.cause, norm, self.num_zeros, self.reason)


def not_finite(groups: Iterable[str], scaling: tuple[float, ...]) -> Verdict:
    """Return the verdict for norm groups with gradients that are not finite."""
    reason = f"the gradients of norm group {', '.join(groups)} hold an inf or nan"
    return Verdict(cause=NOT_FINITE, reason=reason, scaling=scaling)


def finite(
    multipliers: dict[str, float],
    norms: dict[str, float],
    threshold: float,
    num_zeros: int | None,
    scaling: tuple[float, ...],
    judged: tuple[str, dict[str, float]] = ("", {}),
) -> Verdict:
    """Return the verdict on finite gradients: the step is taken if the norm is not above a
    threshold, and no observer skips it.

    Args:
        judged: reason and metrics of the observer that judged the step.
    """
    norm = norms.get(MAIN_NORM, 0.0)
    reason, limits = judged
    cause = "spike" if reason else ""
    if norm > threshold:
        cause = "over_threshold"
        reason = f"the gradient norm is {norm:g}, over grad_norm_skip_threshold={threshold:g}"
    return Verdict(multipliers, cause, norms, num_zeros, reason, scaling, limits)


def decide(
    measurement: Measurement,
    scaled_by: Sequence[Tensor],
    config: Any,
    judge: Observer | None = None,
) -> Verdict:
    """Return the step's verdict, computed in double. Reads the device once.

    Args:
        measurement: agreed sums of squares of the gradients as they are (still scaled).
        scaled_by: reciprocal of the scale that was used in backward, shape (1,) FP64; empty for 1.
        config: reads ``clip_grad`` (<= 0: off) and ``grad_norm_skip_threshold``.
        judge: observer that judges the step, prepared for the host.
    """
    optional = measurement.disagreement, measurement.zeros
    scalars = [*measurement.sums.values(), *scaled_by]
    scalars += [value for value in optional if value is not None]
    read, params = _read(scalars, measurement.params) if scalars else ([], measurement.params)
    values = iter(read)
    sums = measurement.known or {name: next(values) for name in measurement.sums}
    scaling = tuple(next(values) for _ in scaled_by)
    inverse = scaling[0] if scaling else 1.0
    if measurement.disagreement is not None and next(values) != 0.0:
        return Verdict(cause=DISAGREEMENT)
    num_zeros = None if measurement.zeros is None else int(next(values))
    if not all(map(math.isfinite, sums.values())):
        bad = [name for name, value in sums.items() if not math.isfinite(value)]
        return replace(not_finite(bad, scaling), param_sums=params)
    norms = {name: math.sqrt(value) * inverse for name, value in sums.items()}
    limit, multipliers = config.clip_grad, {}
    for name, norm in norms.items():
        # Megatron's and torch's definition
        coefficient = min(1.0, limit / (norm + 1e-6)) if limit > 0.0 else 1.0
        multipliers[name] = fp32(inverse * coefficient)
    multipliers[EXCLUDED] = multipliers.get(MAIN_NORM, fp32(inverse))
    judged: tuple[str, dict[str, float]] = "", {}
    if judge is not None:
        norm = norms.get(MAIN_NORM, 0.0)
        _, numbers = judge.judge(torch.tensor(norm, dtype=torch.float64, device="cpu"))
        judged = judge.explain(norm, numbers.tolist())
    threshold = config.grad_norm_skip_threshold
    verdict = finite(multipliers, norms, threshold, num_zeros, scaling, judged)
    return verdict if params is None else replace(verdict, param_sums=params)


def _read(scalars: Sequence[Tensor], more: Tensor | None) -> tuple[list[float], Tensor | None]:
    """Return tensors of one element as numbers, and larger ones on the host, with one transfer."""
    device, parts = scalars[0].device, [*scalars, *([] if more is None else [more])]
    read = torch.cat([value.to(device, torch.float64).reshape(-1) for value in parts]).cpu()
    count = len(scalars)
    return read[:count].tolist(), None if more is None else read[count:]


# -- on the device --------------------------------------------------------------------------------
#
# The verdict as numbers that kernels read there, and that the host reads when it has to. Every
# operation is one IEEE operation in FP64 (root, product, quotient, comparison) and one rounding to
# FP32, so the bits are those of the host's.


@dataclass(eq=False)
class DeviceVerdict:
    """A verdict for kernels on the device, with its copy to the host in progress.

    The copy starts with the object, so settling waits for the verdict, not for kernels that were
    launched since.

    NOTE: ``multipliers`` and ``result`` refer to this object, so it must not keep them.

    Attributes:
        cause: empty, because the host does not know it.
        norms: empty, likewise; kernels read the flag next to each multiplier.
        names: norm groups, in the order of the rows.
        controls: FP32, shape (names, 2): each group's multiplier, and 0 unless the step is skipped.
        found_inf: bool, shape (): True if a gradient is not finite.
        report: FP64, 1-D: overflow, skip (2 or 3 if ranks disagree), norms, multipliers before
            rounding, the number of zeros if they were counted, the ``judged`` numbers of the
            observer that judges, the numbers of a verdict's ``scaling``, and the sums of ``params``
            parameters.
        counts_zeros: True if zeros were counted.
        threshold: the norm above which the step is skipped.
        judge: the observer that judges, or None.
        judged: number of its values.
        params: number of parameters whose sums of squares are kept, 0 for none.
    """

    cause: ClassVar[str] = ""
    norms: ClassVar[Mapping[str, float]] = MappingProxyType({})

    names: Sequence[str]
    controls: Tensor
    found_inf: Tensor
    report: Tensor
    counts_zeros: bool
    threshold: float
    judge: Observer | None
    judged: int
    params: int

    def __post_init__(self) -> None:
        self._read = fetch(_transfer(self.report.device), self.report)
        self._verdict: Verdict | None = None
        self._told_to: list[Callable[[Verdict], object]] = []

    @property
    def multipliers(self) -> dict[str, DeviceMultiplier]:
        """The multiplier of each norm group."""
        rows = zip(self.names, self.controls.unbind(), strict=True)
        return {
            name: DeviceMultiplier(row, lambda: bool(self.settle().cause)) for name, row in rows
        }

    @property
    def result(self) -> StepResult:
        """The result for the caller of ``step``; reading its values settles."""
        return StepResult.later(lambda: self.settle().result._known())

    def settle(self) -> Verdict:
        """Return the verdict in the host's numbers. Wait until the device has formed it, once."""
        if self._verdict is None:
            self._verdict = self._formed(self._read())
            told_to, self._told_to = self._told_to, []
            for tell in told_to:
                tell(self._verdict)
        return self._verdict

    def when_settled(self, tell: Callable[[Verdict], object]) -> None:
        """Call ``tell`` once, as soon as the verdict is on the host; now if it is. Callbacks are
        called in the order of registration.

        Args:
            tell: a callback without a strong reference to the optimizer, whose last verdict this
                is.
        """
        if self._verdict is None:
            self._told_to.append(tell)
        else:
            tell(self._verdict)

    def _formed(self, read: Tensor) -> Verdict:
        count = len(read) - self.params
        params = read[count:].clone() if self.params else None
        numbers, names = iter(read[:count].tolist()), self.names
        overflow, skip = bool(next(numbers)), next(numbers)
        norms = {name: next(numbers) for name in names}
        multipliers = {name: fp32(next(numbers)) for name in names}
        num_zeros = int(next(numbers)) if self.counts_zeros else None
        judged_numbers = [next(numbers) for _ in range(self.judged)]
        scaling = tuple(numbers)
        if skip > 1.0:
            return Verdict(cause=DISAGREEMENT, param_sums=params)
        if overflow:  # the norm is finite where the sum of squares is
            verdict = not_finite((n for n in names if not math.isfinite(norms[n])), scaling)
        else:
            judged: tuple[str, dict[str, float]] = "", {}
            if self.judge is not None and judged_numbers:
                judged = self.judge.explain(norms[MAIN_NORM], judged_numbers)
            verdict = finite(multipliers, norms, self.threshold, num_zeros, scaling, judged)
        return replace(verdict, param_sums=params)


def decide_on_device(
    measurement: Measurement,
    scaled_by: Sequence[Tensor],
    config: Any,
    judge: Observer | None = None,
) -> DeviceVerdict:
    """Return the verdict on the device of the measurement's sums, of which at least one exists,
    without a wait. ``judge`` gets the norm. Arguments as for :func:`decide`, on the same device."""
    names = list(measurement.sums)
    sums = torch.stack(list(measurement.sums.values()))
    scale = scaled_by[0].reshape(()) if scaled_by else None
    norms = root(sums) if scale is None else root(sums) * scale
    overflow = ~(sums.amax() < math.inf)  # sums of squares are never negative
    skip, judged, clipped = overflow, norms[:0], norms
    if MAIN_NORM in measurement.sums:
        main, threshold = names.index(MAIN_NORM), config.grad_norm_skip_threshold
        places = [main if name == EXCLUDED else place for place, name in enumerate(names)]
        clipped = norms.index_select(0, index_on(norms.device, tuple(places)))
        norm = norms[main]
        if threshold < math.inf:
            skip = overflow | (norm > threshold)
        if judge is not None:
            spike, judged = judge.judge(norm)
            skip = skip | spike
            judge.take(torch.where(overflow, math.nan, norm))
    multipliers = clip_coefficients(clipped, config.clip_grad)
    if scale is not None:
        multipliers = multipliers * scale
    flags = torch.stack([overflow, skip]).double()
    if measurement.disagreement is not None:
        flags[1] += 2.0 * (measurement.disagreement.to(sums.device) != 0.0)
    counted = [measurement.zeros, judged, *scaled_by, measurement.params]
    more = [value.double().reshape(-1) for value in counted if value is not None]
    return DeviceVerdict(
        names,
        torch.stack([multipliers, flags[1].expand_as(multipliers)], dim=1).float(),
        overflow,
        torch.cat([flags, norms, multipliers, *more]),
        measurement.zeros is not None,
        config.grad_norm_skip_threshold,
        judge,
        len(judged),
        0 if measurement.params is None else len(measurement.params),
    )


def clip_coefficients(norms: Tensor, limit: float) -> Tensor:
    """``limit / (norm + 1e-6)`` where that is below 1, else 1; not a number where the norm is
    none."""
    if not limit > 0.0:
        return torch.ones_like(norms)
    # torch computes `limit / ...` as limit times a reciprocal, which rounds twice
    dividend = torch.tensor(limit, dtype=norms.dtype, device="cpu")
    return (dividend / (norms + 1e-6)).clamp(max=1.0)


@cache
def _transfer(device: torch.device) -> Transfer:
    return transfer_for(device)


# -- counts ---------------------------------------------------------------------------------------
#
# A skipped step leaves no trace but in counts of skips. The counts, and who writes them:
#
# ``steps`` and ``skipped_steps`` of a stack, and the latter by cause: ``StepCounts``, here. The
# members of a composite share the composite's.
#
# A slot's ``step``, from which bias corrections and random numbers are made: ``GroupState.count``.
#
# - *The host decides*: ``take_step`` (``mixed_precision/step.py``) hands no skipped step down, so
#   nothing is counted.
# - *The device decides*: ``RuleExecutor.step_slots`` counts the step as taken, and
#   ``RuleState.settle`` takes it back before a count is read again, if ``DeviceVerdict.settle``
#   says that it was skipped.
# - *Speculation*: what is stepped during backward is not counted. ``SpeculativeStepper.publish``
#   (``offload/speculation.py``) calls ``GroupState.count`` as it swaps the buffers; a
#   skipped step is never published. It never meets a verdict on the device: with a slot on the host
#   ``PlacedExecutor.verdict_device`` is None, and the host decides.
#
# Loss scale, growth and hysteresis are the grad scaler's, for which a step that was skipped for a
# threshold is clean. ``StepWarnings`` (``monitor/step_warnings.py``) counts skips in a row,
# ``BackwardScheduler`` the outcomes of predictions.


class StepCounts:
    """Counts of the steps of one optimizer, and of skipped steps.

    Args:
        refuse: function that raises the error of a step on which ranks disagree.

    Attributes:
        steps: number of all steps.
        skipped: number of steps that the host knows to be skipped, by cause.
    """

    def __init__(self, refuse: Callable[[], object]) -> None:
        self._refuse = refuse
        self._last: Verdict | DeviceVerdict = Verdict()
        self.steps = 0
        self.skipped = Counter(not_finite=0, over_threshold=0, spike=0)

    def record(self, verdict: Verdict | DeviceVerdict) -> None:
        """Take a verdict as the last one, after the one before it is settled, and count its step;
        whether it was skipped, as soon as the host knows."""
        if isinstance(self._last, DeviceVerdict):
            self.settle()
        self._last = verdict
        self.steps += 1
        if isinstance(verdict, DeviceVerdict):
            verdict.when_settled(weak_method(self._see))
        elif verdict.cause:
            self._see(verdict)

    def _see(self, verdict: Verdict) -> None:
        if verdict.cause:
            self.skipped[verdict.cause] += 1

    def settle(self) -> Verdict:
        """Return the last verdict, and correct its step in the counts. Waits for the device once.

        Raises:
            ValueError: the ranks disagreed, saying about what; nothing was stepped.
        """
        if isinstance(self._last, DeviceVerdict):
            self._last = self._last.settle()
            if self._last.disagrees:
                self._refuse()
        return self._last

    def metrics(self) -> dict[str, float]:
        """Return the counts by name."""
        causes = {f"skipped_steps/{name}": n for name, n in self.skipped.items()}
        skipped = sum(self.skipped.values())
        return {"steps": self.steps, "skipped_steps": skipped, **causes}
