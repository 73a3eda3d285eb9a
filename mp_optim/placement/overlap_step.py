"""Gradients come down and are measured during backward: ``offload_mode="overlap"``.

What is begun during backward, what ``step()`` takes over, and what it does again.
"""

from __future__ import annotations

import itertools
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from torch import Tensor

from mp_optim.placement.arrivals import Arrivals
from mp_optim.placement.backward_jobs import BackwardJob, Bucket
from mp_optim.placement.backward_order import BackwardOrder
from mp_optim.placement.double_buffer import BackLaunch
from mp_optim.placement.host_bytes import HostSlot, OffloadMode
from mp_optim.placement.host_step import (
    BucketStep,
    HostOwner,
    HostStepper,
    HostStepSettings,
)
from mp_optim.placement.released_grads import ReleasedGrads
from mp_optim.placement.second_look import SecondLook
from mp_optim.placement.speculation import warn_of_changed
from mp_optim.placement.staging import Staging
from mp_optim.placement.timeline import WAIT_WORKER
from mp_optim.placement.worker import Worker, WorkerError
from mp_optim.process.torch_modes import in_own_modes
from mp_optim.slots import Slot, SlotUpdate, SlotUpdates
from mp_optim.slots.host_part import Claim
from mp_optim.slots.optimizer import SlotOptimizer


@dataclass(frozen=True)
class Iteration:
    """What holds from the first gradient to the end of ``step()``.

    Attributes:
        speculates: whether gradients are stepped as soon as they are down.
        multiplier: with which.
    """

    speculates: bool
    multiplier: float


