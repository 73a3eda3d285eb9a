"""Jobs of one bucket during backward: gradients are copied to the host and, if requested, measured
and stepped into the back buffer.

A result is used only if the step would compute it from the same gradients, settings, step numbers,
main params and moments. So a change between backward and ``step()`` costs at most repeated work.

With ``release_gradients`` gradients leave the device, and the host has the only copy. The first
gradient of a slot is copied into its bucket's staging memory, where the step reads it. Gradients of
further micro-batches are copied to other memory and added, in the gradient's dtype and in the order
of backward passes, as autograd adds them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mp_optim.core import Slot, SlotUpdates
from mp_optim.offload.backward_grads import GradVersion, ReleasableGrad
from mp_optim.offload.buckets import Buckets, Staging
from mp_optim.offload.double_buffer import BackLaunch
from mp_optim.offload.timeline import WAIT_COPIES, StepTimeline
from mp_optim.offload.worker import Job, Worker, WorkerError


@dataclass(eq=False)
class BackwardJob(Job):
    """A job for the worker thread.

    NOTE: the caller's thread makes the job and may cancel it. The worker's thread runs it, and
    writes :attr:`sums`, :attr:`stepped` and :attr:`is_done` once, as its last action. The caller
    reads them after the worker was drained.

    Attributes:
        owner: the memory that gradients are copied into.
        updates: updates with the gradients, until the job has run.
        staged: updates with the copies on the host.
        versions: versions of the gradients, by slot.
        back: launches into the back buffer, which ``step_ahead`` carries out; empty if the job only
            copies and measures.
        is_last: True if the gradients are complete; otherwise they are only copied.
        measures: True if sums are read, or the back buffer is stepped, which needs finite sums.
            Gradients that stay on a device are measured there.
        landing: memory for gradients that are added to those of earlier micro-batches in
            ``staged``; None for the first.
        releases: True if ``staged`` will be the only copy of the gradients. The caller prepares
            such a job, and it copies and adds even if it is cancelled.
        sums: sum of squares of each gradient, FP64; None if it was not measured.
        stepped: True if the back buffer holds the step.
        is_done: True if the complete gradients are on the host.
        is_cancelled: True if the result is not needed. The caller's thread sets it at any time.
    """

    label: str
    owner: Staging
    updates: SlotUpdates | None
    staged: SlotUpdates
    versions: dict[Slot, GradVersion]
    back: Sequence[BackLaunch]
    sum_of_squares: Callable[[Sequence[Tensor]], Tensor]
    timeline: StepTimeline
    is_last: bool = True
    measures: bool = True
    landing: Sequence[Tensor] | None = None
    releases: bool = False
    step_ahead: Callable[[Sequence[BackLaunch], str], None] | None = None
    sums: list[float] | None = None
    stepped: bool = False
    is_done: bool = False

    def __post_init__(self) -> None:
        self.is_cancelled = self._is_prepared = self._tracks_copies = False
        self._after = self.owner.transfer.mark()
        self._ticket: Any = None

    def prepare(self) -> None:
        if self._is_prepared:
            return
        if self.updates is not None and (self.releases or not self.is_cancelled):
            to = self.staged.grads if self.landing is None else self.landing
            self._ticket = self.owner.download(self.updates.grads, to, self._after)
        self._is_prepared = True

    def release_grads(self) -> None:
        """Wait until the gradients are on the host, and drop them. Called by the caller's thread,
        for a job that releases them."""
        self.owner.transfer.wait(self._ticket)
        self.updates = None

    def track_copies(self) -> None:
        """Set ``versions`` to those of the copies, after the worker was drained."""
        if self.releases and not self._tracks_copies:
            self._tracks_copies = True
            slots = zip(self.versions.items(), self.staged.grads, strict=True)
            self.versions = {
                slot: GradVersion.of(grad, version.count) for (slot, version), grad in slots
            }

    @torch.no_grad()
    def run(self) -> None:
        if self.is_cancelled and not self.releases:
            self.updates = self._after = None
            return
        with self.timeline.stage(WAIT_COPIES, self.label):
            self.owner.transfer.wait(self._ticket)
        if not self.releases:  # otherwise the caller deletes them
            self.updates = self._after = None  # its gradients belong to the caller again
        if self.landing is not None:
            with self.timeline.stage("host_add", self.label):
                torch._foreach_add_(list(self.staged.grads), list(self.landing))
        if self.is_cancelled or not self.is_last:
            return
        sums: list[float] | None = None
        if self.measures:
            with self.timeline.stage("host_measure", self.label):
                sums = self.sum_of_squares(self.staged.grads).tolist()
        steps = len(self.back) > 0 and sums is not None and all(map(math.isfinite, sums))
        if steps and self.step_ahead is not None:
            self.step_ahead(self.back, self.label)
        self.sums, self.stepped, self.is_done = sums, steps, True


class Destination(NamedTuple):
    """The memory for gradients that leave the device.

    Attributes:
        memory: the staging memory.
        staged: the updates with the copies that are kept.
        landing: memory of copies that are added to the kept ones; None if they are the kept ones.
        in_place: True if the kept copies are in the bucket's staging memory, where the step reads
            them.
    """

    memory: Staging
    staged: SlotUpdates
    landing: Sequence[Tensor] | None = None
    in_place: bool = True


class BackwardBucket:
    """Some slots of a place, and the work begun on them during this backward. Only the caller's
    thread uses it; the worker gets a :class:`BackwardJob`.

    NOTE: staging memory and back buffer change owner only in the caller's thread. From
    ``Worker.submit`` on the worker owns and fills both. The caller neither reads nor writes them,
    cancelled or not, before it has drained the worker. The job's results are valid until
    ``BackwardScheduler.end_iteration``; after that, uploads may read the memory.

    Args:
        buckets: all buckets, including this one.
        comes_down: True if gradients that stay on the device are copied down, too.

    Attributes:
        slots: slots whose gradients are copied or stepped.
        label: label of all of these.
        expected: slots whose gradients complete the next job.
        waiting: gradients that arrived since the last job, by slot.
        job: the worker's last job, if its result may still be used.
        is_trusted: True if no untraceable write can have changed the inputs or results of that job.
    """

    def __init__(self, buckets: Buckets, index: int, comes_down: bool) -> None:
        self.index, self.comes_down = index, comes_down
        self.slots = slots = buckets.members[index]
        self.label = buckets.label(sorted(slots))
        self.staging = buckets.staging[index]
        self._no_outputs = None if buckets.has_outputs else [None] * len(slots)
        self.waiting: dict[Slot, Tensor] = {}
        self.job: BackwardJob | None = None
        self.is_trusted = True
        self.expected = frozenset(slots)

    def destination_for(self, updates: SlotUpdates) -> Destination:
        """Return the staging memory for some of the bucket's updates."""
        tensors = self.staging.tensors_for(self.index, self.with_staged_outputs(updates))
        return Destination(self.staging, tensors.put_into(updates))

    def with_staged_outputs(self, updates: SlotUpdates) -> SlotUpdates:
        """Return the updates with staged outputs."""
        if self._no_outputs is None:
            return updates
        return replace(updates, outputs=self._no_outputs[: len(updates)])


