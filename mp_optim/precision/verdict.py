"""Decide: from a few scalars to what happens with this step."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NoReturn, overload

import torch
from torch import Tensor

from mp_optim.precision.measure import EXCLUDED, MAIN_NORM, Measurement
from mp_optim.precision.skip_rule import Judgement, RollingRule
from mp_optim.update.kernel_args import fp32

_Values = tuple[bool, float | None, int | None]
_Known = _Values | tuple[bool, float | None, int | None, str]


class StepResult:
    """What a step did; unpacks as Megatron's tuple ``(success, grad_norm, num_zeros_in_grad)``, and
    is equal to it.

    After a step that the host did not wait for, the first look at any value waits for the device;
    :attr:`is_known` says whether it would. Immutable; a pickled one holds values.

    Attributes:
        success: whether parameters were updated.
        grad_norm: global L2 norm of the unscaled gradients before clipping; None after an overflow.
        num_zeros_in_grad: zero gradient elements if ``log_num_zeros_in_grad``, else None.
        reason: why the step was skipped, in words; empty for one that was taken. Not in the tuple.
    """

    __slots__ = ("_read", "_reason", "_values")
    _values: _Values | None
    _reason: str
    _read: Callable[[], _Known] | None

    def __init__(
        self,
        success: bool,
        grad_norm: float | None,
        num_zeros_in_grad: int | None,
        reason: str = "",
    ) -> None:
        object.__setattr__(self, "_values", (success, grad_norm, num_zeros_in_grad))
        object.__setattr__(self, "_reason", reason)
        object.__setattr__(self, "_read", None)

    @classmethod
    def later(cls, read: Callable[[], _Known]) -> StepResult:
        """A result that asks ``read`` for its values, once, when it is looked at."""
        result = cls.__new__(cls)
        object.__setattr__(result, "_values", None)
        object.__setattr__(result, "_read", read)
        return result

    @property
    def is_known(self) -> bool:
        """Whether looking does not wait for the device."""
        return self._values is not None

    def _tuple(self) -> _Values:
        if self._values is None:
            assert self._read is not None
            StepResult.__init__(self, *self._read())
        assert self._values is not None
        return self._values

    @property
    def success(self) -> bool:
        return self._tuple()[0]

    @property
    def grad_norm(self) -> float | None:
        return self._tuple()[1]

    @property
    def num_zeros_in_grad(self) -> int | None:
        return self._tuple()[2]

    @property
    def reason(self) -> str:
        self._tuple()
        return self._reason

    def __len__(self) -> int:
        return 3

    def __iter__(self) -> Iterator[Any]:
        return iter(self._tuple())

    @overload
    def __getitem__(self, index: int) -> Any: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[Any, ...]: ...
    def __getitem__(self, index: int | slice) -> Any:
        return self._tuple()[index]

    def __eq__(self, other: object) -> bool:
        if isinstance(other, StepResult):
            return self._tuple() == other._tuple()
        return self._tuple() == other if isinstance(other, tuple) else NotImplemented

    def __hash__(self) -> int:
        return hash(self._tuple())

    def __repr__(self) -> str:
        success, norm, zeros = self._tuple()
        why = f", reason={self._reason!r}" if self._reason else ""
        values = f"success={success!r}, grad_norm={norm!r}, num_zeros_in_grad={zeros!r}"
        return f"StepResult({values}{why})"

    def __reduce__(self) -> tuple[Any, ...]:
        return StepResult, (*self._tuple(), self._reason)

    def __setattr__(self, name: str, value: object) -> NoReturn:
        raise AttributeError(f"a StepResult cannot be changed ({name}={value!r})")

    def __delattr__(self, name: str) -> NoReturn:
        raise AttributeError(f"a StepResult cannot be changed (del {name})")


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
        return None if self.found_inf else self.norms.get(MAIN_NORM, 0.0)

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
        zeros = None if self.found_inf else self.num_zeros
        return StepResult(not self.skip, self.grad_norm, zeros, self.reason)


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
    norm, spike = norms.get(MAIN_NORM, 0.0), ""
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
    scaled_by: Sequence[Tensor],
    config: Any,
    rule: RollingRule | None = None,
) -> Verdict:
    """The step's verdict, formed in double; reads the device once.

    Args:
        measurement: agreed sums of squares of the gradients as they are (still scaled).
        scaled_by: reciprocal of the scale that was used in backward, shape (1,) FP64, and the grad
            scaler's trackers; empty for 1.
        config: reads ``clip_grad`` (<= 0: off) and ``grad_norm_skip_threshold``.
        rule: judges the step, which was begun on the host; its window stays as it is.
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
        return Verdict(skip=True, disagrees=True)
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
    judgement = None if rule is None else rule.judge_on_host(norms.get(MAIN_NORM, 0.0))
    verdict = finite(
        multipliers, norms, config.grad_norm_skip_threshold, num_zeros, scaling, judgement
    )
    return verdict if params is None else replace(verdict, param_sums=params)


def _read(scalars: Sequence[Tensor], more: Tensor | None) -> tuple[list[float], Tensor | None]:
    """Tensors of one element as numbers, and one of many on the host, by one transfer."""
    device, parts = scalars[0].device, [*scalars, *([] if more is None else [more])]
    read = torch.cat([value.to(device, torch.float64).reshape(-1) for value in parts]).cpu()
    count = len(scalars)
    return read[:count].tolist(), None if more is None else read[count:]
