"""Copies between accelerator and host behind one small interface: copy, wait, join.

Code above must be right for every implementation; one in the tests delays each copy until the
caller waits for it, so a missing wait fails on any machine.
"""

from __future__ import annotations

import itertools
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from threading import Lock
from typing import Any

import torch
from torch import Tensor

from mp_optim.host.accelerator import CUDA, Accelerator, Event, Stream, accelerator_of
from mp_optim.host.calls import in_own_modes, warn
from mp_optim.host.host_memory import REGISTERED_FROM, PageLockError, page_locked, zeros_host


class Transfer:
    """Asynchronous copies; here between two places that are both host memory, where copies happen
    at once and waiting is free. A ticket stands for a batch of copies that may still be under way.

    ``to`` and ``sources`` are parallel lists (with thousands of tensors, an object for each pair
    would cost more than the copies) of the same shapes and dtypes; on the host, contiguous. The
    memory of both stays until the copies are done, also if the caller drops it and the ticket.

    Attributes:
        is_same_place: the host can read the sources as they are, whenever it likes.
    """

    is_same_place = True

    def empty_host(self, num_bytes: int, pin: bool) -> Tensor:
        """Return a 1-D uint8 host buffer, page-locked if ``pin`` is set and the accelerator can use
        it."""
        return zeros_host(num_bytes)

    def mark(self) -> Any:
        """Return a marker of the calling thread's queued work, for later copies ``after`` it, also
        by another thread."""

    def download(self, to: Sequence[Tensor], sources: Sequence[Tensor], after: Any = None) -> Any:
        """Start copying accelerator tensors to the host, after a mark or all work queued so far.
        Returns a ticket."""
        if to:
            torch._foreach_copy_(list(to), list(sources))

    def upload(self, to: Sequence[Tensor], sources: Sequence[Tensor], after: Any = None) -> Any:
        """Start copying host tensors to the accelerator, after a mark or all work queued so far.
        Returns a ticket."""
        self.download(to, sources)

    def wait(self, ticket: Any) -> None:
        """Block the host until the ticket's copies are done. Several threads may wait for one."""

    def join(self) -> None:
        """Make accelerator work queued from now on see every upload started so far."""

    def notes(self) -> tuple[str, ...]:
        """Return notes for the user about the allocated memory."""
        return ()


def fetch(transfer: Transfer, tensor: Tensor) -> Callable[[], Tensor]:
    """Start to copy a small tensor to the host; the result waits for the copy and returns it."""
    copy = transfer.empty_host(tensor.nbytes, True).view(tensor.dtype)
    ticket = transfer.download([copy], [tensor])

    def value() -> Tensor:
        transfer.wait(ticket)
        return copy

    return value


class MetaTransfer(Transfer):
    """The host of a model on the meta device: nothing has memory. It is planned as if the device
    were an accelerator."""

    is_same_place = False

    def empty_host(self, num_bytes: int, pin: bool) -> Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8, device="meta")


@dataclass(eq=False)
class _Copies:
    """A ticket of :class:`CudaTransfer`.

    Attributes:
        done: event after the copies.
        held: tensors that the copies read and write.
    """

    done: Event
    held: Sequence[Tensor]


