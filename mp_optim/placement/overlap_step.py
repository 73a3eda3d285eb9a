"""Gradients come down and are measured during backward: ``offload_mode="overlap"``.

What is begun during backward, what ``step()`` takes over, and what it does again.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from mp_optim.placement.backward_jobs import BackwardJob, Bucket
from mp_optim.placement.double_buffer import BackLaunch
from mp_optim.placement.grad_hooks import GradVersion
from mp_optim.placement.host_bytes import HostSlot, OffloadMode
from mp_optim.placement.host_step import (
    BucketStep,
    HostOwner,
    HostStepper,
    HostStepSettings,
)
from mp_optim.placement.speculation import warn_of_written
from mp_optim.placement.timeline import WAIT_WORKER
from mp_optim.placement.worker import Worker, WorkerError
from mp_optim.process.torch_modes import in_own_modes
from mp_optim.slots import Slot, SlotUpdate, SlotUpdates
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
            gradients were written after backward.
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
        self.buckets: list[Bucket] = []
        self._arrivals = threading.Lock()
        self._ready: Counter[Slot] = Counter()
        self._order: dict[Slot, None] = {}
        self._knows_order = False
        self._iteration: Iteration | None = None
        self._failure: WorkerError | None = None
        self._is_collected = False
        self._sums: dict[int, tuple[GradVersion, Slot, float]] = {}
        super().__init__(host, slots, owner, settings)

    # -- buckets and their memory -----------------------------------------------------------------

    def cut_buckets(self, slots: Sequence[HostSlot]) -> None:
        self._knows_order = False
        super().cut_buckets(slots)

    def _cut(self, slots: Sequence[HostSlot]) -> None:
        super()._cut(slots)
        self.buckets = [Bucket(bucket) for bucket in self._plan.buckets]

    def _ahead(self) -> int:
        return len(self.buckets) if self.settings.pipelined else 0

    def _bucket_of(self, slot: Slot) -> Bucket:
        return self.buckets[self._plan.bucket_of[slot]]

    # -- during backward --------------------------------------------------------------------------

    @in_own_modes
    def on_grad_ready(self, update: SlotUpdate) -> None:
        # NOTE: backward has a thread for each device that has parameters, and one for the CPU.
        with self._arrivals:
            self._take(update)

    def _take(self, update: SlotUpdate) -> None:
        on_host = self._owner.on_host(update)
        if on_host is None:
            return
        slot = on_host.slot
        self._ready[slot] += 1
        self._is_collected = False
        bucket = self._bucket_of(slot)
        if bucket.job is not None and slot in bucket.job.versions:
            bucket.cancel()  # another micro-batch: what was begun is of no use
        if not self.is_last_microbatch or self._failure is not None:
            return
        self._order.setdefault(slot)
        try:
            if bucket.add(on_host):
                self._begin_up_to(bucket)
        except WorkerError as error:
            self._failure = error
        except Exception as error:
            self._failure = WorkerError(
                f"{self._label(bucket.slots)}: work on the host during backward could not be "
                f"begun: {error!r}. The optimizer is as it was before this step"
            )
            self._failure.__cause__ = error

    def _begin_up_to(self, bucket: Bucket) -> None:
        """Hand a complete bucket to the worker, and before it those that backward has left behind:
        they lack gradients that will not come."""
        for earlier in self.buckets[: max(0, self.buckets.index(bucket) - 1)]:
            if earlier.waiting and earlier.job is None:
                self._begin(earlier)
        self._begin(bucket)

    def _begin(self, bucket: Bucket) -> None:
        if self._iteration is None:
            self._source.push_hyperparams()
            self._owner.bind_tensors()
            multiplier = self._source.predicted_multiplier()
            self._iteration = Iteration(self._speculates_now(), multiplier)
        updates = SlotUpdates.of(bucket.take_waiting())
        updates = replace(
            updates, multipliers=[self._iteration.multiplier] * len(updates)
        )
        versions = {
            slot: GradVersion.of(grad, self._ready[slot])
            for slot, grad in zip(updates.slots, updates.grads, strict=True)
        }
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
            if self._failure is not None:
                raise self._failure
            with self.timeline.stage(WAIT_WORKER):
                self.worker.drain()
        except WorkerError:
            self.discard()
            raise
        self._sums = {}
        for bucket in self.buckets:
            bucket.take_back()
            if (job := bucket.job) is not None and job.result is not None:
                for (slot, version), value in zip(
                    job.versions.items(), job.result.sums, strict=True
                ):
                    self._sums[version.address] = version, slot, value
        self._is_collected = True

    def known_sum_of_squares(self, grad: Tensor) -> float | None:
        version, slot, value = self._sums.get(grad.data_ptr(), (None, None, None))
        if version is None or slot is None or not grad.numel():
            return None
        return value if version.matches(grad, self._ready[slot]) else None

    def state_exposed(self, slot: Slot) -> None:
        self._bucket_of(slot).distrust()

    def discard(self) -> None:
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
        self._iteration, self._sums, self._is_collected = None, {}, False

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
        steps = super()._bucket_steps(updates)
        for step in steps:
            job = self.buckets[step.bucket].job
            self.buckets[step.bucket].expect(step.updates.slots)
            if job is None or job.result is None:
                continue
            # Where its tensors did not fit these updates, others were made just now.
            fits = job.staged.grads is step.staged.grads
            step.is_here = fits and self._is_fresh(job, step.updates)
            if not step.is_here and self._was_written_to(job, step.updates):
                self.counts["speculation_stale"] += 1
                warn_of_written(self.mode, self.counts["speculation_stale"])
        return steps

    def _is_fresh(self, job: BackwardJob, updates: SlotUpdates) -> bool:
        """Whether a job was given just these gradients, as they are now."""
        return tuple(job.versions) == tuple(updates.slots) and all(
            version.matches(grad, self._ready[slot])
            for (slot, version), grad in zip(
                job.versions.items(), updates.grads, strict=True
            )
        )

    def _was_written_to(self, job: BackwardJob, updates: SlotUpdates) -> bool:
        """Whether no other gradient of these updates got ready since the job was given its own."""
        return all(
            job.versions[slot].count == self._ready[slot]
            for slot in updates.slots
            if slot in job.versions
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
        if self._knows_order or not self._order:
            return
        self._knows_order = True
        order = list({**self._order, **dict.fromkeys(self._slots)})
        if order != list(self._slots) and not _are_split(updates):
            self._cut([self._slots[slot] for slot in order])

    # -- what it says of itself -------------------------------------------------------------------

    def notes(self) -> tuple[str, ...]:
        held = self.host_bytes()
        return (
            f"host: offload_mode {self.mode}, {len(self.buckets)} buckets of at most "
            f"{self.settings.bucket_bytes:,} bytes, "
            f"{held.back:,} bytes double buffer",
            *super().notes(),
        )

    def metrics(self) -> dict[str, float]:
        return {**super().metrics(), **self.counts}


def _are_split(updates: SlotUpdates) -> bool:
    """Whether other ranks, which may see gradients in another order, hold the rest of a
    parameter."""
    layouts = (layout for layout in updates.layouts if layout is not None)
    return any(updates.shard_groups) or any(
        layout.splits_matrices for layout in layouts
    )
