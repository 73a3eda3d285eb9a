"""The decision to take or skip a step, formed on the host or on the device, and the counts of taken
and skipped steps."""

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
from mp_optim.host.transfer import fetch, transfer_for
from mp_optim.kernels.kernel_args import fp32
from mp_optim.kernels.sums import index_on, root
from mp_optim.mixed_precision.grad_norm import EXCLUDED, MAIN_NORM, Measurement
from mp_optim.mixed_precision.observer import Observer, Observers

_Values = tuple[bool, float | None, int | None, str]
_transfer = cache(transfer_for)

DISAGREEMENT, NOT_FINITE = "disagreement", "not_finite"
"""Two causes of a skipped step (:attr:`Verdict.cause`)."""


class StepResult(Sequence[Any]):
    """The result of a step. A result unpacks as Megatron's tuple ``(success, grad_norm,
    num_zeros_in_grad)`` and equals that tuple.

    If the host did not wait for the step, :attr:`is_known` is False, and the first read of a value
    waits for the device. A result is immutable. A pickled result contains the values.

    Attributes:
        success: True if parameters were updated.
        grad_norm: global L2 norm of the unscaled gradients before clipping; None after an overflow.
        num_zeros_in_grad: number of zero gradient elements with ``log_num_zeros_in_grad``, else
            None.
        reason: sentence with the reason for a skip; empty for a step that was taken. The tuple does
            not contain this sentence.
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
        """Return a result that calls ``read`` at the first read of an attribute, and keeps the
        values.

        Args:
            read: function that returns success, norm, number of zeros and reason; called once.
        """
        result = cls.__new__(cls)
        result._values, result._read = None, read
        return result

    @property
    def is_known(self) -> bool:
        """True if reading a value does not wait for the device."""
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
    """The decision about one step, known to the host.

    Attributes:
        multipliers: FP32 factor of the gradients of each norm group: inverse loss scale times clip
            coefficient.
        cause: cause of a skip: ``not_finite``; ``over_threshold``; ``spike``, found by an observer;
            or ``disagreement`` of ranks that share parameters. Empty for a step that is taken.
        norms: unscaled norm of each norm group.
        num_zeros: number of zero gradient elements; None if they were not counted.
        reason: sentence with the reason for a skip; empty for a step that is taken.
        scaling: the inverse loss scale before this step; empty without a loss scaler.
        limits: metrics of the observer that judged the step.
        param_sums: sum of squares of each parameter's gradient, still scaled: FP64 on the host, in
            slot order. None if the sums are not kept.
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
        """True if a gradient has an inf or nan."""
        return self.cause == NOT_FINITE

    @property
    def grad_norm(self) -> float | None:
        """The global norm of the unscaled gradients; None if a gradient is not finite."""
        return None if self.found_inf else self.norms.get(MAIN_NORM, 0.0)

    @property
    def result(self) -> StepResult:
        """The :class:`StepResult` that ``optimizer.step()`` returns."""
        if self.cause == NOT_FINITE:
            return StepResult(False, None, None, self.reason)
        norm = self.norms.get(MAIN_NORM, 0.0)
        return StepResult(not self.cause, norm, self.num_zeros, self.reason)