class CudaTransfer(Transfer):
    """Copies on one side stream per direction, so downloads, uploads and kernels overlap; and on
    one for downloads after a mark, which do not wait for others that still wait for kernels.

    NOTE: the calling thread may have another current device: a new thread has the first, and so has
    a caller that never set it. Restoring or waiting in that thread would initialize that device,
    half a gigabyte of it for every rank.

    NOTE: no allocator knows these copies. The tickets of each direction hold the tensors until the
    copies are done, in the order of its stream.
    """

    is_same_place = False

    def __init__(self, device: torch.device, accelerator: Accelerator = CUDA) -> None:
        self._accelerator, self._device = accelerator, device
        self._down, self._up, self._marked = (accelerator.stream(device) for _ in range(3))
        self._notes: dict[str, None] = {}
        self._lock = Lock()  # guards the copies in progress, because the worker copies, too
        streams = (self._down, self._up, self._marked)
        self._under_way: dict[Stream, deque[_Copies]] = {stream: deque() for stream in streams}
        weakref.finalize(self, _wait_for, self._under_way.values(), accelerator, device)

    @in_own_modes
    def empty_host(self, num_bytes: int, pin: bool) -> Tensor:
        if not pin:
            return zeros_host(num_bytes)
        if num_bytes >= REGISTERED_FROM:
            try:
                return page_locked(num_bytes, self._device)
            except PageLockError as error:
                self._note(
                    f"page-locked memory: could not be registered ({error}); torch's allocator "
                    "takes it, which rounds each piece up to a power of two"
                )
        try:
            return torch.empty(num_bytes, dtype=torch.uint8, device="cpu", pin_memory=True)
        except RuntimeError as error:
            why = str(error).partition("\n")[0]
            self._note(
                f"page-locked memory is not available ({why}), so pageable memory is used: copies "
                "are slower and do not overlap with other work"
            )
            return zeros_host(num_bytes)

    def _note(self, what: str) -> None:
        if what not in self._notes:
            self._notes[what] = None
            warn(what)

    def notes(self) -> tuple[str, ...]:
        return tuple(self._notes)

    def mark(self) -> Event:
        with self._accelerator.on(self._device):
            event = self._accelerator.event()
            event.record()
            return event

    def _copy(
        self, stream: Stream, to: list[Tensor], sources: list[Tensor], after: Event | None = None
    ) -> _Copies:
        accelerator = self._accelerator
        copies = _Copies(accelerator.event(sleeps=True), [*to, *sources])
        with accelerator.on(self._device):
            self._drop_finished(self._under_way[stream])
            if after is None:
                stream.wait_stream(accelerator.current_stream())
            else:
                stream.wait_event(after)
            with accelerator.queue_on(stream):
                try:
                    if to:
                        torch._foreach_copy_(to, sources, non_blocking=True)
                finally:
                    copies.done.record(stream)
                    self._under_way[stream].append(copies)
        return copies

    def _drop_finished(self, under_way: deque[_Copies]) -> None:
        """Hold nothing of copies that are done."""
        done = []
        with self._lock:
            while under_way and under_way[0].done.query():
                done.append(under_way.popleft())
        for copies in done:
            copies.held = ()

    def download(
        self, to: Sequence[Tensor], sources: Sequence[Tensor], after: Event | None = None
    ) -> _Copies:
        stream = self._down if after is None else self._marked
        return self._copy(stream, list(to), list(sources), after)

    def upload(
        self, to: Sequence[Tensor], sources: Sequence[Tensor], after: Event | None = None
    ) -> _Copies:
        # new tensors over the same memory, which stays valid if a parameter's .data is replaced
        return self._copy(self._up, list(map(Tensor.detach, to)), list(sources), after)

    def wait(self, ticket: _Copies) -> None:
        with self._accelerator.on(self._device):
            ticket.done.synchronize()
        ticket.held = ()

    def join(self) -> None:
        with self._accelerator.on(self._device):
            self._accelerator.current_stream().wait_stream(self._up)


def _wait_for(
    under_way: Iterable[deque[_Copies]], accelerator: Accelerator, device: torch.device
) -> None:
    """Wait for copies in progress before a transfer is deleted."""
    if accelerator.is_initialized():  # False in a forked child, which cannot synchronize
        with accelerator.on(device):
            for copies in itertools.chain(*under_way):
                copies.done.synchronize()


def transfer_for(device: torch.device) -> Transfer:
    """Return the transfer between ``device`` and the host.

    Raises:
        ValueError: for an accelerator that has no implementation here.
    """
    if device.type == "cpu":
        return Transfer()
    if device.type == "meta":
        return MetaTransfer()
    accelerator = accelerator_of(device)
    if accelerator is not None:
        return CudaTransfer(device, accelerator)
    raise ValueError(
        f"optimizer_cpu_offload=True: no transfer for device type {device.type!r} (available: cpu, "
        "cuda); set optimizer_cpu_offload=False"
    )
