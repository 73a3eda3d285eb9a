"""Brings memory of an accelerator to the host piece by piece, while device and caller go on.

Threads copy pieces in the transfer's own stream, which begins when the work queued before is done,
into a few windows of page-locked memory, and from there to ordinary host memory. So what is
page-locked is bounded, and the device's memory is read for as long as the bus takes, whatever
becomes of the bytes.
"""

from __future__ import annotations

import ctypes
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from mp_optim.process.host_memory import aligned_bytes
from mp_optim.process.host_share import host_share
from mp_optim.process.transfer import Transfer, transfer_for

WINDOW = 32 << 20
"""Bytes of page-locked memory that a thread brings pieces down to."""
MOST_THREADS = 3
"""One piece is on the bus while others go on to where they stay."""

Take = Callable[[int], Tensor]
"""Gives so many bytes of ordinary host memory."""


class Windows:
    """The way down from one accelerator: a transfer, and page-locked memory, which stays for the
    next save."""

    def __init__(self, transfer: Transfer) -> None:
        self.transfer = transfer
        self._free: list[Tensor] = []
        self._lock = threading.Lock()

    def take(self, num_bytes: int) -> Tensor:
        """At least so many bytes. Any thread may call."""
        with self._lock:
            while self._free:
                window = self._free.pop()
                if window.numel() >= num_bytes:
                    return window
        return self.transfer.empty_host(num_bytes, pin=True)

    def put(self, window: Tensor) -> None:
        """No copy reads or writes it any more."""
        with self._lock:
            self._free.append(window)


@cache
def windows_of(device: torch.device) -> Windows:
    """The way down from an accelerator, one for the process."""
    return Windows(transfer_for(device))


def can_stage(tensor: Tensor) -> bool:
    """Whether a tensor lies on an accelerator that memory is copied from in the background."""
    return tensor.device.type == "cuda"


def version_of(tensor: Tensor) -> int | None:
    """How often torch saw it written; torch does not count where it is an inference tensor."""
    return None if tensor.is_inference() else tensor._version


def written_by_others(what: str) -> RuntimeError:
    """State was written and nobody said so."""
    return RuntimeError(
        f"a tensor of the optimizer ({what}) was written while a save in the background read it, "
        "and not by the optimizer; take state by state_dict(), optimizer.state or "
        "named_main_params() again after the save began, or wait() for the save before writing to "
        "state"
    )


class DeviceLease:
    """The bytes of a contiguous tensor on an accelerator as they are now.

    NOTE: counts and memory are looked at and changed under the lock of the :class:`Staging`.

    Attributes:
        nbytes: how many there are.
        source: them on the accelerator, until all are down. memory: where they go.
        borrowed, missing: bytes that are not down, and not in ``memory``.
    """

    def __init__(self, tensor: Tensor) -> None:
        self.nbytes = self.borrowed = self.missing = tensor.nbytes
        self.source: Tensor | None = tensor.detach().view(-1).view(torch.uint8)
        self.memory: Tensor | None = None
        self.is_written = False
        self._tensor: Tensor | None = tensor
        self._address, self._version = tensor.data_ptr(), version_of(tensor)

    def look(self) -> None:
        """Note whether torch has seen the tensor written."""
        tensor = self._tensor  # if it has other memory now, this is only the save's
        if tensor is not None and tensor.data_ptr() == self._address:
            self.is_written |= version_of(tensor) != self._version

    def let_go(self) -> None:
        """Nothing of the accelerator is read any more."""
        self.source = self._tensor = None


class _Part(NamedTuple):
    """Some bytes of a lease, and where in a window they go."""

    lease: DeviceLease
    first: int
    size: int
    place: int


def _batches(leases: Sequence[DeviceLease], window: int) -> Iterator[list[_Part]]:
    """All bytes, in order, a window at a time."""
    batch: list[_Part] = []
    used = 0
    for lease in leases:
        first = 0
        while first < lease.nbytes:
            if used >= window:
                yield batch
                batch, used = [], 0
            size = min(lease.nbytes - first, window - used)
            batch.append(_Part(lease, first, size, used))
            first, used = first + size, used + aligned_bytes(size, torch.uint8)
    if batch:
        yield batch


class Staging:
    """Brings what is lent of one accelerator to the host, from now on.

    Args:
        take: gives memory; called by other threads.
    """

    def __init__(
        self, windows: Windows, leases: Sequence[DeviceLease], take: Take
    ) -> None:
        self._windows, self._take = windows, take
        total = sum(aligned_bytes(lease.nbytes, torch.uint8) for lease in leases)
        self._window = min(WINDOW, total)
        self._coming = deque(_batches(leases, self._window))
        self._borrowed = len(self._coming)
        self._error: BaseException | None = None
        self._changed = threading.Condition(threading.RLock())
        self._after = windows.transfer.mark()
        threads = max(2, min(host_share().threads // 2, MOST_THREADS))
        for number in range(min(threads, len(self._coming))):
            name = f"copying what is saved {number}"
            threading.Thread(target=self._work, name=name, daemon=False).start()

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until nothing of the accelerator is read any more; whether that is so."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._borrowed, timeout)

    def bytes_of(self, lease: DeviceLease) -> Tensor:
        """Wait for all bytes of a lease.

        Raises:
            RuntimeError: they could not be brought here.
        """
        with self._changed:
            self._changed.wait_for(lambda: not lease.missing or self._error is not None)
            if lease.missing:
                raise RuntimeError(
                    f"copying from the device failed: {self._error}"
                ) from self._error
            assert lease.memory is not None
            return lease.memory

    def stop(self, error: BaseException) -> None:
        """Bring nothing more; who waits goes on."""
        with self._changed:
            self._error = self._error or error
            self._coming.clear()
            self._borrowed = 0
            self._changed.notify_all()

    def _work(self) -> None:
        try:
            window = self._windows.take(self._window)
            while batch := self._next():
                self._bring(batch, window)
            self._windows.put(window)
        except BaseException as error:
            self.stop(error)

    def _next(self) -> list[_Part]:
        with self._changed:
            if not self._coming:
                return []
            batch = self._coming.popleft()
            for lease in {part.lease for part in batch}:
                if lease.memory is None:
                    lease.memory = self._take(lease.nbytes)
            return batch

    def _bring(self, batch: list[_Part], window: Tensor) -> None:
        pieces = [window[part.place : part.place + part.size] for part in batch]
        sources = []
        for part in batch:
            assert part.lease.source is not None
            sources.append(part.lease.source[part.first : part.first + part.size])
        transfer = self._windows.transfer
        ticket = transfer.download(pieces, sources, self._after)
        sources.clear()
        transfer.wait(ticket)
        self._is_down(batch)
        for part, piece in zip(batch, pieces, strict=True):
            assert part.lease.memory is not None
            move(part.lease.memory[part.first : part.first + part.size], piece)
        with self._changed:
            for part in batch:
                part.lease.missing -= part.size
            self._changed.notify_all()

    def _is_down(self, batch: list[_Part]) -> None:
        with self._changed:
            for part in batch:
                part.lease.look()
                part.lease.borrowed -= part.size
                if not part.lease.borrowed:
                    part.lease.let_go()
            self._borrowed = max(0, self._borrowed - 1)
            self._changed.notify_all()


def move(to: Tensor, source: Tensor) -> None:
    """Copy bytes of the host, in this thread alone and without the interpreter's lock."""
    ctypes.memmove(to.data_ptr(), source.data_ptr(), to.nbytes)
