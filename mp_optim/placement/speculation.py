"""Steps ahead of the verdict, into a spare, and whether that pays.

A speculated step is right if the verdict's multiplier is the predicted one (inverse loss scale,
clip coefficient 1) and nothing is skipped. A wrong one costs the time of a step that was hidden
under backward and one more copy of the state; a right one saves the whole arithmetic of ``step()``.
So speculating pays well below even odds, and stops only where it nearly always fails.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from mp_optim.placement.double_buffer import BackLaunch, DoubleBuffer
from mp_optim.placement.staging import BucketStep
from mp_optim.placement.timeline import StepTimeline
from mp_optim.slots import SlotUpdates
from mp_optim.update.executor import RuleExecutor
from mp_optim.update.launches import PlannedLaunch


@dataclass(frozen=True)
class SpeculationSettings:
    """When speculation pauses.

    Attributes:
        window: verdicts that are looked back on.
        pause_below: it pauses if fewer than this many of the last ``window`` predictions were
            right.
        resume_at: it resumes as soon as this many were; while it pauses, verdicts are still
            compared with the prediction.
    """

    window: int = 8
    pause_below: int = 2
    resume_at: int = 4

    def __post_init__(self) -> None:
        if not 0 <= self.pause_below <= self.resume_at <= self.window or self.window < 1:
            raise ValueError(
                f"{self}: 0 <= pause_below <= resume_at <= window is needed, and window >= 1"
            )


def speculates_next(
    speculates: bool,
    verdicts: Collection[bool],
    settings: SpeculationSettings = SpeculationSettings(),
) -> bool:
    """Whether to speculate on the next step.

    Args:
        speculates: whether the last step was speculated on.
        verdicts: for each verdict so far, latest last, whether the prediction was right. Fewer than
            the window change nothing.
    """
    if len(verdicts) < settings.window:
        return speculates
    right = sum(list(verdicts)[-settings.window :])
    return right >= (settings.pause_below if speculates else settings.resume_at)


class Ahead:
    """Steps buckets into their spares, and publishes what is there.

    Args:
        run: carries launches into the spare out; with a label.

    Attributes:
        spares: of each bucket.
        reserve: called before a bucket's spare is used.
        is_on: speculation does not pause.
    """

    def __init__(
        self,
        rule: RuleExecutor,
        settings: SpeculationSettings,
        timeline: StepTimeline,
        run: Callable[[Sequence[BackLaunch], str], None],
    ) -> None:
        self.run = run
        self.spares: Sequence[DoubleBuffer] = ()
        self.reserve: Callable[[int], object] | None = None
        self.is_on = True
        self._rule, self._settings, self._timeline = rule, settings, timeline
        self._outcomes: deque[bool] = deque(maxlen=settings.window)

    def predicted(self, bucket: int, staged: SlotUpdates) -> Sequence[BackLaunch]:
        """A bucket's launches into its spare as they are predicted; none if it cannot be stepped
        during backward."""
        if any(map(self._rule.is_collective, staged)):
            return ()
        return self.launches(bucket, self._rule.plan(staged))

    def launches(self, bucket: int, planned: Sequence[PlannedLaunch]) -> Sequence[BackLaunch]:
        """Launches of a bucket into its spare; none if it cannot be stepped there."""
        if self.reserve is not None:
            self.reserve(bucket)
        return self.spares[bucket].launches(planned)

    def publish(self, step: BucketStep, launches: Sequence[BackLaunch]) -> None:
        """Swap the spare with what is in use, and send the parameters up."""
        if not launches:
            return
        self._rule.step_mark.touch()
        with self._timeline.stage("publish", step.label):
            for launch in launches:
                self.spares[step.bucket].swap(launch.keys)
                group, positions = launch.planned.group, launch.planned.positions
                self._rule.rows.groups[group].replaced(positions)
                self._rule.rows.count(group, positions)
            step.upload()

    def restore(self) -> None:
        """Have all slots be in the memory that they had before the first step; nothing may be
        begun."""
        for spare in self.spares:
            spare.restore()
        self._rule.memory_moved()

    def record(self, was_right: bool) -> bool:
        """Take note of whether the step was the one that was predicted; whether speculation paused
        in it."""
        paused = not self.is_on
        self._outcomes.append(was_right)
        self.is_on = speculates_next(self.is_on, self._outcomes, self._settings)
        return paused


def same_launches(begun: Sequence[BackLaunch], planned: Sequence[PlannedLaunch]) -> bool:
    """Whether launches that were carried out gave what these would."""
    return len(begun) == len(planned) and all(
        launch.gives(now) for launch, now in zip(begun, planned, strict=True)
    )
