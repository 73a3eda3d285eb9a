"""Buckets of slots, and the staging memory for copies of their gradients and parameters."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from mp_optim.core import CachedTensorList, Slot, SlotUpdates, StepPlan, UpdateSelection, all_same
from mp_optim.host.host_memory import Block, aligned_bytes
from mp_optim.host.transfer import Transfer
from mp_optim.offload.buckets import HostSlot, plan_staging
from mp_optim.offload.timeline import WAIT_COPIES, StepTimeline, TransferBytes

_Known = tuple[Sequence[int], torch.dtype, Sequence[Tensor | None]]


class StagedTensors:
    """Tensors in staging memory for one bucket's gradients and outputs.

    Attributes:
        updates: the bucket's updates, with these tensors.
        down: bytes of gradients.
        up: bytes of outputs.
    """

    def __init__(self, updates: SlotUpdates, memory: Block) -> None:
        self._known = _known(updates)
        self._forms = _forms(updates)
        memory.reset()
        grads = CachedTensorList(memory.take(g.shape, g.dtype) for g in updates.grads)
        outputs = [None if o is None else memory.take(o.shape, o.dtype) for o in updates.outputs]
        present = _present(outputs)
        whole = len(present) == len(outputs)
        staged = CachedTensorList(present) if whole else outputs
        self.updates = replace(updates, grads=grads, outputs=staged, is_staged=True)
        self.down = sum(grad.nbytes for grad in grads)
        self.up = sum(output.nbytes for output in present)

    def fit(self, updates: SlotUpdates) -> bool:
        """True if the tensors have the shapes and dtypes of these gradients and outputs."""
        known = _known(updates)
        if known is not None and self._known is not None and all_same(known, self._known):
            return True
        if self._forms != _forms(updates):
            return False
        self._known = known
        return True

    def put_into(self, updates: SlotUpdates) -> SlotUpdates:
        """Return the updates with these tensors as gradients and outputs."""
        staged = self.updates
        return replace(updates, grads=staged.grads, outputs=staged.outputs, is_staged=True)


def _known(updates: SlotUpdates) -> _Known | None:
    """Return lists that identify the forms of gradients and outputs without a look at each tensor,
    or None. Gradients are not kept."""
    grads, outputs = updates.grads, updates.outputs
    if not isinstance(grads, CachedTensorList) or len(grads.dtypes) != 1:
        return None
    return grads.sizes, next(iter(grads.dtypes)), outputs


def _forms(updates: SlotUpdates) -> list[tuple[torch.Size, torch.dtype] | None]:
    tensors = [*updates.grads, *updates.outputs]
    return [None if tensor is None else (tensor.shape, tensor.dtype) for tensor in tensors]


def _present(tensors: Sequence[Tensor | None]) -> Sequence[Tensor]:
    if isinstance(tensors, CachedTensorList):
        return tensors
    return [tensor for tensor in tensors if tensor is not None]


class Staging:
    """One piece of staging memory, for one bucket at a time.

    NOTE: the worker owns it from the moment a job is submitted until the worker is drained; the
    thread that calls ``step()`` owns it otherwise. Copies that were started outlive both, so the
    owner calls :meth:`wait_until_free` before it writes. Dropping the memory needs no wait: the
    transfer holds it until the copies are done.

    Attributes:
        staged: the present tensors of each bucket.
        tickets: copies that may be in progress.
        is_kept: True if some tensors are the only copy of released gradients. They keep their
            memory, and other tensors get new memory.
    """

    def __init__(self, transfer: Transfer, num_bytes: int, pin: bool) -> None:
        self.transfer = transfer
        self._allocate = partial(transfer.empty_host, pin=pin)
        self._memory = Block(num_bytes, self._allocate)
        self.staged: dict[int, StagedTensors] = {}
        self.tickets: list[Any] = []
        self.is_kept = False

    @property
    def capacity(self) -> int:
        """Bytes that it holds after its first use."""
        return self._memory.capacity

    @property
    def allocated(self) -> int:
        """Bytes of staging memory that are allocated now."""
        return self._memory.allocated

    def tensors_for(self, bucket: int, updates: SlotUpdates) -> StagedTensors:
        """Return tensors for a bucket's updates, the same ones in every step; copy nothing."""
        staged = self.staged.get(bucket)
        if staged is None or not staged.fit(updates):
            tensors = [*updates.grads, *_present(updates.outputs)]
            needed = sum(aligned_bytes(tensor.numel(), tensor.dtype) for tensor in tensors)
            if needed > self.capacity or self.is_kept:
                self._replace(max(needed, self.capacity))
            staged = self.staged[bucket] = StagedTensors(updates, self._memory)
        return staged

    def landing_for(self, grads: Sequence[Tensor]) -> list[Tensor]:
        """Return tensors of the same forms, from the beginning of the memory. Nothing else may use
        it."""
        needed = sum(aligned_bytes(grad.numel(), grad.dtype) for grad in grads)
        if needed > self.capacity:
            self._replace(needed)
        self._memory.reset()
        return [self._memory.take(grad.shape, grad.dtype) for grad in grads]

    def _replace(self, num_bytes: int) -> None:
        self.staged.clear()
        self._memory, self.is_kept = Block(num_bytes, self._allocate), False

    def wait_until_free(self) -> None:
        """Wait until no copy reads or writes the memory."""
        while self.tickets:
            ticket = self.tickets.pop()
            self.transfer.wait(ticket)

    def download(self, grads: Sequence[Tensor], staged: Sequence[Tensor], after: Any = None) -> Any:
        """Start to copy gradients to the host as soon as the memory is free. Return a ticket."""
        self.wait_until_free()
        ticket = self.transfer.download(staged, grads, after)
        self.tickets.append(ticket)
        return ticket


