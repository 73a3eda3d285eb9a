"""The gradients of one step, as one member of a stack collected them: what is measured, and what is
stepped when the verdict is known."""

from __future__ import annotations

import functools
import operator
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

from mp_optim.precision.measure import Measurement, UpdateWatch
from mp_optim.slots import Multiplier


class StepGrads(ABC):
    """Gradients that were collected for one step. They are let go with this object."""

    @abstractmethod
    def has_any(self) -> bool:
        """Whether any parameter has a gradient."""

    @abstractmethod
    def sums(self, on_host: bool = False) -> Measurement:
        """Sums of squares, agreed with the other ranks.

        Args:
            on_host: the verdict is formed there, so that sums may be given as numbers.
        """

    @abstractmethod
    def watch_updates(self) -> list[UpdateWatch]:
        """What is to be compared with the parameters after the step, member by member."""

    @abstractmethod
    def skip(self) -> None:
        """The host's verdict is to step nothing."""

    @abstractmethod
    def step(self, multipliers: Mapping[str, Multiplier], grad_norm: float | None = None) -> None:
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


class GradsOfMembers(StepGrads):
    """The members' gradients: their measurements are one measurement, the verdict is for all."""

    def __init__(self, members: Sequence[StepGrads]) -> None:
        self._members = members

    def has_any(self) -> bool:
        return any(member.has_any() for member in self._members)

    def sums(self, on_host: bool = False) -> Measurement:
        return functools.reduce(operator.add, (member.sums() for member in self._members))

    def watch_updates(self) -> list[UpdateWatch]:
        return [watch for member in self._members for watch in member.watch_updates()]

    def skip(self) -> None:
        for member in self._members:
            member.skip()

    def step(self, multipliers: Mapping[str, Multiplier], grad_norm: float | None = None) -> None:
        for member in self._members:
            member.step(multipliers, grad_norm)

    def graph_key(self) -> Any:
        return [member.graph_key() for member in self._members]

    def obstacle(self) -> str:
        return next(filter(None, (member.obstacle() for member in self._members)), "")
