"""Gradients that arrive in backward: hooks on parameters, versions of gradients, and the jobs that
copy, measure and step one bucket of gradients on the host.

The hooks are on the parameters of the optimizer that takes the step. Each gradient is reported to
the scheduler, which may begin a job on its bucket.

A gradient on an accelerator is unchanged if its memory, its version and the sums of its bits are
unchanged. The version alone misses writes through ``grad.data``, foreign kernels and torch's
foreach operations on a DTensor. Gradients in host memory are compared with the copies that the
worker used, bit by bit, at every step.

The step uses a job's result only if gradients, settings, step numbers, main params and moments are
those that the job used. So a change between backward and ``step()`` costs at most a repetition of
the job.

With ``release_gradients`` gradients leave the device, and the host has the only copy. The first
gradient of a slot is copied into its bucket's staging memory, where the step reads it. Gradients of
further micro-batches are copied to other memory and added, in the gradient's dtype and in the order
of backward passes, as autograd adds gradients.
"""

from __future__ import annotations

import math
import operator
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.hooks import RemovableHandle

from mp_optim.core import (
    ParamGroups,
    Slot,
    SlotUpdates,
    all_params,
    all_same,
    current_grad,
    iter_slots,
    local_tensor,
)
from mp_optim.core.tensors import GRADIENT_DTYPES
from mp_optim.host.calls import writes_counted
from mp_optim.host.leases import sums_of_bits
from mp_optim.host.torch_types import is_dtensor
from mp_optim.offload.buckets import WAIT_COPIES, Buckets, Staging, StepTimeline
from mp_optim.offload.speculation import BackLaunch


class GradSource(NamedTuple):
    """The optimizer that takes the step: the attributes that jobs during backward need.

    Attributes:
        param_groups: live groups with the parameters that backward reaches.
        share_settings: function that makes settings of these groups and of the inner executors
            equal.
        updates: function of gradients by slot and one FP32 multiplier. Returns the updates as the
            step will have them, in the order of the gradients, without slots that the step rebinds
            or refuses.
        fused_backend: backend that measures gradients.
    """

    param_groups: ParamGroups
    share_settings: Callable[[], object]
    updates: Callable[[Mapping[Slot, Tensor], float], SlotUpdates | None]
    fused_backend: str


class ReleasableGrad(NamedTuple):
    """A gradient that may be removed from its parameter once the host has a copy."""

    param: Tensor
    grad: Tensor


@dataclass(frozen=True, slots=True)
class GradVersion:
    """The state of a gradient at one moment. The object does not keep the gradient alive.

    Attributes:
        storage: weak reference to the gradient's memory. Another gradient at the same address has
            another storage.
        address: address of the first element.
        version: number of writes that torch counted; None for tensors made in inference mode.
        count: number of gradients that had arrived for the slot.
        bits: sums of the gradient's bits (:func:`sums_of_bits`); None if the sums were not
            computed.
    """

    storage: StorageWeakRef
    address: int
    version: int | None
    count: int
    bits: Tensor | None = None

    @classmethod
    def of(cls, grad: Tensor, count: int, with_bits: bool = False) -> GradVersion:
        """Return the version of a plain tensor. ``with_bits`` also detects writes that torch
        does not count."""
        storage = StorageWeakRef(grad.untyped_storage())  # type: ignore[no-untyped-call]
        bits = _bits_of(grad) if with_bits else None
        return cls(storage, grad.data_ptr(), writes_counted(grad), count, bits)

    def matches(self, grad: Tensor) -> bool:
        """True if ``grad`` is the gradient of this version, and no code has written to it since."""
        is_gone = self.storage.expired()  # type: ignore[no-untyped-call]
        return (
            self.version == writes_counted(grad)
            and self.address == grad.data_ptr()
            and not is_gone
            and self.storage.cdata == grad.untyped_storage()._cdata
            and (self.bits is None or torch.equal(self.bits, _bits_of(grad)))
        )


