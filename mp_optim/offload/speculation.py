"""Steps ahead of the verdict, into a back buffer, and whether that pays.

A speculated step is right if the verdict's multiplier is the predicted one (inverse loss scale,
clip coefficient 1) and nothing is skipped. A wrong one costs the time of a step that was hidden
under backward and one more copy of the state; a right one saves the whole arithmetic of ``step()``.
So speculating pays well below even odds, and stops only where it nearly always fails.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from torch import Tensor

from mp_optim.core import Slot, SlotUpdates, param_at
from mp_optim.host.transfer import Transfer
from mp_optim.kernels.kernel_args import MAIN
from mp_optim.offload.backward_jobs import BackwardBucket
from mp_optim.offload.buckets import BucketStep
from mp_optim.offload.double_buffer import BackLaunch, DoubleBuffer, Key
from mp_optim.offload.timeline import StepTimeline
from mp_optim.rules.rule import Launch
from mp_optim.rules.rule_executor import RuleExecutor

WINDOW = 8
"""Verdicts that are looked back on."""
_PAUSE_BELOW, _RESUME_AT = 2, 4
"""Speculation pauses if fewer predictions than the first number were right in the window. It
resumes as soon as the second number would have been right: verdicts are still compared while it
pauses."""


def speculates_next(speculates: bool, verdicts: Collection[bool]) -> bool:
    """Whether to speculate on the next step.

    Args:
        speculates: whether the last step was speculated on.
        verdicts: for each verdict so far, latest last, whether the prediction was right. Fewer than
            the window change nothing.
    """
    if len(verdicts) < WINDOW:
        return speculates
    return sum(list(verdicts)[-WINDOW:]) >= (_PAUSE_BELOW if speculates else _RESUME_AT)


class SpeculativeStepper:
    """Steps buckets of the host part into their back buffers, and publishes the results.

    Attributes:
        is_on: False while speculation pauses.
    """

    def __init__(self, executor: RuleExecutor, timeline: StepTimeline) -> None:
        self.is_on = True
        self._executor, self._timeline = executor, timeline
        self._buckets: Sequence[Sequence[Slot]] = ()
        self._back_buffers: Sequence[DoubleBuffer] = ()
        self._outcomes: deque[bool] = deque(maxlen=WINDOW)

    # -- back buffers -----------------------------------------------------------------------------

    def use_buckets(self, buckets: Sequence[Sequence[Slot]], transfer: Transfer, pin: bool) -> None:
        """Have a back buffer of each of these buckets from now on. Nothing may be begun."""
        self._buckets = buckets
        self._back_buffers = [DoubleBuffer(transfer, pin) for _ in buckets]

    @property
    def allocated_bytes(self) -> int:
        """Bytes of host memory that back buffers take now."""
        return sum(buffer.allocated for buffer in self._back_buffers)

    def reserved(self) -> list[tuple[int, int]]:
        """Return the bytes of the back buffer of each bucket, for main params and for state."""
        return [self._reserve(index) for index in range(len(self._back_buffers))]

    def _reserve(self, index: int) -> tuple[int, int]:
        live: dict[Key, Tensor] = {}
        for slot in self._buckets[index]:
            # NOTE: not state_of(), which compares audits: the worker may still add samples.
            tensors = {**self._executor.rows.live_state(slot)}
            tensors[MAIN] = param_at(self._executor.param_groups, slot)
            for key in tensors.keys() - {"step"}:
                live[slot.group, slot.position, key] = tensors[key]
        return self._back_buffers[index].reserve(live)

    # -- launches ---------------------------------------------------------------------------------

    def predicted(self, bucket: int, staged: SlotUpdates) -> Sequence[BackLaunch]:
        """Return a bucket's predicted launches into its back buffer; none if it cannot be stepped
        during backward."""
        if any(map(self._executor.is_collective, staged)):
            return ()
        return self._launches(bucket, self._executor.plan(staged))

    def planned(self, steps: Sequence[BucketStep]) -> dict[int, list[Launch]]:
        """Return the launches that the step of each bucket has now."""
        return {step.bucket: self._executor.plan(step.staged) for step in steps}

    def _launches(self, bucket: int, planned: Sequence[Launch]) -> Sequence[BackLaunch]:
        """Launches of a bucket into its back buffer; none if it cannot be stepped there."""
        self._reserve(bucket)
        return self._back_buffers[bucket].launches(planned)

    def run(self, launches: Sequence[BackLaunch], label: str) -> None:
        """Step into a back buffer. Nothing that is in use is written."""
        with self._timeline.stage("host_step", label):
            for launch in launches:
                self._executor.carry_out(launch.target)

    # -- in step ----------------------------------------------------------------------------------

    def fill(
        self,
        steps: Sequence[BucketStep],
        buckets: Sequence[BackwardBucket],
        planned: Mapping[int, Sequence[Launch]],
        hits: Collection[int],
        mark: Any,
    ) -> dict[int, Sequence[BackLaunch]]:
        """Make the back buffer of every bucket hold its step, unless it does already (``hits``).
        Return launches by bucket; none for one that has to be stepped in place.

        Args:
            mark: at which the gradients are complete.

        Raises:
            RuntimeError: a step failed; the optimizer is as it was.
        """
        launches: dict[int, Sequence[BackLaunch]] = {}
        again = []
        for step in steps:
            bucket = buckets[step.bucket]
            if step.bucket in hits and bucket.job is not None:
                launches[step.bucket] = bucket.job.back
                continue
            launches[step.bucket] = self._launches(step.bucket, planned[step.bucket])
            if launches[step.bucket]:
                bucket.is_trusted = False  # the back buffer is about to be overwritten
                again.append(step)
        for step in again:
            step.start(mark)
        for step in again:
            self._step_again(step, launches[step.bucket])
        return launches

    def _step_again(self, step: BucketStep, launches: Sequence[BackLaunch]) -> None:
        try:
            step.wait(self._timeline)
            self.run(launches, step.label)
        except Exception as error:
            raise RuntimeError(
                f"{step.label}: the step on the host failed: {error!r}. The optimizer is as it was "
                "before this step"
            ) from error

    def publish(self, step: BucketStep, launches: Sequence[BackLaunch]) -> None:
        """Swap back buffer and live tensors, and upload the parameters."""
        if not launches:
            return
        self._executor.step_mark.touch()
        with self._timeline.stage("publish", step.label):
            for launch in launches:
                self._back_buffers[step.bucket].swap(launch.keys)
                group, positions = launch.planned.group, launch.planned.positions
                self._executor.rows.groups[group].replaced(positions)
                self._executor.rows.groups[group].count(positions)
            step.upload()

    def record(self, was_right: bool) -> bool:
        """Take note of whether the step was the one that was predicted; whether speculation paused
        in it."""
        paused = not self.is_on
        self._outcomes.append(was_right)
        self.is_on = speculates_next(self.is_on, self._outcomes)
        return paused