# -- buckets --------------------------------------------------------------------------------------


@dataclass
class BucketStep:
    """One bucket's part of a step.

    Attributes:
        bucket: number of the bucket.
        label: label of its slots.
        staging: its staging memory.
        updates: updates with gradients and outputs on the device.
        staged: updates with gradients and outputs on the host.
        is_downloaded: True if all gradients have been copied to the host.
        downloaded: indices of single gradients that have been copied.
        ticket: the copy in progress.
    """

    bucket: int
    label: str
    staging: Staging
    updates: SlotUpdates
    staged: SlotUpdates
    is_downloaded: bool = False
    downloaded: frozenset[int] = frozenset()
    ticket: Any = None

    def start(self, after: Any) -> None:
        """Start the download of the gradients, which are complete at the mark ``after`` of the
        transfer."""
        if self.is_downloaded:
            return
        grads, staged = self.updates.grads, self.staged.grads
        if self.downloaded:
            missing = [index for index in range(len(grads)) if index not in self.downloaded]
            grads = [grads[index] for index in missing]
            staged = [staged[index] for index in missing]
        self.ticket = self.staging.download(grads, staged, after)

    def wait(self, timeline: StepTimeline) -> None:
        """Wait until the gradients are in staging memory.

        NOTE: the host waits here for this bucket's download, because it reads the gradients next.
        The download was started a bucket before, or in backward, and has run next to the arithmetic
        since.
        """
        if not self.is_downloaded:
            with timeline.stage(WAIT_COPIES):
                self.staging.transfer.wait(self.ticket)

    def upload(self) -> None:
        """Start to copy the parameters to their outputs."""
        wanted = _present(self.updates.outputs)
        ticket = self.staging.transfer.upload(wanted, _present(self.staged.outputs))
        self.staging.tickets.append(ticket)


class Buckets:
    """The slots of a place in buckets, and their staging memory.

    Args:
        slots: in the order in which their gradients are expected.
        new_staging: returns staging memory of a number of bytes.
        has_outputs: True if parameters are staged, too.
        label: returns a label for some slots, for errors and the timeline.

    Attributes:
        members: the slots of each bucket, in the order in which their gradients are expected.
        planned: bytes of staging memory for gradients of the model's dtypes.
    """

    def __init__(
        self,
        mode: str,
        slots: Sequence[HostSlot],
        most: int,
        pipelined: bool,
        new_staging: Callable[[int], Staging],
        has_outputs: bool,
        label: Callable[[Sequence[Slot]], str],
    ) -> None:
        self.members, pieces = plan_staging(mode, slots, most, pipelined, has_outputs)
        numbered = enumerate(self.members)
        self._bucket_of = {slot: bucket for bucket, slots in numbered for slot in slots}
        self.planned = sum(pieces)
        self.staging = [new_staging(size) for size in pieces]
        self.has_outputs = has_outputs
        self.label = label

    def steps(self, updates: SlotUpdates, moved: TransferBytes) -> list[BucketStep]:
        """Return the updates by bucket, in the plan's order, and add their bytes to ``moved``."""
        has_own = len(self.staging) == len(self.members)
        steps = []
        for position, (bucket, label, selection) in enumerate(self.routes(updates.slots)):
            of_bucket = selection.take(updates)
            staging = self.staging[bucket if has_own else position % len(self.staging)]
            tensors = staging.tensors_for(bucket, of_bucket)
            moved.add(tensors.down, tensors.up)
            staged = tensors.put_into(of_bucket)
            steps.append(BucketStep(bucket, label, staging, of_bucket, staged))
        return steps

    def routes(self, slots: StepPlan) -> list[tuple[int, str, UpdateSelection]]:
        """Return bucket, label and members of each bucket that has some of a step's slots."""
        return slots.part("buckets", (self._bucket_of,), partial(self._routes, slots))

    def _routes(self, slots: StepPlan) -> list[tuple[int, str, UpdateSelection]]:
        members: dict[int, list[int]] = {}
        for index in sorted(range(len(slots)), key=slots.__getitem__):
            members.setdefault(self._bucket_of[slots[index]], []).append(index)
        routes = []
        for bucket, indices in sorted(members.items()):
            chosen = [slots[index] for index in indices]
            selection = UpdateSelection(indices, slots)
            routes.append((bucket, self.label(chosen), selection))
        return routes
