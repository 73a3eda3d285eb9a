"""Buckets of slots and their staging memory, and plans of host memory for each ``offload_mode``.

Plans are made from sizes alone: buckets, the bytes of staging and back buffers, and the parameters
to offload. A bucket holds gradients and parameters in the model's dtype, each tensor rounded up to
64 bytes. ``most`` is ``OptimizerConfig.offload_bucket_bytes``; a parameter larger than ``most`` is
a bucket by itself.

- ``sync``: buckets of at most ``most`` bytes. Staging is the largest bucket; with
  ``overlap_cpu_optimizer_d2h_h2d`` staging is three times as large, or all buckets if there are at
  most three. No back buffer exists.
- ``overlap``: buckets of a sixteenth of all bytes, at least 4 MiB and at most ``most``. Staging is
  all buckets. No back buffer exists.
- ``speculative``: buckets and staging as with ``overlap``. The back buffer has main params and
  moments once more.

With ``sync`` a model in host memory has no staging: a step reads and writes its gradients and
parameters in place. A plan on the meta device is for an accelerator and counts the staging.

Slots in windows never have a back buffer, and have no staging with ``sync``. In the other modes
they have staging for the gradients of all buckets if the host steps the windows
(``optimizer_state_path``), or if gradients are released. Host memory holds a few windows of a file
(:meth:`FileStorage.window_sizes <mp_optim.offload.state_storage.FileStorage.window_sizes>`). A
model in host memory has no staging for gradients that are not released.

:func:`plan_staging` cuts buckets and sizes staging, and
:class:`~mp_optim.offload.speculation.DoubleBuffer` sizes the back buffer. The planner
(``factory/memory_plan.py``) builds the same stack on the meta device, and reads :class:`HostBytes`
from ``Stepper.host_bytes()``. ``tests/unit/apps/fit/test_page_locked_memory.py`` and
``test_combinations.py`` compare the plans with the allocations of a run.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.profiler import record_function

from mp_optim.core import CachedTensorList, Slot, SlotUpdates, StepPlan, UpdateSelection, all_same
from mp_optim.host.host_memory import Block, aligned_bytes
from mp_optim.host.transfer import Transfer

SMALLEST = 4 << 20
"""Smallest staging bytes of a bucket. Below this size a bucket's fixed costs exceed the time of
its copies."""

PER_ROUND = 16
"""Number of buckets of a model, within the limits of size. The last bucket is complete only at
the end of backward. So more buckets leave fewer bytes to copy after backward."""


class HostBytes(NamedTuple):
    """Bytes of each piece of host memory that a stepper allocates in addition to main params and
    state, with gradients in the model's dtype. Staging grows in the first step if gradients are
    wider.

    Attributes:
        staging: pieces for gradients and parameters that are copied.
        back_mains: pieces of the back buffer for main params.
        back_state: pieces of the back buffer for state.
        moments: pieces for moments of streamed slots, in memory that copies read.
        remainders: pieces for remainders of streamed slots.
        averages: pieces for averages of streamed slots.
        windows: pieces for windows of state on a disk.
    """

    staging: tuple[int, ...]
    back_mains: tuple[int, ...] = ()
    back_state: tuple[int, ...] = ()
    moments: tuple[int, ...] = ()
    remainders: tuple[int, ...] = ()
    averages: tuple[int, ...] = ()
    windows: tuple[int, ...] = ()

    @property
    def back(self) -> int:
        """Total bytes of the back buffer: main params and state."""
        return sum(self.back_mains) + sum(self.back_state)


class DiskBytes(NamedTuple):
    """Bytes of the state file: whole blocks for each tensor."""

    main_params: int = 0
    moments: int = 0
    averages: int = 0


@dataclass(frozen=True)
class HostSlot:
    """An offloaded slot, and the sizes of its gradient and parameter in the model's dtype.

    Attributes:
        slot: the slot.
        share: number of elements with which plans count the parameter. Unlike the local size, this
            number is equal on all ranks.
        numel: elements of this rank.
        dtype: dtype of the gradient and the parameter.
        is_stepped_in_place: True if the main param is the model's parameter, on the device.
    """

    slot: Slot
    share: int
    numel: int
    dtype: torch.dtype
    is_stepped_in_place: bool = False


def plan_staging(
    mode: str, slots: Sequence[HostSlot], most: int, pipelined: bool, has_outputs: bool = True
) -> tuple[list[tuple[Slot, ...]], list[int]]:
    """Return the buckets of a mode, and the bytes of each piece of its staging memory. A slot that
    is larger than a bucket is a bucket by itself.

    Args:
        mode: the ``offload_mode``.
        slots: slots in the order in which their gradients are expected.
        most: largest staging bytes of a bucket.
        pipelined: ``overlap_cpu_optimizer_d2h_h2d``.
        has_outputs: True if parameters are staged, too.
    """
    # Use shares, not local sizes. Ranks that reduce together have equal shares, so all of them cut
    # equal buckets.
    shared = [2 * slot.share * slot.dtype.itemsize for slot in slots]
    # Small buckets begin early in backward. Large buckets have fewer fixed costs.
    in_backward = max(1, min(most, max(SMALLEST, -(-sum(shared) // PER_ROUND))))
    bucket_bytes = most if mode == "sync" else in_backward
    buckets: list[list[Slot]] = []
    needed: list[int] = []
    filled = 0
    for slot, size in zip(slots, shared, strict=True):
        if not buckets or filled + size > bucket_bytes:
            buckets.append([])
            needed.append(0)
            filled = 0
        buckets[-1].append(slot.slot)
        needed[-1] += (2 if has_outputs else 1) * aligned_bytes(slot.numel, slot.dtype)
        filled += size
    # A pipelined step needs three pieces: one bucket is copied to the host, one is stepped and one
    # is copied to the device. Backward needs a piece for every bucket.
    in_step = 3 if pipelined else 1
    # Use the largest size for each piece, because each piece serves every bucket in turn.
    if mode == "sync" and len(needed) > in_step:
        needed = [max(needed)] * in_step
    return list(map(tuple, buckets)), needed


def plan_offload(sizes: Sequence[int], fraction: float) -> frozenset[int]:
    """Choose whole parameters that together hold at least ``fraction`` of all elements.

    Parameters are considered from the last to the first, because backward produces their gradients
    in that order. A parameter that would exceed the fraction is skipped. If elements are missing at
    the end, the smallest parameter that is left is added. Parameters that are then unnecessary are
    dropped again, largest first. So the fraction is always reached, and equal sizes give equal
    plans.

    Args:
        sizes: elements of each parameter, in slot order.
        fraction: between 0 (no parameter) and 1 (every parameter that has elements).

    Returns:
        Indices into ``sizes``.

    Raises:
        ValueError: ``fraction`` is outside [0, 1].
    """
    if not 0.0 <= fraction <= 1.0:
        raise ValueError(f"offload_fraction={fraction!r}: must be between 0 and 1")
    missing = math.ceil(fraction * sum(sizes))
    chosen: set[int] = set()
    for index in reversed(range(len(sizes))):
        if 0 < sizes[index] <= missing:
            chosen.add(index)
            missing -= sizes[index]
    if missing > 0:
        left = [index for index in range(len(sizes)) if index not in chosen and sizes[index] > 0]
        chosen.add(min(left, key=lambda index: (sizes[index], -index)))
    excess = sum(sizes[index] for index in chosen) - math.ceil(fraction * sum(sizes))
    for index in sorted(chosen, key=lambda index: (-sizes[index], index)):
        if sizes[index] <= excess:
            chosen.remove(index)
            excess -= sizes[index]
    return frozenset(chosen)


# -- time and bytes of a step ---------------------------------------------------------------------

WAIT_COPIES, WAIT_DISK, WAIT_WORKER = "wait_copies", "wait_disk", "wait_worker"
ARITHMETIC = ("host_add", "host_measure", "host_step")
"""Stages that compute on the host."""


class Span(NamedTuple):
    """The time of one stage in one thread, in seconds of ``time.perf_counter``. ``label`` names the
    slots that the stage worked on."""

    stage: str
    thread: str
    start: float
    end: float
    label: str


class StepTimeline:
    """Spans since the last step ended, and spans of the step before.

    Attributes:
        last: spans of the last backward and step.
        began: time at which the last ``step()`` began to wait for the worker.
    """

    def __init__(self) -> None:
        self._spans: list[Span] = []
        self._began: float | None = None
        self.last: list[Span] = []
        self.began = 0.0

    @contextmanager
    def stage(self, name: str, label: str = "") -> Iterator[None]:
        """Record the time of a ``with`` block as a span. Any thread may call this."""
        with record_function(f"mp_optim::{name}"):
            start = time.perf_counter()
            try:
                yield
            finally:
                self._spans.append(
                    Span(name, threading.current_thread().name, start, time.perf_counter(), label)
                )

    def begin_step(self) -> None:
        """Record when the caller begins to wait. Spans that end before this time are hidden."""
        if self._began is None:
            self._began = time.perf_counter()

    def end_step(self) -> None:
        """Move the recorded spans to ``last``, and begin a new record."""
        self.last, self._spans = self._spans, []
        self.began = time.perf_counter() if self._began is None else self._began
        self._began = None

    def metrics(self) -> dict[str, float]:
        """Return the milliseconds of the last backward and step.

        - ``copy_wait_ms``: waiting for copies, in any thread.
        - ``worker_wait_ms``: ``step()`` waiting for the worker.
        - ``host_ms``: arithmetic on the host.
        - ``hidden_ms``: arithmetic on the host that ended before ``step()`` began. With ``overlap``
          copies alone may be hidden.
        """

        arithmetic = [span for span in self.last if span.stage in ARITHMETIC]
        hidden = sum(max(0.0, min(span.end, self.began) - span.start) for span in arithmetic)
        return {
            "copy_wait_ms": self.milliseconds(WAIT_COPIES),
            "worker_wait_ms": self.milliseconds(WAIT_WORKER),
            "host_ms": self.milliseconds(*ARITHMETIC),
            "hidden_ms": 1e3 * hidden,
        }

    def milliseconds(self, *stages: str) -> float:
        """Return the milliseconds of some stages of the last backward and step, in all threads."""
        spans = [span for span in self.last if span.stage in stages]
        return 1e3 * sum(span.end - span.start for span in spans)


@dataclass
class TransferBytes:
    """Bytes that the last step moved: gradients to the host (``down``), parameters to the
    accelerator (``up``), and state from and to a disk (``read`` and ``written``)."""

    down: int = 0
    up: int = 0
    read: int = 0
    written: int = 0

    def add(self, down: int = 0, up: int = 0, read: int = 0, written: int = 0) -> None:
        self.down, self.up = self.down + down, self.up + up
        self.read, self.written = self.read + read, self.written + written


# -- staging memory -------------------------------------------------------------------------------

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
        """Return the updates with the staged tensors as gradients and outputs."""
        staged = self.updates
        return replace(updates, grads=staged.grads, outputs=staged.outputs, is_staged=True)


def _known(updates: SlotUpdates) -> _Known | None:
    """Return the sizes and the dtype of the gradients, and the outputs. Equal results mean equal
    shapes and dtypes of all tensors, without a loop over tensors. Return None for gradients of
    several dtypes, or in a list that does not cache sizes."""
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

    NOTE: the worker owns the memory from the moment a job is submitted until the worker is drained;
    the thread that calls ``step()`` owns the memory otherwise. Copies that were started may still
    be in progress, so the owner calls :meth:`wait_until_free` before it writes. Dropping the memory
    needs no wait: the transfer holds the memory until the copies are done.

    Attributes:
        memory: the bytes, which are allocated at the first use.
        staged: the present tensors of each bucket.
        tickets: copies that may be in progress.
        is_kept: True if some tensors are the only copy of released gradients. These tensors keep
            their memory, and other tensors get new memory.
    """

    def __init__(self, transfer: Transfer, num_bytes: int, pin: bool) -> None:
        self.transfer = transfer
        self._allocate = partial(transfer.empty_host, pin=pin)
        self.memory = Block(num_bytes, self._allocate)
        self.staged: dict[int, StagedTensors] = {}
        self.tickets: list[Any] = []
        self.is_kept = False

    def tensors_for(self, bucket: int, updates: SlotUpdates) -> StagedTensors:
        """Return tensors for a bucket's updates, and copy nothing. Every step gets the same
        tensors while they fit."""
        staged = self.staged.get(bucket)
        if staged is None or not staged.fit(updates):
            tensors = [*updates.grads, *_present(updates.outputs)]
            needed = sum(aligned_bytes(tensor.numel(), tensor.dtype) for tensor in tensors)
            if needed > self.memory.capacity or self.is_kept:
                self._replace(max(needed, self.memory.capacity))
            staged = self.staged[bucket] = StagedTensors(updates, self.memory)
        return staged

    def landing_for(self, grads: Sequence[Tensor]) -> list[Tensor]:
        """Return tensors with the shapes and dtypes of gradients, from the beginning of the
        memory. No other tensor of the memory may be in use."""
        needed = sum(aligned_bytes(grad.numel(), grad.dtype) for grad in grads)
        if needed > self.memory.capacity:
            self._replace(needed)
        self.memory.reset()
        return [self.memory.take(grad.shape, grad.dtype) for grad in grads]

    def _replace(self, num_bytes: int) -> None:
        self.staged.clear()
        self.memory, self.is_kept = Block(num_bytes, self._allocate), False

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
    """The slots of one bucket in a step.

    Attributes:
        bucket: number of the bucket.
        label: label of its slots.
        staging: staging memory of the bucket.
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
        """Start the download of the gradients.

        Args:
            after: result of ``Transfer.mark()``, taken after the code that computes the gradients
                was queued. The download starts after that code has run.
        """
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

        NOTE: the host waits here for the download of this bucket, because the host reads the
        gradients next. A gradient that backward copied needs no wait. With
        ``overlap_cpu_optimizer_d2h_h2d`` the download was started before the previous bucket was
        stepped.
        """
        if not self.is_downloaded:
            with timeline.stage(WAIT_COPIES):
                self.staging.transfer.wait(self.ticket)

    def upload(self) -> None:
        """Start to copy the stepped parameters from staging memory to the device."""
        wanted = _present(self.updates.outputs)
        ticket = self.staging.transfer.upload(wanted, _present(self.staged.outputs))
        self.staging.tickets.append(ticket)


class Buckets:
    """The slots of a place in buckets, and their staging memory.

    Args:
        mode: the ``offload_mode``.
        slots: slots in the order in which their gradients are expected.
        most: largest staging bytes of a bucket.
        pipelined: ``overlap_cpu_optimizer_d2h_h2d``.
        new_staging: function that returns staging memory of a given number of bytes.
        has_outputs: True if parameters are staged, too.
        label: function that returns a label for some slots, for errors and the timeline.

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
        """Return one step for each bucket of the updates, in the plan's order. Add the bytes of its
        copies to ``moved``."""
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
        """Return index, label and members of each bucket that has some of a step's slots."""
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
