"""Which slot goes which way. With ``offload_place="auto"`` a share of what is offloaded is streamed
while the host steps the rest; one optimizer has all of it, in memory that both read. So a slot can
be stepped by the host in one step and streamed in the next: nothing moves, and the bits are the
same.

The share is that with which both finish together: a rule over how long steps took. Steps are timed
with everything stepped by the host, then with everything streamed, then with the share that follows
from both; the fastest of the three stays.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mp_optim.placement.plan import HostSlot, plan_offload
from mp_optim.slots.executor import Place

STEPS = 3
"""Of each trial. The first pays for what is made once, the shorter one of the others counts."""


@dataclass(frozen=True)
class StepTime:
    """How long a step took.

    Attributes:
        seconds: that the caller waited.
        host: seconds of arithmetic on the host, in the step or behind backward.
    """

    seconds: float
    host: float


def streamed_share(on_host: StepTime, streamed: StepTime) -> float:
    """The share to stream, from 0 to 1, with which both are done at the same time.

    Streaming a share ``x`` takes ``x * streamed.seconds``, and spares the host ``x * on_host.host``
    of the ``on_host.seconds`` that the caller waited for it. What is hidden behind backward was not
    waited for: it stays on the host.
    """
    waited = min(on_host.seconds, on_host.host)
    both = on_host.host + streamed.seconds
    return waited / both if both > 0 else 0.0


class Split:
    """Which share is streamed: one that was asked for, or one that is found in the first steps.

    Attributes:
        share: of the elements, to be streamed in the next step.
        is_measuring: steps still have to be timed.
    """

    def __init__(self, share: float | None = None) -> None:
        self.share = 0.0 if share is None else share
        self.is_measuring = share is None
        self._times: list[StepTime] = []
        self._trials: list[tuple[float, StepTime]] = []

    def record(self, time: StepTime) -> bool:
        """Take note of a step. Returns whether the share is another from now on."""
        self._times.append(time)
        if not self.is_measuring or len(self._times) < STEPS:
            return False
        best = min(self._times[1:], key=lambda each: each.seconds)
        self._trials.append((self.share, best))
        self._times = []
        before, self.share = self.share, self._next_share()
        return self.share != before

    def _next_share(self) -> float:
        if len(self._trials) == 1:
            return 1.0
        (_, on_host), (_, streamed) = self._trials[:2]
        share = streamed_share(on_host, streamed)
        if len(self._trials) == 2 and 0.0 < share < 1.0:
            return share
        self.is_measuring = False
        return min(self._trials, key=lambda trial: trial[1].seconds)[0]

    def __str__(self) -> str:
        if self.is_measuring:
            return f"being measured, in the first {3 * STEPS} steps"
        if not self._trials:
            return "as offload_streamed_fraction says"
        each = [
            f"{1e3 * best.seconds:.3g} ms with {share:.0%} streamed" for share, best in self._trials
        ]
        return f"the fastest of {', '.join(each)}"


def by_place(
    slots: Sequence[HostSlot], place: Place, split: Split | None
) -> dict[Place, list[HostSlot]]:
    """The slots of each place: all in one, if nothing splits them. Else the host takes what
    backward reaches first: it can begin earliest on that.

    Args:
        slots: in the order in which their gradients are expected.
    """
    if split is None:
        return {place: list(slots)}
    chosen = plan_offload([slot.share for slot in reversed(slots)], 1.0 - split.share)
    parts: dict[Place, list[HostSlot]] = {"host": [], "streamed": []}
    for index, slot in enumerate(slots):
        parts["host" if len(slots) - 1 - index in chosen else "streamed"].append(slot)
    return parts
