"""Which share of what is offloaded is streamed, so that streaming and the host finish together: a
rule over how long steps took.

Steps are timed with everything stepped by the host, then with everything streamed, then with the
share that follows from both; the fastest of the three stays.
"""

from __future__ import annotations

from dataclasses import dataclass

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


@dataclass(frozen=True)
class Trial:
    """Steps with a share of the elements streamed.

    Attributes:
        best: the shorter one of those that count; None if there were none yet.
    """

    share: float
    best: StepTime


def streamed_share(on_host: StepTime, streamed: StepTime) -> float:
    """The share to stream, from 0 to 1, with which both are done at the same time.

    Streaming a share ``x`` takes ``x * streamed.seconds``, and spares the host ``x * on_host.host``
    of the ``on_host.seconds`` that the caller waited for it. What is hidden behind backward was not
    waited for: it stays on the host.
    """
    waited = min(on_host.seconds, on_host.host)
    both = on_host.host + streamed.seconds
    return waited / both if both > 0 else 0.0


class FixedSplit:
    """A share that was asked for."""

    is_measuring = False

    def __init__(self, share: float) -> None:
        self.share = share

    def record(self, time: StepTime) -> bool:
        return False

    def __str__(self) -> str:
        return "as offload_streamed_fraction says"


class MeasuredSplit:
    """A share that is found in the first steps.

    Attributes:
        share: of the elements, to be streamed in the next step.
        is_measuring: steps still have to be timed.
    """

    def __init__(self) -> None:
        self.share = 0.0
        self.is_measuring = True
        self._times: list[StepTime] = []
        self._trials: list[Trial] = []

    def record(self, time: StepTime) -> bool:
        """Take note of a step. Returns whether the share is another from now on."""
        self._times.append(time)
        if not self.is_measuring or len(self._times) < STEPS:
            return False
        best = min(self._times[1:], key=lambda each: each.seconds)
        self._trials.append(Trial(self.share, best))
        self._times = []
        before, self.share = self.share, self._next_share()
        return self.share != before

    def _next_share(self) -> float:
        if len(self._trials) == 1:
            return 1.0
        on_host, streamed = self._trials[0].best, self._trials[1].best
        share = streamed_share(on_host, streamed)
        if len(self._trials) == 2 and 0.0 < share < 1.0:
            return share
        self.is_measuring = False
        return min(self._trials, key=lambda trial: trial.best.seconds).share

    def __str__(self) -> str:
        if self.is_measuring:
            return f"being measured, in the first {3 * STEPS} steps"
        each = [
            f"{1e3 * trial.best.seconds:.3g} ms with {trial.share:.0%} streamed"
            for trial in self._trials
        ]
        return f"the fastest of {', '.join(each)}"