@torch.no_grad()
def _bits_of(grad: Tensor) -> Tensor:
    flat = grad.detach().reshape(-1)
    if flat.data_ptr() % 8:
        flat = flat.clone()
    return sums_of_bits(flat.view(torch.uint8))


class BackwardGrads:
    """Hooks on the offloaded parameters of an optimizer, and versions of their gradients.

    Neither the hooks nor this object keep the receiver alive.

    Args:
        source: the optimizer that takes the step.
        receive: bound method that takes the slot, its local gradient, and the releasable gradient
            or None.

    Attributes:
        source: the outermost optimizer. A wrapper replaces the optimizer that it wraps.
        counts: number of gradients that have arrived for each slot. The number distinguishes
            gradients of two micro-batches in the same memory.
    """

    def __init__(
        self, source: GradSource, receive: Callable[[Slot, Tensor, ReleasableGrad | None], object]
    ) -> None:
        self.source, self._receive = source, weakref.WeakMethod(receive)
        self._offloaded: frozenset[Slot] = frozenset()
        self._seen: list[Tensor] = []
        self._trains: list[bool] = []
        self._watched: dict[Slot, Tensor] = {}
        # Keys are the ids of parameters in ``_watched``, which keeps the parameters alive.
        self._slot_of: dict[int, Slot] = {}
        self._hooks: dict[Slot, RemovableHandle] = {}
        self.counts: Counter[Slot] = Counter()
        self._compared: dict[Slot, bool] = {}
        weakref.finalize(self, _remove, self._hooks)

    def watch(self, offloaded: frozenset[Slot]) -> None:
        """Report the gradients of these slots from now on."""
        self._offloaded, self._seen = offloaded, []
        self.update_hooks()

    def update_hooks(self) -> None:
        """Register hooks on the source's trainable parameters at offloaded slots, and remove all
        other hooks."""
        params = all_params(self.source.param_groups)
        trains = [param.requires_grad for param in params]
        if trains == self._trains and all_same(params, self._seen):
            return
        self._seen, self._trains = params, trains
        slots = iter_slots(self.source.param_groups)
        watched = {slot: param for slot, param in slots if slot in self._offloaded}
        hooked = {slot: p for slot, p in watched.items() if p.requires_grad and p.is_leaf}
        for slot in list(self._hooks):
            if slot not in hooked or hooked[slot] is not self._watched[slot]:
                self._hooks.pop(slot).remove()
        for slot, param in hooked.items():
            if slot not in self._hooks:
                hook = partial(_report_if_final, weakref.WeakMethod(self._report), slot)
                handle = param.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]
                self._hooks[slot] = handle
        self._watched = watched
        self._slot_of = {id(param): slot for slot, param in watched.items()}

    def stop(self) -> None:
        """Remove all hooks."""
        self._seen = []
        _remove(self._hooks)

    def ready(self, params: Sequence[Tensor] | None) -> None:
        """Report the present gradients of some parameters to the receiver, in slot order.

        Args:
            params: the parameters; None for all parameters with hooks.
        """
        if params is None:
            slots = list(self._watched)
        # Look up each given parameter, because a loop over all watched slots would take longer.
        else:
            found = [self._slot_of[id(param)] for param in params if id(param) in self._slot_of]
            slots = sorted(found)
        for slot in slots:
            self._report(slot)

    def present(self, slot: Slot) -> Tensor | None:
        """Return the local gradient of the parameter at a slot. Return None if the parameter has
        no gradient, or the gradient still has to be redistributed."""
        param = self._watched.get(slot)
        grad = None if param is None else current_grad(param)
        if param is None or grad is None or not _is_laid_out_alike(param, grad):
            return None
        return local_tensor(grad)

    # -- comparing gradients with those of a job --------------------------------------------------

    def versions(self, updates: SlotUpdates, with_bits: bool = False) -> dict[Slot, GradVersion]:
        """Return the present versions of the gradients of updates; see :meth:`GradVersion.of`."""
        return {
            slot: GradVersion.of(grad, self.counts[slot], with_bits)
            for slot, grad in zip(updates.slots, updates.grads, strict=True)
        }

    def are_complete(self, given: Mapping[Slot, GradVersion], updates: SlotUpdates) -> bool:
        """True if a job was given a gradient of each slot of the updates, and no further
        gradient arrived."""
        return tuple(given) == tuple(updates.slots) and all(
            version.count == self.counts[slot] for slot, version in given.items()
        )

    def are_same(
        self,
        given: Mapping[Slot, GradVersion],
        updates: SlotUpdates,
        staged: Sequence[Tensor] | None,
    ) -> bool:
        """True if a job was given the gradients that these updates have now.

        Args:
            given: the versions that the job was given.
            updates: updates of the step.
            staged: copies of gradients that the host can read, which are compared bit by bit; None
                to compare versions.
        """
        copies = [None] * len(updates) if staged is None else staged
        rows = zip(updates.slots, updates.grads, copies, strict=True)
        return self.are_complete(given, updates) and all(
            self.is_same(slot, given[slot], grad, copy) for slot, grad, copy in rows
        )

    def is_same(
        self, slot: Slot, version: GradVersion, grad: Tensor, staged: Tensor | None
    ) -> bool:
        """True if the gradient of a slot has not changed since a job measured it.

        A bitwise comparison is made once per slot; :meth:`forget_comparisons` discards its result.

        Args:
            version: the gradient's version when the job began.
            staged: the job's copy in host memory, which is compared bit by bit; None to compare
                versions.
        """
        if version.count != self.counts[slot]:
            return False
        if staged is None:
            return version.matches(grad)
        if slot not in self._compared:
            self._compared[slot] = same_bits(grad, staged)
        return self._compared[slot]

    def forget_comparisons(self) -> None:
        """Discard results of bitwise comparisons, because gradients may have changed since then."""
        self._compared = {}

    # -- hooks ------------------------------------------------------------------------------------

    def _report(self, slot: Slot) -> None:
        param, receive = self._watched[slot], self._receive()
        grad = current_grad(param)
        if grad is None or grad.layout != torch.strided or receive is None:
            return  # Ignore a gradient that is not supported, because the step raises its error.
        groups = self.source.param_groups
        live = groups[slot.group]["params"] if slot.group < len(groups) else ()
        if not any(param is each for each in live[slot.position :][:1]):
            return  # The parameter was replaced, so the step ignores its gradient.
        is_read = grad.dtype in GRADIENT_DTYPES and not (grad.is_meta or grad.requires_grad)
        can_be_released = param.grad is grad and is_read and _is_laid_out_alike(param, grad)
        receive(slot, local_tensor(grad), ReleasableGrad(param, grad) if can_be_released else None)


