"""Host slots that are stepped during backward, into a back buffer: ``offload_mode="speculative"``.

``step()`` swaps the buffers where the step is the one that was predicted, and steps the rest again.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor

from mp_optim.placement.backward_jobs import Bucket
from mp_optim.placement.double_buffer import BackLaunch, DoubleBuffer, Key
from mp_optim.placement.host_bytes import HostBytes, HostSlot, OffloadMode
from mp_optim.placement.host_step import BucketStep
from mp_optim.placement.overlap_step import OverlappedHostStepper
from mp_optim.placement.speculation import speculates_next
from mp_optim.placement.third_half import MemoryMaker
from mp_optim.slots import SlotUpdates, param_at
from mp_optim.update.kernel_args import MAIN
from mp_optim.update.launches import PlannedLaunch
from mp_optim.update.rule import RuleOptimizer


class SpeculativeHostStepper(OverlappedHostStepper):
    """Steps the host's slots during backward, as if nothing were going to be clipped or skipped."""

    mode: OffloadMode = "speculative"

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._speculates = True
        self._outcomes: deque[bool] = deque(maxlen=self.settings.speculation.window)

    def _cut(self, slots: Sequence[HostSlot]) -> None:
        super()._cut(slots)
        pin = self.settings.pin_mains
        maker = MemoryMaker(self.transfer.empty_host)
        self._back = [DoubleBuffer(self.transfer, pin, maker) for _ in self.buckets]

    def come_home(self) -> None:
        for back in self._back:
            back.come_home()
        self._rule.memory_moved()

    @property
    def _rule(self) -> RuleOptimizer:
        assert isinstance(self._host, RuleOptimizer)
        return self._host

    def host_bytes(self) -> HostBytes:
        self._owner.bind_tensors()
        pieces = [self._reserved(index).capacity for index in range(len(self.buckets))]
        mains, state = zip(*pieces, strict=True) if pieces else ((), ())
        return HostBytes(super().host_bytes().staging, mains, state)

    def _reserved(self, index: int) -> DoubleBuffer:
        """The back buffer of a bucket, with room for all of its slots."""
        live: dict[Key, Tensor] = {}
        for slot in self.buckets[index].slots:
            tensors = {**self._host.state_of(slot).tensors()}
            tensors[MAIN] = param_at(self._host.param_groups, slot)
            for key in tensors.keys() - {"step"}:
                live[slot.group, slot.position, key] = tensors[key]
        self._back[index].reserve(live)
        return self._back[index]

    # -- during backward --------------------------------------------------------------------------

    @property
    def _may_compare(self) -> bool:
        return True

    def _speculates_now(self) -> bool:
        return self._speculates and self._order.is_known

    def _back_launches(
        self, bucket: Bucket, staged: SlotUpdates
    ) -> Sequence[BackLaunch]:
        assert self._iteration is not None
        if not self._iteration.speculates or any(map(self._rule.is_collective, staged)):
            return ()
        index = self._plan.bucket_of[bucket.slots[0]]
        return self._launches(index, self._rule.plan(staged))

    def _launches(
        self, index: int, planned: Sequence[PlannedLaunch]
    ) -> Sequence[BackLaunch]:
        return self._reserved(index).launches(self._rule, planned)

    # -- in step ----------------------------------------------------------------------------------

    def _step_both_places(
        self,
        steps: Sequence[BucketStep],
        grad_norm: float | None,
        step_device: Callable[[], None],
    ) -> None:
        if self._iteration is not None and self._iteration.speculates:
            gradients = self.transfer.mark()
            back = self._fill_back_buffers(steps, grad_norm, gradients)
            step_device()
            for step in steps:
                self._publish(step, back[step.bucket])
            left = [step for step in steps if not back[step.bucket]]
            self._step_in_place(left, grad_norm, gradients)
        else:
            super()._step_both_places(steps, grad_norm, step_device)
        multipliers = {value for step in steps for value in step.updates.multipliers}
        if multipliers:
            if (begun := self._iteration) is not None:
                predicted = begun.multiplier
            else:
                predicted = self._source.predicted_multiplier()
            self._record(multipliers == {predicted})

    def _fill_back_buffers(
        self, steps: Sequence[BucketStep], grad_norm: float | None, gradients: Any
    ) -> dict[int, Sequence[BackLaunch]]:
        """Make the back buffer of every bucket hold this step, mostly by finding that it does.
        Launches by bucket; none for one that has to be stepped in place."""
        planned = {
            step.bucket: self._rule.plan(step.staged, grad_norm) for step in steps
        }
        hits = self._hits(steps, planned, gradients)
        back: dict[int, Sequence[BackLaunch]] = {}
        again = []
        for step in steps:
            bucket = self.buckets[step.bucket]
            if step.bucket in hits:
                assert bucket.job is not None
                back[step.bucket] = bucket.job.back
                continue
            back[step.bucket] = self._launches(step.bucket, planned[step.bucket])
            if back[step.bucket]:
                bucket.distrust()  # what it holds is about to be written over
                again.append(step)
        for step in again:
            step.start(gradients)
        for step in again:
            self._step_again(step, back[step.bucket])
        return back

    def _hits(
        self,
        steps: Sequence[BucketStep],
        planned: Mapping[int, Sequence[PlannedLaunch]],
        gradients: Any,
    ) -> set[int]:
        """The buckets whose back buffers hold this step; they are counted, and those that were
        stepped from the same gradients to something else."""
        hoped = []
        for step in steps:
            bucket = self.buckets[step.bucket]
            begun = () if bucket.job is None else bucket.job.back
            if bucket.holds_step and _give(begun, planned[step.bucket]):
                hoped.append(step)
            else:
                self.counts["speculation_redone"] += step.is_here and bucket.was_stepped
        hits = {step.bucket for step in hoped if step.is_here}
        hits |= {step.bucket for step in self._look_again(hoped, gradients)}
        self.counts["speculation_hits"] += len(hits)
        return hits

    def _step_again(self, step: BucketStep, launches: Sequence[BackLaunch]) -> None:
        try:
            self._wait(step)
            with self.timeline.stage("host_step", step.label):
                for launch in launches:
                    launch.run()
        except Exception as error:
            self.discard()
            raise RuntimeError(
                f"{step.label}: the step on the host failed: {error!r}. The optimizer is as it was "
                "before this step"
            ) from error

    def _publish(self, step: BucketStep, launches: Sequence[BackLaunch]) -> None:
        """Swap the buffers, and send the parameters up."""
        if not launches:
            return
        self._host.step_mark.touch()
        with self.timeline.stage("publish", step.label):
            for launch in launches:
                self._back[step.bucket].swap(launch.keys)
                self._rule.moved(launch.planned)
                self._rule.count(launch.planned)
            step.upload()

    # -- whether it pays --------------------------------------------------------------------------

    def skip(self) -> None:
        self._record(False)
        super().skip()

    def _record(self, was_right: bool) -> None:
        """Take note of whether the step was the one that was predicted."""
        self._outcomes.append(was_right)
        self.counts["speculation_paused"] += not self._speculates
        self._speculates = speculates_next(
            self._speculates, self._outcomes, self.settings.speculation
        )


def _give(begun: Sequence[BackLaunch], planned: Sequence[PlannedLaunch]) -> bool:
    """Whether launches that were carried out gave what these would."""
    return len(begun) == len(planned) and all(
        launch.gives(now) for launch, now in zip(begun, planned, strict=True)
    )
