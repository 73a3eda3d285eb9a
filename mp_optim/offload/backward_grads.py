"""Gradients that arrive in backward: hooks on parameters, versions of gradients, and the jobs that
copy, measure and step one bucket of them on the host.

The hooks are on the parameters of the optimizer that takes the step. Each gradient is reported to
the scheduler, which may begin a job on its bucket.

A gradient on an accelerator is the same if its memory, its version and the sums of its bits are the
same. The version alone misses writes through ``grad.data``, foreign kernels and torch's foreach
operations on a DTensor. Gradients in host memory are compared with the copies that the worker used,
bit by bit, at every step.

The result of a job is used only if the step would compute it from the same gradients, settings,
step numbers, main params and moments. So a change between backward and ``step()`` costs at most
repeated work.

With ``release_gradients`` gradients leave the device, and the host has the only copy. The first
gradient of a slot is copied into its bucket's staging memory, where the step reads it. Gradients of
further micro-batches are copied to other memory and added, in the gradient's dtype and in the order
of backward passes, as autograd adds them.
"""

from __future__ import annotations

import math
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
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
from mp_optim.core.executor import Place
from mp_optim.core.tensors import GRADIENT_DTYPES
from mp_optim.host.calls import writes_counted
from mp_optim.host.leases import sums_of_bits
from mp_optim.host.torch_types import is_dtensor
from mp_optim.offload.buckets import Buckets, Staging
from mp_optim.offload.speculation import BackLaunch
from mp_optim.offload.timeline import WAIT_COPIES, StepTimeline


class GradSource(NamedTuple):
    """The optimizer that takes the step, as far as work during backward needs it.

    Attributes:
        param_groups: live groups with the parameters that backward reaches.
        share_settings: makes settings of these groups and of the executors below equal.
        updates: takes gradients by slot and one FP32 multiplier; returns the updates as the step
            will have them, in this order, without slots that the step rebinds or refuses.
        fused_backend: backend that measures gradients.
    """

    param_groups: ParamGroups
    share_settings: Callable[[], object]
    updates: Callable[[Mapping[Slot, Tensor], float], SlotUpdates | None]
    fused_backend: str


@dataclass(frozen=True)
class ReleasableGrad:
    """A gradient that its parameter need not keep once the host has it."""

    param: Tensor
    grad: Tensor

    def release(self) -> None:
        """Remove the gradient from its parameter."""
        self.param.grad = None


