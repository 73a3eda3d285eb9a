"""Gradients that left the device during backward: ``release_gradients``.

Their copy on the host is all there is of them. The first one of a slot lies in its bucket's staging
memory, where the step wants it; those of further micro-batches land beside it and are added, in the
gradient's dtype and in the order of backward passes, as autograd would have.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from torch import Tensor

from mp_optim.placement.backward_jobs import BackwardJob, Bucket
from mp_optim.placement.staging import StagedTensors, Staging
from mp_optim.placement.worker import Worker, WorkerError
from mp_optim.slots import Slot, SlotUpdate, SlotUpdates
from mp_optim.slots.host_part import Claim


class Room(NamedTuple):
    """Where gradients that leave the device come down.

    Attributes:
        memory: which memory.
        staged: the updates with what will be held of them.
        landing: what comes down here is added to that; None where it is that.
        in_place: the step will find it in the bucket's staging memory.
    """

    memory: Staging
    staged: SlotUpdates
    landing: Sequence[Tensor] | None = None
    in_place: bool = True


class ReleasedGrads:
    """What a stepper holds in place of gradients.

    NOTE: ``held`` is written by the worker, and read by the caller once the worker is drained.

    Attributes:
        held: by slot of the host's optimizer; in staging memory that is kept.
        claims: of gradients that are waiting for their bucket.
        lost: why gradients that were released are gone; empty if none are.
    """

    def __init__(self, worker: Worker) -> None:
        self.held: dict[Slot, Tensor] = {}
        self.claims: dict[Slot, Claim] = {}
        self.lost = ""
        self._worker = worker
        self._landings: list[tuple[Staging, BackwardJob | None]] = []
        self._previous: BackwardJob | None = None

    def __bool__(self) -> bool:
        return bool(self.held or self.claims or self.lost)

    def use_landings(self, make: Callable[[], Staging]) -> None:
        """Have gradients that are added land in memory that is made like this. No job is under
        way."""
        self._landings = [(make(), None), (make(), None)]
        self._previous = None

    def has_waiting(self, bucket: Bucket, slot: Slot) -> bool:
        """Whether a gradient waits to be added to what is held of its slot."""
        return slot in self.held and slot in self.claims and slot in bucket.waiting

    def claim(self, update: SlotUpdate, claim: Claim | None) -> None:
        """Take note of a gradient that is about to wait. Where it will be added to what is held, it
        leaves its parameter now: another one would be added to it first, and sums round otherwise
        in another order."""
        self.claims.pop(update.slot, None)
        if claim is None:
            return
        self.claims[update.slot] = claim
        if self._can_add(update):
            claim.release(self.held[update.slot])

    def take_from(self, bucket: Bucket) -> list[SlotUpdate]:
        """The gradients of a bucket that a job can release, which do not wait any more: those that
        can be added to what is held of it; where nothing is, all, if all can be released."""
        for slot in [slot for slot in bucket.waiting if self._is_stale(slot)]:
            del bucket.waiting[slot], self.claims[slot]
        waiting = sorted(bucket.waiting)
        chosen = [slot for slot in waiting if slot in self.claims]
        if any(slot in self.held for slot in bucket.slots):
            chosen = [slot for slot in chosen if self._can_add(bucket.waiting[slot])]
        elif chosen != waiting:
            return []
        return [bucket.waiting.pop(slot) for slot in chosen]

    def _is_stale(self, slot: Slot) -> bool:
        is_taken = slot in self.held or slot not in self.claims
        return not is_taken and not self.claims[slot].is_there()

    def _can_add(self, update: SlotUpdate) -> bool:
        held = self.held.get(update.slot)
        form = update.grad.shape, update.grad.dtype
        return held is not None and (held.shape, held.dtype) == form

    def has_held(self, bucket: Bucket) -> bool:
        """Whether some gradients of a bucket were released."""
        return any(slot in self.held for slot in bucket.slots)

    def room_for(
        self, updates: SlotUpdates, bucket: Bucket, index: int, staging: Staging
    ) -> Room:
        """Where gradients of a bucket come down: the first ones in the staging memory of the step,
        which is kept, those to be added beside it.

        Args:
            index: of the bucket, whose staging memory is ``staging``.
        """
        if not self.has_held(bucket):
            staged = staging.tensors_for(index, updates).put_into(updates)
            staging.is_kept = True
            return Room(staging, staged)
        staged, in_place = self._where_held(updates, staging.laid_out(index))
        memory = self._landing()
        return Room(memory, staged, memory.landing_for(updates.grads), in_place)

    def _where_held(
        self, updates: SlotUpdates, laid_out: StagedTensors | None
    ) -> tuple[SlotUpdates, bool]:
        """The updates with what is held of their slots, and whether that is what the step will find
        in the bucket's staging memory.

        Args:
            laid_out: what is in that memory.
        """
        held = [self.held[slot] for slot in updates.slots]
        if laid_out is not None and laid_out.updates.slots == updates.slots:
            pairs = zip(laid_out.updates.grads, held, strict=True)
            if all(staged is grad for staged, grad in pairs) and laid_out.fit(updates):
                return laid_out.put_into(updates), True
        return SlotUpdates.of(
            [
                update._replace(grad=grad)
                for update, grad in zip(updates, held, strict=True)
            ]
        ), False

    def _landing(self) -> Staging:
        """Memory for gradients that are added. The job that had it last is done."""
        memory, job = self._landings[0]
        if job is not None:
            self._worker.wait_for(job)
        return memory

    def begin(self, job: BackwardJob) -> None:
        """Start the copies of a job, once those of the one before are done and its gradients are
        gone: while they are on their way, the next bucket fills, so two lie on the device."""
        if self._previous is not None:
            self._previous.let_go()
        job.prepare()
        self._previous = job
        if job.landing is not None:
            self._landings = [self._landings[1], (self._landings[0][0], job)]

    def finish(self) -> None:
        """The worker was drained."""
        if self._previous is not None:
            self._previous.let_go()
        self._previous = None

    def release(self, slots: Sequence[Slot], grads: Iterable[Tensor]) -> None:
        """The worker has the job that brings these gradients down to these tensors."""
        for slot, grad in zip(slots, grads, strict=True):
            self.held[slot] = grad
            self.claims.pop(slot).release(grad)

    def _is_held(self, slot: Slot, grad: Tensor) -> bool:
        """Whether this is what is held of a slot."""
        held = self.held.get(slot)
        return held is not None and (
            held.untyped_storage()._cdata == grad.untyped_storage()._cdata
        )

    def put_in_place(self, updates: SlotUpdates, staged: SlotUpdates) -> frozenset[int]:
        """Have the step find what was released where it reads it; indices of these updates."""
        if not self.held:
            return frozenset()
        here = set()
        rows = zip(updates.slots, updates.grads, staged.grads, strict=True)
        for index, (slot, grad, read) in enumerate(rows):
            if self._is_held(slot, grad):
                here.add(index)
                if grad.data_ptr() != read.data_ptr():
                    # NOTE: no upload reads there: the memory was freed for a download since the
                    # last step, or is new.
                    read.copy_(grad)
        return frozenset(here)

    def lose(self, error: WorkerError) -> None:
        """The work that would have brought gradients down failed."""
        if self.held:
            self.lost = (
                f"{error} But the gradients had been released (release_gradients=True) and are "
                "lost: call zero_grad(), and backward again"
            )
        self.held, self.claims, self._previous = {}, {}, None

    def forget(self) -> None:
        """They are of no use any more."""
        self.held, self.claims, self.lost = {}, {}, ""
        self._previous = None