def _report_if_final(
    report: weakref.WeakMethod[Callable[[Slot], None]], slot: Slot, param: Tensor
) -> None:
    """Report the gradient of a slot if the gradient is final when backward calls this hook.

    In a job of several ranks a gradient may still have to be reduced. Only FSDP2, whose meshes span
    the job, calls the hooks after its reduction.
    """
    ranks = dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1
    is_final = ranks == 1 or (is_dtensor(param) and param.device_mesh.size() == ranks)
    if is_final and (call := report()) is not None:
        call(slot)


def _remove(hooks: dict[Slot, RemovableHandle]) -> None:
    while hooks:
        hooks.popitem()[1].remove()


def _is_laid_out_alike(param: Tensor, grad: Tensor) -> bool:
    """True if the local tensors of a gradient and its parameter have the same elements: both are
    DTensors with equal placements, or both are plain tensors."""
    if is_dtensor(param) and is_dtensor(grad):
        return grad.placements == param.placements
    return not (is_dtensor(param) or is_dtensor(grad))


_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def same_bits(one: Tensor, other: Tensor) -> bool:
    """True if two host tensors have equal bits: -0.0 differs from 0.0, and a NaN equals itself."""
    if (one.shape, one.dtype) != (other.shape, other.dtype):
        return False
    pair, size = (one.detach(), other.detach()), one.dtype.itemsize
    if one.nbytes % 8 == 0 and all(
        each.is_contiguous() and each.storage_offset() * size % 8 == 0 for each in pair
    ):
        # int64 elements compare four times as fast as 16-bit elements.
        return torch.equal(*(each.view(-1).view(torch.int64) for each in pair))
    return torch.equal(*(each.view(_INTEGERS[size]) for each in pair))