@dataclass(frozen=True, slots=True)
class GradVersion:
    """A gradient at one moment, without keeping it alive.

    Attributes:
        storage: its memory, as long as that exists; another gradient at the same address has
            another storage.
        address: where it begins.
        version: number of writes that torch counted; None for tensors made in inference mode.
        count: how often a gradient of the slot had got ready.
        bits: sums of its bits (:func:`sums_of_bits`) as they were; None if they are not asked for.
    """

    storage: StorageWeakRef
    address: int
    version: int | None
    count: int
    bits: Tensor | None = None

    @classmethod
    def of(cls, grad: Tensor, count: int, with_bits: bool = False) -> GradVersion:
        """Return the version of a plain tensor; ``with_bits`` also detects writes that torch does
        not count."""
        storage = StorageWeakRef(grad.untyped_storage())  # type: ignore[no-untyped-call]
        bits = _bits_of(grad) if with_bits else None
        return cls(storage, grad.data_ptr(), writes_counted(grad), count, bits)

    def matches(self, grad: Tensor) -> bool:
        """True if this is the same gradient, not written to since."""
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
    """Hooks on the parameters of a source that are not stepped on the device.

    Neither the hooks nor this object keep the receiver alive.

    Args:
        place_of: returns the place where a slot is stepped.
        receive: bound method that takes the slot, its local gradient, and the releasable gradient
            or None.

    Attributes:
        source: the outermost optimizer; a wrapper takes the place of the optimizer it wraps.
    """

    def __init__(
        self,
        source: GradSource,
        place_of: Callable[[Slot], Place],
        receive: Callable[[Slot, Tensor, ReleasableGrad | None], object],
    ) -> None:
        self.source = source
        self._place_of, self._receive = place_of, weakref.WeakMethod(receive)
        self._seen: list[Tensor] = []
        self._trains: list[bool] = []
        self._watched: dict[Slot, Tensor] = {}
        self._slot_of: dict[int, Slot] = {}  # keyed by the id of the watched parameter
        self._hooks: dict[Slot, RemovableHandle] = {}
        self._counts: Counter[Slot] = Counter()  # versions of arrived gradients
        self._compared: dict[Slot, bool] = {}
        weakref.finalize(self, _remove, self._hooks)

    def use_source(self, source: GradSource) -> None:
        """Report the gradients of this optimizer's parameters from now on."""
        self.source = source
        self.places_changed()

    def places_changed(self) -> None:
        """Have hooks where slots are not stepped on the device now."""
        self._seen = []
        self.update_hooks()

    def update_hooks(self) -> None:
        """Have hooks on the trainable parameters that the source has now, and on no others."""
        params = all_params(self.source.param_groups)
        trains = [param.requires_grad for param in params]
        if trains == self._trains and all_same(params, self._seen):
            return
        self._seen, self._trains = params, trains
        watched = {}
        for slot, param in iter_slots(self.source.param_groups):
            if self._place_of(slot) != "device":
                watched[slot] = param
        hooked = {slot: p for slot, p in watched.items() if p.requires_grad and p.is_leaf}
        for slot in list(self._hooks):
            if slot not in hooked or hooked[slot] is not self._watched[slot]:
                self._hooks.pop(slot).remove()
        for slot, param in hooked.items():
            if slot not in self._hooks:
                hook = _hook(weakref.WeakMethod(self._report), slot)
                handle = param.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]
                self._hooks[slot] = handle
        self._watched = watched
        self._slot_of = {id(param): slot for slot, param in watched.items()}

    def stop(self) -> None:
        """Have no hooks."""
        self._seen = []
        _remove(self._hooks)

    def ready(self, params: Sequence[Tensor] | None) -> None:
        """Report the gradients of these parameters, or of all, in slot order."""
        if params is None:
            slots = list(self._watched)
        else:  # the time depends only on the number of these parameters
            found = [self._slot_of[id(param)] for param in params if id(param) in self._slot_of]
            slots = sorted(found)
        for slot in slots:
            self._report(slot)

    def present(self, slot: Slot) -> Tensor | None:
        """Return the local gradient that the parameter at a slot has now, None if there is none or
        it still has to be redistributed."""
        param = self._watched.get(slot)
        grad = None if param is None else current_grad(param)
        if param is None or grad is None or not _is_laid_out_alike(param, grad):
            return None
        return local_tensor(grad)

    # -- whether gradients are those that a job was given ------------------------------------------

    def count(self, slot: Slot) -> None:
        """Count a gradient that arrived."""
        self._counts[slot] += 1

    def versions(self, updates: SlotUpdates, with_bits: bool = False) -> dict[Slot, GradVersion]:
        """Return the present versions of the gradients of updates; see :meth:`GradVersion.of`."""
        return {
            slot: GradVersion.of(grad, self._counts[slot], with_bits)
            for slot, grad in zip(updates.slots, updates.grads, strict=True)
        }

    def are_complete(self, given: Mapping[Slot, GradVersion], updates: SlotUpdates) -> bool:
        """True if a job was given a gradient of each of these slots, and none arrived since."""
        return tuple(given) == tuple(updates.slots) and all(
            version.count == self._counts[slot] for slot, version in given.items()
        )

    def are_same(
        self,
        given: Mapping[Slot, GradVersion],
        updates: SlotUpdates,
        staged: Sequence[Tensor] | None,
    ) -> bool:
        """True if a job was given these gradients, as they are now.

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
        """True if a gradient is the one that a job measured; see :meth:`are_same`.

        Each gradient is compared with its copy once, because the step uses the measured gradients
        next.
        """
        if version.count != self._counts[slot]:
            return False
        if staged is None:
            return version.matches(grad)
        if slot not in self._compared:
            self._compared[slot] = same_bits(grad, staged)
        return self._compared[slot]

    def forget_comparisons(self) -> None:
        """Discard comparisons, because gradients may have been written since."""
        self._compared = {}

    # -- hooks ------------------------------------------------------------------------------------

    def _report(self, slot: Slot) -> None:
        param, receive = self._watched[slot], self._receive()
        grad = current_grad(param)
        if grad is None or grad.layout != torch.strided or receive is None:
            return  # the step reports a gradient that it does not support
        groups = self.source.param_groups
        live = groups[slot.group]["params"] if slot.group < len(groups) else ()
        if not any(param is each for each in live[slot.position :][:1]):
            return  # the parameter was replaced
        releasable = ReleasableGrad(param, grad) if _can_be_released(param, grad) else None
        receive(slot, local_tensor(grad), releasable)


def _hook(report: weakref.WeakMethod[Callable[[Slot], None]], slot: Slot) -> Callable[..., None]:
    def hook(param: Tensor) -> None:
        if (call := report()) is not None and _is_final(param):
            call(slot)

    return hook


def _remove(hooks: dict[Slot, RemovableHandle]) -> None:
    while hooks:
        hooks.popitem()[1].remove()


def _is_final(param: Tensor) -> bool:
    """True if the gradient in a parameter is final when backward's hook is called.

    In a job of several ranks a gradient may still have to be reduced. Only FSDP2, whose meshes span
    the job, calls the hooks after its reduction.
    """
    if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1:
        return True
    return is_dtensor(param) and param.device_mesh.size() == dist.get_world_size()


def _can_be_released(param: Tensor, grad: Tensor) -> bool:
    """True if ``param.grad`` is this tensor, of a supported dtype and its parameter's layout."""
    is_read = grad.dtype in GRADIENT_DTYPES and not (grad.is_meta or grad.requires_grad)
    return param.grad is grad and is_read and _is_laid_out_alike(param, grad)