class ReleasedGrads:
    """Released gradients, of which the host has the only copy.

    NOTE: the worker writes ``held``; the caller reads it once the worker is drained.

    Attributes:
        held: copies by slot, in staging memory that is kept.
        claims: gradients that wait for their bucket, with the right to release them.
        lost: the reason why released gradients are lost; empty if none are.
        landings: memory for gradients that are added to the held ones, and the job that used it
            last.
        previous: the last job that was begun.
    """

    def __init__(self, worker: Worker) -> None:
        self.held: dict[Slot, Tensor] = {}
        self.claims: dict[Slot, ReleasableGrad] = {}
        self.lost = ""
        self._worker = worker
        self.landings: list[tuple[Staging, BackwardJob | None]] = []
        self.previous: BackwardJob | None = None

    def claim(self, slot: Slot, grad: Tensor, claim: ReleasableGrad | None) -> None:
        """Register a gradient that waits for its bucket. If it will be added to a held copy, it
        leaves its parameter now: autograd would add the next gradient to it first, and sums in
        another order round otherwise."""
        self.claims.pop(slot, None)
        if claim is None:
            return
        self.claims[slot] = claim
        if self._can_add(slot, grad):
            claim.release()

    def take_from(self, bucket: BackwardBucket) -> dict[Slot, Tensor]:
        """Remove and return the gradients of a bucket that a job can release: those that can be
        added to held copies; without held copies all, if all can be released."""
        for slot in list(bucket.waiting):
            claim = self.claims.get(slot)
            if slot in self.held or claim is None:
                continue
            if not claim.is_present:
                del bucket.waiting[slot], self.claims[slot]
        waiting = sorted(bucket.waiting)
        chosen = [slot for slot in waiting if slot in self.claims]
        if any(slot in self.held for slot in bucket.slots):
            chosen = [slot for slot in chosen if self._can_add(slot, bucket.waiting[slot])]
        elif chosen != waiting:
            return {}
        return {slot: bucket.waiting.pop(slot) for slot in chosen}

    def _can_add(self, slot: Slot, grad: Tensor) -> bool:
        held = self.held.get(slot)
        return held is not None and (held.shape, held.dtype) == (grad.shape, grad.dtype)

    def has_held(self, bucket: BackwardBucket) -> bool:
        """Whether some gradients of a bucket were released."""
        return any(slot in self.held for slot in bucket.slots)

    def destination_for(self, updates: SlotUpdates, bucket: BackwardBucket) -> Destination:
        """Return the memory for gradients of a bucket: the step's staging memory for the first
        ones, other memory for those that are added."""
        if not self.has_held(bucket):
            destination = bucket.destination_for(updates)
            bucket.staging.is_kept = True
            return destination
        staged, in_place = self._where_held(bucket.with_staged_outputs(updates), bucket)
        memory, job = self.landings[0]
        if job is not None:  # the previous owner
            self._worker.wait_for(job)
        return Destination(memory, staged, memory.landing_for(updates.grads), in_place)

    def _where_held(self, updates: SlotUpdates, bucket: BackwardBucket) -> tuple[SlotUpdates, bool]:
        """Return the updates with the held copies of their slots, and True if these are in the
        bucket's staging memory, where the step reads them."""
        laid_out = bucket.staging.staged.get(bucket.index)
        held = [self.held[slot] for slot in updates.slots]
        if laid_out is not None and laid_out.updates.slots == updates.slots:
            pairs = zip(laid_out.updates.grads, held, strict=True)
            if all(staged is grad for staged, grad in pairs) and laid_out.fit(updates):
                return laid_out.put_into(updates), True
        return replace(updates, grads=held), False

    def begin(self, job: BackwardJob) -> None:
        """Start the copies of a job once those of the previous job are done and its gradients are
        released. The next bucket fills meanwhile, so two buckets are on the device."""
        self.finish()
        job.prepare()
        self.previous = job
        if job.landing is not None:
            self.landings = [self.landings[1], (self.landings[0][0], job)]

    def finish(self) -> None:
        """Wait until the copies of the job that was begun last are done, and drop its gradients."""
        if self.previous is not None:
            self.previous.release_grads()
        self.previous = None

    def release(self, slots: Sequence[Slot], grads: Iterable[Tensor]) -> None:
        """Record that the worker copies these gradients to these tensors."""
        for slot, grad in zip(slots, grads, strict=True):
            self.held[slot] = grad
            self.claims.pop(slot).release()

    def is_held(self, slot: Slot, grad: Tensor) -> bool:
        """True if ``grad`` is the held copy of a slot."""
        held = self.held.get(slot)
        return held is not None and (held.untyped_storage()._cdata == grad.untyped_storage()._cdata)

    def put_in_place(self, updates: SlotUpdates, staged: SlotUpdates) -> frozenset[int]:
        """Have the step find what was released where it reads it; indices of these updates."""
        here = set()
        rows = zip(updates.slots, updates.grads, staged.grads, strict=True)
        for index, (slot, grad, read) in enumerate(rows):
            if self.is_held(slot, grad):
                here.add(index)
                if grad.data_ptr() != read.data_ptr():
                    # NOTE: no upload reads there: the memory was freed for a download since the
                    # last step, or is new.
                    read.copy_(grad)
        return frozenset(here)

    def lose(self, error: WorkerError) -> None:
        """Record that the copy of released gradients failed."""
        if self.held:
            self.lost = (
                f"{error} But the gradients had been released (release_gradients=True) and are "
                "lost: call zero_grad(), and backward again"
            )
        self.held, self.claims, self.previous = {}, {}, None

    def forget(self) -> None:
        """Discard the copies, because no step uses them."""
        self.held, self.claims, self.lost, self.previous = {}, {}, "", None