class OverlappedHostStepper(HostStepper):
    """Steps the host's slots in ``step()``; the gradients come down and are measured during
    backward.

    Attributes:
        worker: the thread.
        buckets: the slots, in the order in which their gradients are expected.
        counts: how many buckets were published as they had been speculated on, how many were
            stepped again, in how many steps speculation paused, and of how many buckets the
            gradients were changed after backward.
        released: gradients that are here only.
    """

    mode: OffloadMode = "overlap"
    works_in_backward = True

    def __init__(
        self,
        host: SlotOptimizer,
        slots: Sequence[HostSlot],
        owner: HostOwner,
        settings: HostStepSettings,
    ) -> None:
        self.counts = Counter(
            speculation_hits=0,
            speculation_redone=0,
            speculation_paused=0,
            speculation_stale=0,
        )
        self.worker = Worker("mp_optim-host", capacity=64, set_up=settings.set_up)
        self.released = ReleasedGrads(self.worker)
        self.buckets: list[Bucket] = []
        self._reporting = threading.Lock()
        self._arrivals = Arrivals()
        self._order = BackwardOrder()
        self._iteration: Iteration | None = None
        self._failure: WorkerError | None = None
        self._is_collected = False
        super().__init__(host, slots, owner, settings)

    # -- buckets and their memory -----------------------------------------------------------------

    def cut_buckets(self, slots: Sequence[HostSlot]) -> None:
        self._order.forget()
        super().cut_buckets(slots)

    def _cut(self, slots: Sequence[HostSlot]) -> None:
        super()._cut(slots)
        self.buckets = [Bucket(bucket) for bucket in self._plan.buckets]
        half = max((staging.capacity for staging in self._staging), default=0) // 2
        pin = self.settings.pin_staging
        make = partial(Staging, self.transfer, half, pin)
        self.released.use_landings(make)
        self._second_look = SecondLook(self.transfer, make)

    @property
    def released_bytes(self) -> int:
        sizes = [0] * len(self._plan.buckets)
        for slot in self._slots.values():
            # the gradient of a float8 parameter has 16 bits
            sizes[self._plan.bucket_of[slot.slot]] += slot.numel * max(
                2, slot.dtype.itemsize
            )
        return sum(sorted(sizes)[:-2])

    def _ahead(self) -> int:
        return len(self.buckets) if self.settings.pipelined else 0

    def _bucket_of(self, slot: Slot) -> Bucket:
        return self.buckets[self._plan.bucket_of[slot]]

    # -- during backward --------------------------------------------------------------------------

    @property
    def _may_compare(self) -> bool:
        """Whether ``step()`` compares gradients whose writes are not counted with what came
        down."""
        return self.transfer.is_same_place

    @in_own_modes
    def on_grad_ready(
        self,
        update: SlotUpdate,
        claim: Claim | None = None,
        writes_are_counted: bool = True,
    ) -> None:
        # NOTE: backward has a thread for each device that has parameters, and one for the CPU.
        with self._reporting:
            on_host = self._owner.on_host(update)
            if on_host is not None:
                self._arrivals.note(on_host.slot, writes_are_counted)
                self._take(on_host, claim)

    def _take(self, on_host: SlotUpdate, claim: Claim | None) -> None:
        slot = on_host.slot
        self._is_collected = False
        bucket = self._bucket_of(slot)
        if bucket.job is not None and slot in bucket.job.versions:
            bucket.cancel()  # another micro-batch: what was begun is of no use
        if self._failure is not None:
            return
        if self.is_last_microbatch:
            self._order.note(slot)
        elif not self.releases:
            return
        if self._arrivals.is_uncounted(slot) and not (
            self.releases or self._may_compare
        ):
            return  # what came down now would come down again
        if self.released.has_waiting(bucket, slot):
            # further ones are added in their turn
            self._try(bucket, partial(self._begin_releasing, bucket))
        self.released.claim(on_host, claim)
        if bucket.add(on_host):
            self._try(bucket, partial(self._begin_up_to, bucket))

    def _try(self, bucket: Bucket, begin: Callable[[], None]) -> None:
        """Begin work on a bucket; what goes wrong is kept for :meth:`collect`."""
        try:
            self._iteration_of_now()
        except (TypeError, ValueError):
            return  # of settings that cannot be: the step says so, before anything is stepped
        try:
            begin()
        except WorkerError as error:
            self._failure = error
        except Exception as error:
            if not self.releases and self._settings_are_refused():
                return  # they came after the first of some micro-batches
            self._failure = WorkerError(
                f"{self._label(bucket.slots)}: work on the host during backward could not be "
                f"begun: {error!r}. The optimizer is as it was before this step"
            )
            self._failure.__cause__ = error

    def _settings_are_refused(self) -> bool:
        try:
            self._owner.check_groups()
        except (TypeError, ValueError):
            return True
        return False

    def _begin_up_to(self, bucket: Bucket) -> None:
        """Hand a complete bucket to the worker, and before it those that backward has left behind:
        they lack gradients that will not come."""
        for earlier in self.buckets[: max(0, self.buckets.index(bucket) - 1)]:
            if earlier.waiting and earlier.job is None:
                self._begin(earlier)
        self._begin(bucket)

    def _iteration_of_now(self) -> Iteration:
        if self._iteration is None:
            self._source.push_hyperparams()
            self._owner.check_groups()
            self._owner.bind_tensors()
            multiplier = self._source.predicted_multiplier()
            self._iteration = Iteration(self._speculates_now(), multiplier)
        return self._iteration

    def _begun_with(self, waiting: Sequence[SlotUpdate]) -> SlotUpdates:
        """The updates as they are expected to be stepped."""
        multiplier = self._iteration_of_now().multiplier
        updates = SlotUpdates.of(waiting)
        return replace(updates, multipliers=[multiplier] * len(updates))

    def _begin_releasing(self, bucket: Bucket) -> None:
        """Hand what can be released of a bucket to the worker, and release it."""
        if not (waiting := self.released.take_from(bucket)):
            return
        updates = self._begun_with(waiting)
        index = self._plan.bucket_of[bucket.slots[0]]
        room = self.released.room_for(updates, bucket, index, self._staging[index])
        is_last = self.is_last_microbatch
        steps = is_last and room.in_place
        back = self._back_launches(bucket, room.staged) if steps else ()
        job = BackwardJob(
            self._label(updates.slots),
            room.memory,
            updates,
            room.staged,
            self._arrivals.versions(updates),
            back,
            self._source.sum_of_squares,
            self.timeline,
            is_last,
            room.landing,
            releases=True,
        )
        self.released.begin(job)
        bucket.hand_over(job)
        self.worker.submit(job)
        self.released.release(updates.slots, room.staged.grads)

    def _begin(self, bucket: Bucket) -> None:
        if self.releases:
            self._begin_releasing(bucket)
            return
        updates = self._begun_with(bucket.take_waiting())
        # Elsewhere the host cannot compare what it has with what is there at the step.
        with_bits = not self.transfer.is_same_place
        versions = self._arrivals.versions(updates, with_bits)
        index = self._plan.bucket_of[bucket.slots[0]]
        # NOTE: a cancelled job of this bucket may still run, and write to the same staging memory.
        # Nothing is written here; jobs of one bucket run one after the other.
        staging = self._staging[index]
        staged = staging.tensors_for(index, updates).put_into(updates)
        job = BackwardJob(
            self._label(updates.slots),
            staging,
            updates,
            staged,
            versions,
            self._back_launches(bucket, staged),
            self._source.sum_of_squares,
            self.timeline,
        )
        bucket.hand_over(job)
        self.worker.submit(job)

    def _speculates_now(self) -> bool:
        """Whether to step during this backward."""
        return False

    def _back_launches(
        self, bucket: Bucket, staged: SlotUpdates
    ) -> Sequence[BackLaunch]:
        """What the worker steps as soon as the gradients are down."""
        return ()

    # -- between backward and step ----------------------------------------------------------------

    def collect(self) -> None:
        if self._is_collected:
            return
        self.timeline.begin_step()
        try:
            if self.released.lost:
                raise WorkerError(self.released.lost)
            self._finish_jobs()
        except WorkerError as error:
            self.released.lose(error)
            self.discard()
            if self.released.lost:
                raise WorkerError(self.released.lost) from error
            raise
        self._arrivals.forget_sums()
        for bucket in self.buckets:
            bucket.take_back()
            self._arrivals.measured(bucket.job, self.transfer.is_same_place)
        self._is_collected = True

    def _finish_jobs(self) -> None:
        """Have all done that was begun, and added what came last to what is held."""
        for bucket in filter(self.released.has_held, self.buckets):
            self._try(bucket, partial(self._begin_releasing, bucket))
        if self._failure is not None:
            raise self._failure
        with self.timeline.stage(WAIT_WORKER):
            self.worker.drain()
        self.released.finish()
        for bucket in self.buckets:
            if bucket.job is not None:
                bucket.job.gave_up_grads()

    def known_sum_of_squares(self, grad: Tensor) -> float | None:
        return self._arrivals.sum_of_squares(grad)

    def state_exposed(self, slot: Slot) -> None:
        self._bucket_of(slot).distrust()

    def forget_released(self) -> None:
        if not self.released:
            return
        self.released.forget()
        for staging in self._staging:
            staging.is_kept = False
        if self._iteration is not None or self._failure is not None:
            self.discard()

    def discard(self) -> None:
        if self.released.held:
            try:
                self._finish_jobs()
            except WorkerError as error:
                self.released.lose(error)
        # NOTE: a worker that is stuck keeps the staging and back buffers that it may still write
        # to, so the buckets get others.
        if not self.worker.discard():
            self._cut(list(self._slots.values()))
        self._failure = None
        self._end_iteration()
        self.timeline.end_step()

    def skip(self) -> None:
        self._end_iteration()
        self.timeline.end_step()

    def _end_iteration(self) -> None:
        for bucket in self.buckets:
            bucket.release()
        self._arrivals.forget_sums()
        self._iteration, self._is_collected = None, False

    # -- in step ----------------------------------------------------------------------------------

    def step_buckets(
        self,
        updates: SlotUpdates,
        grad_norm: float | None,
        step_device: Callable[[], None],
    ) -> None:
        """See the base class.

        Raises:
            WorkerError: the worker failed; nothing was stepped.
        """
        self.collect()
        super().step_buckets(updates, grad_norm, step_device)
        self._learn_order(updates)
        self._end_iteration()

    def _bucket_steps(self, updates: SlotUpdates) -> list[BucketStep]:
        steps, stale = super()._bucket_steps(updates), 0
        for step in steps:
            job = self.buckets[step.bucket].job
            self.buckets[step.bucket].expect(step.updates.slots)
            step.here = self.released.put_in_place(step.updates, step.staged)
            if job is None or job.result is None:
                continue
            # Where its tensors did not fit these updates, others were made just now.
            if job.staged.grads is not step.staged.grads:
                continue
            arrived, updates = self._arrivals, step.updates
            if self.transfer.is_same_place and not job.releases:
                step.is_here = arrived.is_as_staged(job, updates)
                stale += not step.is_here and arrived.is_complete(job, updates)
                continue
            step.is_here = arrived.is_fresh(job, updates)
            may_be = not step.is_here and not job.releases
            step.was_written = may_be and arrived.is_complete(job, updates)
        self._count_changed(stale)
        return steps

    def _look_again(
        self, steps: Sequence[BucketStep], gradients: Any
    ) -> list[BucketStep]:
        """Those of some buckets whose gradients were written and are what they were; see
        :meth:`SecondLook.compare`. The others are counted."""
        written = [step for step in steps if step.was_written]
        if not written:
            return []
        with self.timeline.stage("compare"):
            same = self._second_look.compare(written, gradients)
        self._count_changed(same.count(False))
        return list(itertools.compress(written, same))

    def _count_changed(self, changed: int) -> None:
        """The gradients of so many buckets are others than were worked on."""
        self.counts["speculation_stale"] += changed
        if changed:
            warn_of_changed(
                self.mode, is_first=self.counts["speculation_stale"] == changed
            )

    def _run_rule(
        self, step: BucketStep, grad_norm: float | None, done: int, count: int
    ) -> None:
        try:
            super()._run_rule(step, grad_norm, done, count)
        except Exception as error:
            self.discard()
            raise RuntimeError(
                f"{step.label}: the step on the host failed: {error!r}. {done} of {count} "
                "buckets before it were already stepped: load the last checkpoint"
            ) from error

    def _learn_order(self, updates: SlotUpdates) -> None:
        """After the first backward: cut buckets in the order in which gradients got ready."""
        order = self._order.learn(self._slots, updates)
        if order is not None:
            self._cut([self._slots[slot] for slot in order])

    # -- what it says of itself -------------------------------------------------------------------

    def notes(self) -> tuple[str, ...]:
        held = self.host_bytes()
        return (
            f"host: offload_mode {self.mode}, {len(self.buckets)} buckets of at most "
            f"{self.settings.bucket_bytes:,} bytes, "
            f"{held.back:,} bytes double buffer"
            + (", gradients released" if self.releases else ""),
            *self._notes_on_dtensors(),
            *super().notes(),
        )

    def _notes_on_dtensors(self) -> Iterator[str]:
        if self._arrivals.any_uncounted and not (
            self.releases or self.transfer.is_same_place
        ):
            when = "in step(), too," if self._may_compare else "in step()"
            yield (
                f"host: gradients of DTensors (FSDP2) come down {when} because torch does not "
                "count all writes to them; release_gradients=True brings them down in backward "
                "alone"
            )

    def metrics(self) -> dict[str, float]:
        return {**super().metrics(), **self.counts}