def not_finite(groups: Iterable[str], scaling: tuple[float, ...]) -> Verdict:
    """Return the verdict that skips a step because of an inf or nan.

    Args:
        groups: names of the norm groups with such a gradient.
        scaling: the inverse loss scale; empty without a loss scaler.
    """
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
    """Return the verdict on finite gradients. The step is skipped if the main norm is above a
    threshold, or if an observer found a spike.

    Args:
        multipliers: factor of each norm group.
        norms: unscaled norm of each norm group.
        threshold: largest norm of a step that is taken.
        num_zeros: number of zero gradient elements, or None.
        scaling: the inverse loss scale; empty without a loss scaler.
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
    """Return the verdict on a step, computed in FP64 on the host. Device memory is read once.

    Args:
        measurement: agreed sums of squares of the gradients, before the loss scale is divided out.
        scaled_by: one FP64 tensor of shape (1,) with the inverse loss scale of the backward pass;
            empty without a loss scaler.
        config: provides ``clip_grad`` (no clipping if <= 0) and ``grad_norm_skip_threshold``.
        judge: observer that may skip the step, called on the host; None without such an observer.
    """
    optional = measurement.disagreement, measurement.zeros
    scalars = [*measurement.sums.values(), *scaled_by]
    scalars += [value for value in optional if value is not None]
    read, params = [], measurement.params
    if scalars:
        parts = scalars if params is None else [*scalars, params]
        device, count = scalars[0].device, len(scalars)
        host = torch.cat([value.to(device, torch.float64).reshape(-1) for value in parts]).cpu()
        read, params = host[:count].tolist(), None if params is None else host[count:]
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
        # This is the clip coefficient of Megatron and torch.
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


# -- on the device --------------------------------------------------------------------------------
#
# The device forms a verdict for kernels, and the host reads the verdict only if it needs numbers.
# Every operation is one IEEE operation in FP64 (root, product, quotient, comparison) and one
# rounding to FP32, so device and host compute the same bits.


@dataclass(eq=False)
class DeviceVerdict:
    """The decision about one step, formed on the device for kernels that read the decision there.

    The constructor starts to copy the decision to the host. So :meth:`wait` waits only for the
    decision, and not for kernels that were launched later.

    NOTE: do not store the values of ``multipliers`` and ``result`` in this object. These values
    refer to this object, so storing them would make a reference cycle.

    Attributes:
        cause: always empty, because the host does not know the cause.
        norms: always empty, because the host does not know the norms.
        names: names of the norm groups, in the order of the rows of ``controls``.
        controls: FP32, shape (names, 2): the multiplier of each group, and a flag that is not 0 if
            the step is skipped.
        found_inf: bool, shape (): True if a gradient is not finite.
        report: FP64, 1-D: overflow; skip (2 or 3 if ranks disagree); norms; multipliers before
            rounding; number of zeros if counted; numbers of the observer that judges; inverse loss
            scale if any; sum of squares of each parameter if kept.
        counts_zeros: True if zeros were counted.
        threshold: largest norm of a step that is taken.
        judge: observer that may skip the step, or None.
        judged: number of the observer's numbers in ``report``.
        params: number of parameters whose sums of squares are kept; 0 for none.
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
        self._callbacks: list[Callable[[Verdict], object]] = []

    @property
    def multipliers(self) -> dict[str, DeviceMultiplier]:
        """The multiplier of each norm group by name, as a pair of numbers on the device that
        kernels read."""
        rows = zip(self.names, self.controls.unbind(), strict=True)
        return {name: DeviceMultiplier(row, lambda: bool(self.wait().cause)) for name, row in rows}

    @property
    def result(self) -> StepResult:
        """The :class:`StepResult` that ``optimizer.step()`` returns. Reading a value waits for the
        device."""
        return StepResult.later(lambda: self.wait().result._known())

    def wait(self) -> Verdict:
        """Return the verdict as numbers on the host. The first call waits until the device has
        formed the verdict."""
        if self._verdict is not None:
            return self._verdict
        read, names = self._read(), self.names
        count = len(read) - self.params
        params = read[count:].clone() if self.params else None
        numbers = iter(read[:count].tolist())
        overflow, skip = bool(next(numbers)), next(numbers)
        norms = {name: next(numbers) for name in names}
        multipliers = {name: fp32(next(numbers)) for name in names}
        num_zeros = int(next(numbers)) if self.counts_zeros else None
        judged_numbers = [next(numbers) for _ in range(self.judged)]
        scaling = tuple(numbers)
        if skip > 1.0:
            verdict = Verdict(cause=DISAGREEMENT)
        elif overflow:
            # A norm is finite exactly if the sum of squares is finite, so the norms show which
            # groups have an inf or nan.
            verdict = not_finite((n for n in names if not math.isfinite(norms[n])), scaling)
        else:
            judged: tuple[str, dict[str, float]] = "", {}
            if self.judge is not None and judged_numbers:
                judged = self.judge.explain(norms[MAIN_NORM], judged_numbers)
            verdict = finite(multipliers, norms, self.threshold, num_zeros, scaling, judged)
        self._verdict = verdict = replace(verdict, param_sums=params)
        callbacks, self._callbacks = self._callbacks, []
        for callback in callbacks:
            callback(verdict)
        return verdict

    def when_known(self, callback: Callable[[Verdict], object]) -> None:
        """Call a function with the verdict as soon as :meth:`wait` has read the verdict, or now if
        it was read already. Functions are called once, in the order of registration.

        Args:
            callback: the function. The optimizer keeps its last verdict, so the function must not
                refer to the optimizer.
        """
        if self._verdict is None:
            self._callbacks.append(callback)
        else:
            callback(self._verdict)


