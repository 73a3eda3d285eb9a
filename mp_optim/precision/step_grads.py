"""The gradients of one step, as one member of a stack collected them: what is measured, and what is
stepped when the verdict is known; and how steps are counted, also those that are skipped.

A skipped step leaves no trace but in counts of skips. The counts, and who writes them:

``steps`` and ``skipped_steps`` of a stack, and the latter by cause: :class:`StepCounts`, here. Each
member of a composite has its own; ``metrics`` shows the first member's.

A slot's ``step``, from which bias corrections and random numbers are made: ``GroupState.count``.

- *The host decides*: ``WrappedGrads.apply`` (``precision/wrapped_optimizer.py``) does not hand a
  skipped step down, so nothing is counted.
- *The device decides*: ``RuleExecutor.step_slots`` counts the step as taken, and
  ``RuleState.settle`` takes it back before a count is read again, if ``DeviceVerdict.settle``
  says that it was skipped.
- *CUDA graph*: the rehearsal before a replay goes through ``step_slots`` and counts like this too.
  It is taken back if the device skipped the step, or if nothing was replayed: ``_Attempt`` in
  ``precision/graph_step.py``. The graph itself counts nothing.
- *Speculation*: what is stepped during backward is not counted. ``Ahead.publish``
  (``placement/speculation.py``) calls ``RuleState.count`` as it swaps the buffers; a
  skipped step is never published. It never meets a verdict on the device: with a slot on the host
  ``PlacedExecutor.verdict_device`` is None, and the host decides.

Besides: loss scale, growth and hysteresis are the grad scaler's, for which a step that was skipped
for a threshold is clean. Skips in a row are the ``StandstillWatch``'s, outcomes of predictions
``Schedule``'s, captures and replays, skipped or not, ``GraphedStep``'s.
"""

from __future__ import annotations

import functools
import operator
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from mp_optim.precision.device_verdict import DeviceVerdict
from mp_optim.precision.measure import Measurement, UpdateWatch
from mp_optim.precision.verdict import Verdict
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
        """What is to be compared with the parameters after :meth:`apply`, member by member."""

    @abstractmethod
    def apply(self, verdict: Verdict | DeviceVerdict) -> None:
        """Step the slots that have a gradient, unless the verdict says skip."""

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

    def apply(self, verdict: Verdict | DeviceVerdict) -> None:
        for member in self._members:
            member.apply(verdict)

    def step(self, multipliers: Mapping[str, Multiplier], grad_norm: float | None = None) -> None:
        for member in self._members:
            member.step(multipliers, grad_norm)

    def graph_key(self) -> Any:
        return [member.graph_key() for member in self._members]

    def obstacle(self) -> str:
        return next(filter(None, (member.obstacle() for member in self._members)), "")


class StepCounts:
    """Steps of one optimizer, and those of them that were skipped.

    Args:
        refuse: raises what a step ends in on which ranks disagree.

    Attributes:
        members: of a stack's members, which take the same steps.
        steps: all of them. skipped: those of them, by cause, that the host knows to be skipped.
    """

    def __init__(self, refuse: Callable[[], object]) -> None:
        self._refuse = refuse
        self._last: Verdict | DeviceVerdict = Verdict()
        self.members: list[StepCounts] = []
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
            verdict.when_settled(self._see)
        elif verdict.skip:
            self._see(verdict)
        for member in self.members:
            member.record(verdict)

    def _see(self, verdict: Verdict) -> None:
        if verdict.skip:
            self.skipped[verdict.cause] += 1

    def settle(self) -> Verdict:
        """The last verdict, and its step in the counts; waits for the device, once.

        Raises:
            ValueError: the ranks disagreed, saying about what; nothing was stepped.
        """
        if isinstance(self._last, DeviceVerdict):
            self._last = self._last.settle()
            if self._last.disagrees:
                self._refuse()
        return self._last

    def metrics(self) -> dict[str, float]:
        """The counts by name."""
        causes = {f"skipped_steps/{name}": n for name, n in self.skipped.items()}
        skipped = sum(self.skipped.values())
        return {"steps": self.steps, "skipped_steps": skipped, **causes}