def _is_laid_out_alike(param: Tensor, grad: Tensor) -> bool:
    """Whether the local tensor of a gradient belongs to the local tensor of its parameter."""
    if is_dtensor(param) and is_dtensor(grad):
        return grad.placements == param.placements
    return not (is_dtensor(param) or is_dtensor(grad))


_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def same_bits(one: Tensor, other: Tensor) -> bool:
    """Whether host tensors have the same bits: -0.0 is not 0.0, and a NaN is itself."""
    if (one.shape, one.dtype) != (other.shape, other.dtype):
        return False
    words = _words(one), _words(other)
    if words[0] is not None and words[1] is not None:
        return torch.equal(words[0], words[1])
    integers = _INTEGERS[one.dtype.itemsize]
    return torch.equal(one.detach().view(integers), other.detach().view(integers))


def _words(tensor: Tensor) -> Tensor | None:
    """Return the tensor's bytes as int64, which compare four times as fast as 16-bit elements; None
    if they are not whole words."""
    first = tensor.storage_offset() * tensor.dtype.itemsize
    if not tensor.is_contiguous() or first % 8 or tensor.nbytes % 8:
        return None
    return tensor.detach().view(-1).view(torch.int64)


# -- jobs -----------------------------------------------------------------------------------------


@dataclass(eq=False)
class BackwardJob:
    """A job for the worker thread.

    NOTE: the caller's thread makes the job and may cancel it. The worker's thread runs it, and
    writes :attr:`sums`, :attr:`stepped` and :attr:`is_done` once, as its last action. The caller
    reads them after the worker was drained.

    Attributes:
        label: names the slots in errors.
        owner: the memory that gradients are copied into. No two jobs use it at once.
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
        following: the job that was submitted next, if any.
        future: the end of the job, once it is submitted.
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
        """Start the copies, unless they were started during the previous job."""
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
        """Wait for the copies; add, measure and step what the job asks for."""
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

    Args:
        wait_for: waits until the worker has finished or dropped a job.

    Attributes:
        held: copies by slot, in staging memory that is kept.
        claims: gradients that wait for their bucket, with the right to release them.
        lost: the reason why released gradients are lost; empty if none are.
        landings: memory for gradients that are added to the held ones, and the job that used it
            last.
        previous: the last job that was begun.
    """

    def __init__(self, wait_for: Callable[[BackwardJob], None]) -> None:
        self.held: dict[Slot, Tensor] = {}
        self.claims: dict[Slot, ReleasableGrad] = {}
        self.lost = ""
        self.wait_for = wait_for
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
            if claim.param.grad is not claim.grad:
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
            self.wait_for(job)
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

    def lose(self, error: Exception) -> None:
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
