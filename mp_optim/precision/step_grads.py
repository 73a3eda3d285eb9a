"""The gradients of one step, as one part of a stack collected them: what is measured, and what is
stepped when the verdict is known."""

from __future__ import annotations

import functools
import operator
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

from mp_optim.precision.device_verdict import DeviceVerdict
from mp_optim.precision.measure import Measurement
from mp_optim.precision.param_sums import UpdateWatch
from mp_optim.precision.verdict import Verdict
from mp_optim.slots import Multiplier


class StepGrads(ABC):
    """Gradients that were collected for one step. They are let go with this object."""

    @abstractmethod
    def has_any(self) -> bool:
        """Whether any parameter has a gradient."""

    @abstractmethod
    def sums(self) -> Measurement:
        """Sums of squares, agreed with the other ranks."""

    @abstractmethod
    def watch_updates(self) -> list[UpdateWatch]:
        """What is to be compared with the parameters after :meth:`apply`, part by part."""

    @abstractmethod
    def apply(self, verdict: Verdict | DeviceVerdict) -> None:
        """Step the slots that have a gradient, unless the verdict says skip."""

    @abstractmethod
    def step(
        self, multipliers: Mapping[str, Multiplier], grad_norm: float | None = None
    ) -> None:
        """Step the slots that have a gradient.

        Args:
            multipliers: by norm group.
            grad_norm: after clipping, for rules that clip by it themselves; they need a number.
        """

    @abstractmethod
    def graph_key(self) -> Any:
        """What a CUDA graph of the measurement depends on, apart from what the memory there
        holds."""

    @abstractmethod
    def obstacle(self) -> str:
        """Why this step cannot be captured; empty if it can."""


class GradsOfParts(StepGrads):
    """The parts' gradients: their measurements are one measurement, the verdict is for all."""

    def __init__(self, parts: Sequence[StepGrads]) -> None:
        self._parts = parts

    def has_any(self) -> bool:
        return any(part.has_any() for part in self._parts)

    def sums(self) -> Measurement:
        return functools.reduce(operator.add, (part.sums() for part in self._parts))

    def watch_updates(self) -> list[UpdateWatch]:
        return [watch for part in self._parts for watch in part.watch_updates()]

    def apply(self, verdict: Verdict | DeviceVerdict) -> None:
        for part in self._parts:
            part.apply(verdict)

    def step(
        self, multipliers: Mapping[str, Multiplier], grad_norm: float | None = None
    ) -> None:
        for part in self._parts:
            part.step(multipliers, grad_norm)

    def graph_key(self) -> Any:
        return [part.graph_key() for part in self._parts]

    def obstacle(self) -> str:
        return next(filter(None, (part.obstacle() for part in self._parts)), "")
