"""Copies between accelerator and host through one interface, :class:`Transfer`.

Code that uses the interface must be right for every implementation. The tests have an
implementation that delays each copy until the caller waits for the copy. So a missing wait fails on
any machine.
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
    """Asynchronous copies between a device and the host. This class is for a device that is the
    CPU: copies are complete at once, and waiting does nothing.

    A ticket is the handle of a batch of copies in progress. ``to`` and ``sources`` are parallel
    lists of tensors with equal shapes and dtypes; host tensors are contiguous. Lists are used
    because one object per pair would cost more than the copies of thousands of tensors. The tensors
    stay allocated until the copies are complete, even if the caller drops tensors and ticket.

    Attributes:
        is_same_place: True if the host can read the device's tensors directly.
    """

    is_same_place = True

    def empty_host(self, num_bytes: int, pin: bool) -> Tensor:
        """Return a 1-D uint8 host buffer.

        Args:
            num_bytes: size in bytes.
            pin: True for page-locked memory if the accelerator supports page-locked memory.
        """
        return zeros_host(num_bytes)

    def mark(self) -> Any:
        """Return a marker of the work that the calling thread has queued so far.

        Any thread may pass the marker as ``after`` of later copies.
        """

    def download(self, to: Sequence[Tensor], sources: Sequence[Tensor], after: Any = None) -> Any:
        """Start to copy accelerator tensors to the host, and return a ticket.

        Args:
            to: contiguous host tensors.
            sources: tensors on the accelerator.
            after: marker after which the copies start; None for all work queued so far.
        """
        if to:
            torch._foreach_copy_(list(to), list(sources))

    def upload(self, to: Sequence[Tensor], sources: Sequence[Tensor], after: Any = None) -> Any:
        """Start to copy host tensors to the accelerator, and return a ticket.

        Args:
            to: tensors on the accelerator.
            sources: contiguous host tensors.
            after: marker after which the copies start; None for all work queued so far.
        """
        self.download(to, sources)

    def wait(self, ticket: Any) -> None:
        """Block the calling thread until a ticket's copies are complete. Several threads may wait
        for one ticket."""

    def join(self) -> None:
        """Make work that is queued on the accelerator from now on wait for all uploads started so
        far."""

    def notes(self) -> tuple[str, ...]:
        """Return notes about the allocated memory, for ``describe()``."""
        return ()


def fetch(transfer: Transfer, tensor: Tensor) -> Callable[[], Tensor]:
    """Start to copy a small tensor to the host.

    Returns:
        A function that waits for the copy and returns the host tensor.
    """
    copy = transfer.empty_host(tensor.nbytes, True).view(tensor.dtype)
    ticket = transfer.download([copy], [tensor])

    def value() -> Tensor:
        transfer.wait(ticket)
        return copy

    return value


class MetaTransfer(Transfer):
    """Transfer for a model on the meta device. Host buffers are meta tensors without memory. Plans
    are made as for an accelerator."""

    is_same_place = False

    def empty_host(self, num_bytes: int, pin: bool) -> Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8, device="meta")


@dataclass(eq=False)
class _Copies:
    """Ticket of :class:`CudaTransfer`.

    Attributes:
        done: event that the stream records after the copies.
        held: tensors that the copies read and write.
    """

    done: Event
    held: Sequence[Tensor]


class CudaTransfer(Transfer):
    """Copies on side streams, so that downloads, uploads and kernels overlap.

    There is one stream for uploads, one for downloads, and one for downloads after a marker, which
    do not wait for downloads of the other stream.

    NOTE: enter ``accelerator.on(device)`` before each call of the runtime. A new thread's current
    device is device 0. A runtime call there would initialize device 0, which costs half a gigabyte
    for every rank.

    NOTE: torch's allocators do not know these copies. So each stream's tickets reference the
    tensors until the copies are complete.
    """

    is_same_place = False

    def __init__(self, device: torch.device, accelerator: Accelerator = CUDA) -> None:
        self._accelerator, self._device = accelerator, device
        self._down, self._up, self._marked = (accelerator.stream(device) for _ in range(3))
        self._notes: dict[str, None] = {}
        # The worker thread starts copies, too, so a lock guards the list of copies in progress.
        self._lock = Lock()
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
                    f"page-locked memory could not be registered ({error}), so torch's allocator "
                    "provides it and rounds each allocation up to a power of two"
                )
        try:
            return torch.empty(num_bytes, dtype=torch.uint8, device="cpu", pin_memory=True)
        except RuntimeError as error:
            why = str(error).partition("\n")[0]
            self._note(
                f"page-locked memory is not available ({why}), so pageable memory is used, which "
                "makes copies slower and prevents overlap with kernels"
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
        under_way, finished = self._under_way[stream], []
        with accelerator.on(self._device):
            with self._lock:
                while under_way and under_way[0].done.query():
                    finished.append(under_way.popleft())
            # Drop the references to the tensors of copies that are complete.
            for each in finished:
                each.held = ()
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
                    under_way.append(copies)
        return copies

    def download(
        self, to: Sequence[Tensor], sources: Sequence[Tensor], after: Event | None = None
    ) -> _Copies:
        stream = self._down if after is None else self._marked
        return self._copy(stream, list(to), list(sources), after)

    def upload(
        self, to: Sequence[Tensor], sources: Sequence[Tensor], after: Event | None = None
    ) -> _Copies:
        # Detach, because a detached tensor keeps its present memory, even if the caller replaces a
        # parameter's .data during the copy.
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
    """Wait for copies in progress when a transfer is deleted."""
    # A forked child has not initialized the accelerator, so synchronizing in the child would fail.
    if accelerator.is_initialized():
        with accelerator.on(device):
            for copies in itertools.chain(*under_way):
                copies.done.synchronize()


def transfer_for(device: torch.device) -> Transfer:
    """Return the transfer between a device and the host.

    Raises:
        ValueError: the device's type is not supported.
    """
    if device.type == "cpu":
        return Transfer()
    if device.type == "meta":
        return MetaTransfer()
    accelerator = accelerator_of(device)
    if accelerator is not None:
        return CudaTransfer(device, accelerator)
    raise ValueError(
        f"optimizer_cpu_offload=True: device type {device.type!r} is not supported, only cpu and "
        "cuda; set optimizer_cpu_offload=False"
    )