def decide_on_device(
    measurement: Measurement,
    scaled_by: Sequence[Tensor],
    config: Any,
    judge: Observer | None = None,
) -> DeviceVerdict:
    """Return the verdict on a step, formed on the device without a wait.

    Args:
        measurement: agreed sums of squares, at least one; all tensors are on one device.
        scaled_by: the inverse loss scale, FP64, shape (1,), on that device; empty without a loss
            scaler.
        config: provides ``clip_grad`` and ``grad_norm_skip_threshold``.
        judge: observer that may skip the step, called on the device; None without such an observer.
    """
    names = list(measurement.sums)
    sums = torch.stack(list(measurement.sums.values()))
    scale = scaled_by[0].reshape(()) if scaled_by else None
    norms = root(sums) if scale is None else root(sums) * scale
    # Sums of squares are never negative, so this comparison is False only for inf and nan.
    overflow = ~(sums.amax() < math.inf)
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
    """Return the clip coefficient of each norm: ``min(1, limit / (norm + 1e-6))``; nan for a nan
    norm.

    Args:
        norms: FP64.
        limit: the largest norm after clipping; no clipping if <= 0.
    """
    if not limit > 0.0:
        return torch.ones_like(norms)
    # Divide tensors, because torch computes `number / tensor` by a reciprocal, which rounds twice.
    dividend = torch.tensor(limit, dtype=norms.dtype, device="cpu")
    return (dividend / (norms + 1e-6)).clamp(max=1.0)


# -- counts ---------------------------------------------------------------------------------------
#
# A skipped step changes no parameter, moment, average or step count of a slot. It does change the
# loss scale, the skip rule's window, the speculation record and ``StepCounts``.
#
# There are two kinds of counts:
#
# - ``StepCounts`` below counts the steps of a stack, and the skipped steps by cause. The members of
#   a composite share the counts of the composite.
# - ``GroupState.steps`` has the number of steps of each slot (the state ``step``). Bias corrections
#   and random numbers depend on this count.
#
# A skipped step must not change the count of a slot:
#
# - If the host decides to skip, ``WrappedGrads.run`` (``mixed_precision/step.py``) calls no
#   executor. So no slot counts the step.
# - If the device decides, ``RuleExecutor.run_step`` counts the step as taken.
#   ``RuleState.subtract_skipped``, which runs before the next plan and before any read of state,
#   waits for the verdict (``DeviceVerdict.wait``) and subtracts the step.
# - A speculative step during backward is counted only when ``SpeculativeStepper.publish``
#   (``offload/speculation.py``) swaps the buffers, and the buffers of a skipped step are not
#   swapped. With a slot on the host, ``PlacedExecutor.verdict_device`` returns None, so the host
#   decides.
#
# The grad scaler counts a step over the threshold as a clean step. ``StepWarnings``
# (``monitor/step_warnings.py``) counts skipped steps in a row. ``BackwardScheduler`` counts right
# and wrong predictions.


class StepCounts:
    """The number of steps of a stack and of the skipped steps among them, and the last verdict.

    Args:
        refuse: function that raises the error of a step on which ranks disagree.

    Attributes:
        steps: number of all steps, taken and skipped.
        skipped: number of skipped steps by cause. A skip that only the device knows is not counted
            yet.
    """

    def __init__(self, refuse: Callable[[], object]) -> None:
        self._refuse = refuse
        self._last: Verdict | DeviceVerdict = Verdict()
        self.steps = 0
        self.skipped = Counter(not_finite=0, over_threshold=0, spike=0)

    def record(
        self, verdict: Verdict | DeviceVerdict, observers: Observers, judge: Observer | None
    ) -> None:
        """Call the observers that run before the first write of a step. Count the step, and keep
        the verdict.

        If the previous verdict was formed on the device, wait for the previous verdict first. A
        skip is counted as soon as the host knows the verdict.

        Args:
            verdict: the verdict on the step.
            observers: observers of the stack.
            judge: the observer that judged the step on the host; None without such an observer.
        """
        for before_step in observers.before_step:
            before_step()
        if judge is not None and MAIN_NORM in verdict.norms:
            judge.take(torch.tensor(verdict.norms[MAIN_NORM], dtype=torch.float64, device="cpu"))
        if isinstance(self._last, DeviceVerdict):
            self.last_verdict()
        self._last = verdict
        self.steps += 1
        if isinstance(verdict, DeviceVerdict):
            verdict.when_known(weak_method(self._see))
        elif verdict.cause:
            self._see(verdict)

    def _see(self, verdict: Verdict) -> None:
        if verdict.cause:
            self.skipped[verdict.cause] += 1

    def last_verdict(self) -> Verdict:
        """Return the last verdict as numbers on the host. If the device formed the verdict, the
        call waits for the device.

        Raises:
            ValueError: the ranks have different settings, so no parameter was stepped; the message
                has the difference.
        """
        if isinstance(self._last, DeviceVerdict):
            self._last = self._last.wait()
            if self._last.cause == DISAGREEMENT:
                self._refuse()
        return self._last

    def metrics(self) -> dict[str, float]:
        """Return the numbers of steps and of skipped steps, under the names that
        ``optimizer.metrics()`` uses."""
        causes = {f"skipped_steps/{name}": n for name, n in self.skipped.items()}
        skipped = sum(self.skipped.values())
        return {"steps": self.steps, "skipped_steps": skipped, **causes}