# -- jobs -----------------------------------------------------------------------------------------


@dataclass(eq=False)
class BackwardJob:
    """A job of the worker thread on the gradients of one bucket. :meth:`prepare` starts the copies
    to the host, and :meth:`run` waits for the copies. The job may also measure the gradients and
    step into the back buffer.

    NOTE: the caller's thread makes the job and may cancel it. The worker's thread runs the job, and
    writes :attr:`sums`, :attr:`stepped` and :attr:`is_done` once, as its last action. The caller
    reads these attributes after the worker was drained.

    Attributes:
        label: names of the slots, for errors.
        owner: memory that gradients are copied into. No two jobs use this memory at once.
        updates: updates with the gradients; None once the job has dropped its gradients.
        staged: updates with the copies on the host.
        versions: versions of the gradients, by slot.
        back: launches into the back buffer, which ``step_ahead`` carries out; empty if the job only
            copies and measures.
        is_last: True if the gradients are complete. Otherwise the job only copies gradients.
        measures: True if the job computes sums of squares. A step into the back buffer needs finite
            sums. Gradients that stay on a device are measured there.
        landing: memory for gradients of a further micro-batch, which are added to ``staged``; None
            for the first micro-batch.
        releases: True if ``staged`` will be the only copy of the gradients. The caller's thread
            calls :meth:`prepare` for such a job, and the job copies and adds even if it is
            cancelled.
        sums: sum of squares of each gradient, FP64; None if the job did not measure.
        stepped: True if the back buffer holds the step.
        is_done: True if the complete gradients are on the host.
        is_cancelled: True if the result is not needed. The caller's thread sets this attribute at
            any time.
        following: the job that was submitted next; None for the newest job.
        future: the end of the job; None before the job is submitted.
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
    following: BackwardJob | None = None
    future: Future[None] | None = None

    def __post_init__(self) -> None:
        self.is_cancelled = self._is_prepared = self._tracks_copies = False
        self._after = self.owner.transfer.mark()
        self._ticket: Any = None

    def prepare(self) -> None:
        """Start the copies of the gradients to the host. Do nothing if the copies were started
        before."""
        if self._is_prepared:
            return
        if self.updates is not None and (self.releases or not self.is_cancelled):
            to = self.staged.grads if self.landing is None else self.landing
            self._ticket = self.owner.download(self.updates.grads, to, self._after)
        self._is_prepared = True

    def release_grads(self) -> None:
        """Wait until the gradients are on the host, and drop the job's reference to the gradients
        on the device. Only the caller's thread calls this, for a job that releases gradients."""
        self.owner.transfer.wait(self._ticket)
        self.updates = None

    def track_copies(self) -> None:
        """Record the versions of the copies of released gradients, once. A later write to a copy
        then shows that the job's result is stale. The worker must be drained."""
        if self.releases and not self._tracks_copies:
            self._tracks_copies = True
            slots = zip(self.versions.items(), self.staged.grads, strict=True)
            self.versions = {
                slot: GradVersion.of(grad, version.count) for (slot, version), grad in slots
            }

    @torch.no_grad()
    def run(self) -> None:
        """Wait for the copies. Then add gradients, compute sums of squares and step into the back
        buffer, as the attributes of the job say."""
        if self.is_cancelled and not self.releases:
            self.updates = self._after = None
            return
        with self.timeline.stage(WAIT_COPIES, self.label):
            self.owner.transfer.wait(self._ticket)
        # If gradients are released, the caller deletes them in release_grads().
        if not self.releases:
            # Drop the gradients, because their memory belongs to the caller again.
            self.updates = self._after = None
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
        landing: memory of copies that are added to the kept copies; None for a first micro-batch,
            which is copied to ``staged`` directly.
        in_place: True if the kept copies are in the bucket's staging memory, where the step reads
            gradients.
    """

    memory: Staging
    staged: SlotUpdates
    landing: Sequence[Tensor] | None = None
    in_place: bool = True


class BackwardBucket:
    """The gradients of some offloaded slots, and the job begun on these gradients during this
    backward. Only the caller's thread uses a bucket; the worker gets a :class:`BackwardJob`.

    NOTE: staging memory and back buffer change owner only in the caller's thread. After
    ``Worker.submit`` the worker owns and fills this memory. Until the worker is drained, the caller
    must neither read nor write the memory, even if the job is cancelled. The job's results are
    valid until ``BackwardScheduler.end_step``; after that, uploads may read the memory.

    Args:
        buckets: all buckets of the place.
        index: number of this bucket.

    Attributes:
        slots: slots whose gradients are copied or stepped.
        label: label of all slots of the bucket.
        expected: slots whose gradients complete the next job.
        waiting: gradients that arrived since the last job, by slot.
        job: the worker's last job; None if its result may no longer be used.
        is_trusted: True if no untraceable write can have changed the inputs or results of the job.
    """

    def __init__(self, buckets: Buckets, index: int) -> None:
        self.index = index
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
        """Return the updates, without outputs if the bucket stages no parameters."""
        if self._no_outputs is None:
            return updates
        return replace(updates, outputs=self._no_outputs[: len(updates)])


class ReleasedGrads:
    """The only copies of released gradients, which are in host memory.

    NOTE: the worker writes the tensors in ``held``. The caller may read ``held`` only after the
    worker was drained.

    Args:
        wait_for: function that waits until the worker has finished or dropped a job.

    Attributes:
        held: copies by slot, in staging memory that is kept.
        releasable: gradients that wait for their bucket and may be released, by slot.
        lost: the reason why released gradients are lost; empty if no gradients are lost.
        landings: memory for gradients that are added to held copies, each with its last job.
        previous: the last job that was begun.
    """

    def __init__(self, wait_for: Callable[[BackwardJob], None]) -> None:
        self.held: dict[Slot, Tensor] = {}
        self.releasable: dict[Slot, ReleasableGrad] = {}
        self.lost = ""
        self.wait_for = wait_for
        self.landings: list[tuple[Staging, BackwardJob | None]] = []
        self.previous: BackwardJob | None = None

    def register(self, slot: Slot, grad: Tensor, found: ReleasableGrad | None) -> None:
        """Register a gradient that waits for its bucket.

        A gradient that will be added to a held copy leaves its parameter now. Otherwise autograd
        would add the next gradient to this gradient first. Sums in another order round differently.
        """
        self.releasable.pop(slot, None)
        if found is None:
            return
        self.releasable[slot] = found
        if self._can_add(slot, grad):
            found.param.grad = None

    def take_from(self, bucket: BackwardBucket) -> dict[Slot, Tensor]:
        """Remove and return the gradients of a bucket that a job can release.

        If the bucket has held copies, only gradients that can be added to held copies are returned.
        Otherwise all gradients are returned, or none if one gradient cannot be released.
        """
        for slot in list(bucket.waiting):
            found = self.releasable.get(slot)
            if slot in self.held or found is None:
                continue
            if found.param.grad is not found.grad:
                del bucket.waiting[slot], self.releasable[slot]
        waiting = sorted(bucket.waiting)
        chosen = [slot for slot in waiting if slot in self.releasable]
        if any(slot in self.held for slot in bucket.slots):
            chosen = [slot for slot in chosen if self._can_add(slot, bucket.waiting[slot])]
        elif chosen != waiting:
            return {}
        return {slot: bucket.waiting.pop(slot) for slot in chosen}

    def _can_add(self, slot: Slot, grad: Tensor) -> bool:
        held = self.held.get(slot)
        return held is not None and (held.shape, held.dtype) == (grad.shape, grad.dtype)

    def has_held(self, bucket: BackwardBucket) -> bool:
        """True if the host holds released gradients of a bucket."""
        return any(slot in self.held for slot in bucket.slots)

    def destination_for(self, updates: SlotUpdates, bucket: BackwardBucket) -> Destination:
        """Return the memory for gradients of a bucket: the step's staging memory for a first
        micro-batch, and other memory for gradients that are added."""
        if not self.has_held(bucket):
            destination = bucket.destination_for(updates)
            bucket.staging.is_kept = True
            return destination
        updates = bucket.with_staged_outputs(updates)
        laid_out = bucket.staging.staged.get(bucket.index)
        held, in_place = [self.held[slot] for slot in updates.slots], False
        if laid_out is not None and laid_out.updates.slots == updates.slots:
            in_place = all(map(operator.is_, laid_out.updates.grads, held)) and laid_out.fit(
                updates
            )
        if laid_out is not None and in_place:
            staged = laid_out.put_into(updates)
        else:
            staged = replace(updates, grads=held)
        memory, job = self.landings[0]
        if job is not None:  # The previous job may still write to this memory.
            self.wait_for(job)
        return Destination(memory, staged, memory.landing_for(updates.grads), in_place)

    def begin(self, job: BackwardJob) -> None:
        """Start the copies of a job, after the copies of the previous job are done and its
        gradients are released.

        Backward fills the next bucket during these copies. So the device has the gradients of two
        buckets at a time.
        """
        self.finish()
        job.prepare()
        self.previous = job
        if job.landing is not None:
            self.landings = [self.landings[1], (self.landings[0][0], job)]

    def finish(self) -> None:
        """Wait until the copies of the last job are done, and drop its gradients."""
        if self.previous is not None:
            self.previous.release_grads()
        self.previous = None

    def release(self, slots: Sequence[Slot], grads: Iterable[Tensor]) -> None:
        """Record the copies that the worker makes of some gradients, and remove the gradients
        from their parameters."""
        for slot, grad in zip(slots, grads, strict=True):
            self.held[slot] = grad
            self.releasable.pop(slot).param.grad = None

    def is_held(self, slot: Slot, grad: Tensor) -> bool:
        """True if ``grad`` is the held copy of a slot."""
        held = self.held.get(slot)
        return held is not None and (held.untyped_storage()._cdata == grad.untyped_storage()._cdata)

    def put_in_place(self, updates: SlotUpdates, staged: SlotUpdates) -> frozenset[int]:
        """Copy released gradients to the memory that the step reads, unless they are there
        already. Return the indices of the released gradients in the updates."""
        here = set()
        rows = zip(updates.slots, updates.grads, staged.grads, strict=True)
        for index, (slot, grad, read) in enumerate(rows):
            if self.is_held(slot, grad):
                here.add(index)
                if grad.data_ptr() != read.data_ptr():
                    # NOTE: write without a wait, because no upload reads this memory. The memory is
                    # new, or a download since the last step waited until the memory was free.
                    read.copy_(grad)
        return frozenset(here)

    def lose(self, error: Exception) -> None:
        """Record that released gradients are lost, because copying them failed."""
        if self.held:
            self.lost = (
                f"{error} But the gradients had been released (release_gradients=True) and are "
                "lost: call zero_grad(), and backward again"
            )
        self.held, self.releasable, self.previous = {}, {}, None
