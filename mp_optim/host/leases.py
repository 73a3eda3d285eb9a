"""Leases: tensors that a background save still has to read while training goes on.

A step announces the tensors of each launch and window (:func:`before_writing`). All other writers
announce all tensors (:func:`before_writing_all`), through ``StepMark.open_state``. The lease then
copies the host memory that the save has not read. So the save reads the bits of its call, and a
step pays for the bytes that are not written yet.

Threads copy an accelerator's memory to the host from the call on; a writer waits for the remaining
copies. A copy on the device instead would take memory where it is scarcest. NOTE: the host waits,
so kernels that are queued afterwards run after the copies, on any stream.

Only this package writes state, and announces it; torch's version counter shows other writes. Other
code also writes the model's parameters, often without a trace (``.data``, foreign kernels, CUDA
graphs), so the copies are compared with sums of the bits at the call.
"""

from __future__ import annotations

import bisect
import ctypes
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cache, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_pre_hook

from mp_optim.host import host_memory
from mp_optim.host.accelerator import accelerator_of
from mp_optim.host.calls import in_own_modes, writes_counted
from mp_optim.host.host_memory import Block, aligned_bytes, empty_host_tensor
from mp_optim.host.host_share import host_share
from mp_optim.host.transfer import Transfer, transfer_for

WINDOW = 32 << 20
"""Bytes of page-locked memory that a thread brings pieces down to."""
MOST_THREADS = 3
"""One piece is on the bus while others go on to where they stay."""
_PIECE = 256 << 20
"""Bytes of one allocation for copies. Unused bytes of it take no memory."""
_COLUMNS = 256
_WORD = 8

Take = Callable[[int], Tensor]
"""Returns ordinary host memory of a size in bytes."""


def _written_by_others(what: str) -> RuntimeError:
    """Record a write to state that was not announced."""
    return RuntimeError(
        f"a tensor of the optimizer ({what}) was written while a save in the background read it, "
        "and not by the optimizer; take state by state_dict(), optimizer.state or "
        "named_main_params() again after the save began, or wait() for the save before writing to "
        "state"
    )


def move(to: Tensor, source: Tensor) -> None:
    """Copy bytes of the host, in this thread alone and without the interpreter's lock."""
    ctypes.memmove(to.data_ptr(), source.data_ptr(), to.nbytes)


# -- host memory ----------------------------------------------------------------------------------


class Lease:
    """The bytes of a contiguous host tensor at the time of the lease, read once from first to last,
    while the tensor may be written.

    NOTE: the reader's thread reads, and a thread that is about to write copies, under one lock.
    While :attr:`_source` is the tensor's own memory, no thread has written it since the lease
    began; :func:`before_writing` ensures that.

    Attributes:
        nbytes: size in bytes.
        address: first address of the tensor's memory when the lease began.
        end: address after its last byte.
        is_unread: True if the tensor's own memory still has to be read.
    """

    def __init__(self, tensor: Tensor) -> None:
        self.nbytes, self.is_unread = tensor.nbytes, True
        self.address = tensor.data_ptr()
        self.end = self.address + tensor.nbytes
        self._watched: Tensor | None = tensor
        self._what = f"{tensor.dtype}, shape {tuple(tensor.shape)}"
        self._version = writes_counted(tensor)
        self._source = tensor.detach().view(-1).view(torch.uint8)
        self._first = self._read = 0
        self._is_lost = False
        self._lock = threading.Lock()

    def read_into(self, to: Tensor) -> None:
        """Read the next ``to.nbytes`` bytes into ``to``, a host tensor.

        Raises:
            RuntimeError: other code than the optimizer wrote the tensor.
        """
        with self._lock:
            move(to, self._source[self._read - self._first :][: to.nbytes])
            self._notice_writes()
            if self._is_lost:
                raise _written_by_others(self._what)
            self._read += to.nbytes
            if self._read == self.nbytes:
                self._read_from(empty_host_tensor())

    @in_own_modes
    def copy_rest(self, take: Take) -> None:
        """Copy the bytes that were not read yet, so that the tensor's memory may be written."""
        with self._lock:
            if self.is_unread:
                self._notice_writes()
                rest = self._source[self._read - self._first :]
                self._read_from(take(rest.numel()).copy_(rest))

    def stop_watching(self) -> None:
        """Stop comparing torch's count of writes, because the tensor gets other memory.

        NOTE: a leased tensor may be a view that shares the tensor's count of writes but not its
        moves.
        """
        with self._lock:
            self._notice_writes()
            self._watched = None

    def _read_from(self, source: Tensor) -> None:
        """Read the remaining bytes from ``source``, and no longer from the tensor."""
        self._source, self._first = source, self._read
        self._watched, self.is_unread = None, False

    def _notice_writes(self) -> None:
        """Detect writes that were not announced, by torch's version counters."""
        live = self._watched  # if the tensor's memory was replaced, only the save uses this memory
        if live is not None and live.data_ptr() == self.address:
            self._is_lost = writes_counted(live) != self._version


# -- memory of accelerators -----------------------------------------------------------------------


def can_stage(tensor: Tensor) -> bool:
    """Whether a tensor is on an accelerator that memory is copied from in the background."""
    return accelerator_of(tensor.device) is not None


def sums_of_bits(values: Tensor) -> Tensor:
    """Return the 8-byte words summed in columns: int64, shape (256,), without a copy of the values.

    Args:
        values: 1-D uint8, from an address on that is a multiple of 8.
    """
    whole, words = values.numel() // (_WORD * _COLUMNS), values.numel() // _WORD
    table = values[: whole * _WORD * _COLUMNS].view(torch.int64).view(whole, _COLUMNS)
    sums = table.sum(0)
    row = values[whole * _WORD * _COLUMNS : words * _WORD].view(torch.int64)
    for rest in (row, values[words * _WORD :]):
        if rest.numel():
            sums[: rest.numel()] += rest
    return sums


class Windows:
    """The way down from one accelerator: a transfer, and page-locked memory, which stays for the
    next save."""

    def __init__(self, transfer: Transfer) -> None:
        self.transfer = transfer
        self._free: list[Tensor] = []
        self._lock = threading.Lock()

    def take(self, num_bytes: int) -> Tensor:
        """Return at least ``num_bytes`` bytes. Any thread may call it."""
        with self._lock:
            while self._free:
                window = self._free.pop()
                if window.numel() >= num_bytes:
                    return window
        return self.transfer.empty_host(num_bytes, pin=True)

    def put(self, window: Tensor) -> None:
        """Free the memory, because no copy uses it any more."""
        with self._lock:
            self._free.append(window)


@cache
def windows_of(device: torch.device) -> Windows:
    """Return the staging windows for copies from an accelerator, one object a process."""
    return Windows(transfer_for(device))


class StagedBytes:
    """Bytes that are on their way from an accelerator, to be read once from the first to the last.

    Attributes:
        nbytes: how many there are.
    """

    def __init__(self, nbytes: int, arrive: Callable[[], Tensor]) -> None:
        self.nbytes, self._read = nbytes, 0
        self._arrive: Callable[[], Tensor] | None = arrive
        self._memory: Tensor | None = None

    def read_into(self, to: Tensor) -> None:
        """Read the next bytes, as many as ``to`` has, which is on the host.

        Raises:
            RuntimeError: they could not be brought here, or are not those of the call.
        """
        if self._memory is None:
            assert self._arrive is not None
            self._memory, self._arrive = self._arrive(), None
        move(to, self._memory[self._read : self._read + to.nbytes])
        self._read += to.nbytes
        if self._read == self.nbytes:
            self._memory = None


class _DeviceLease:
    """The current bytes of a contiguous tensor on an accelerator.

    NOTE: counts and memory are read and changed under the lock of the :class:`DeviceBorrow`.

    Attributes:
        nbytes: number of bytes.
        source: the tensor on the accelerator, until all bytes are copied.
        memory: host memory for the copy.
        missing: bytes that are not in ``memory``.
        is_written: True if torch counted a write before all bytes were copied.
    """

    def __init__(self, tensor: Tensor) -> None:
        self.nbytes = self._borrowed = self.missing = tensor.nbytes
        self.source: Tensor | None = tensor.detach().view(-1).view(torch.uint8)
        self.memory: Tensor | None = None
        self.is_written = False
        self._tensor: Tensor | None = tensor
        self._address, self._version = tensor.data_ptr(), writes_counted(tensor)

    def are_down(self, num_bytes: int) -> None:
        """Count ``num_bytes`` more as read; after the last, drop the accelerator's memory."""
        tensor = self._tensor  # if the tensor's memory was replaced, only the save uses this memory
        if tensor is not None and tensor.data_ptr() == self._address:
            self.is_written |= writes_counted(tensor) != self._version
        self._borrowed -= num_bytes
        if not self._borrowed:
            self.source = self._tensor = None


class _Part(NamedTuple):
    """Some bytes of a lease, and where in a window they go."""

    lease: _DeviceLease
    first: int
    size: int
    place: int


def _batches(leases: Sequence[_DeviceLease], window: int) -> Iterator[list[_Part]]:
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


class DeviceBorrow:
    """The tensors of one accelerator that one save reads, and their copies to the host.

    The training thread adds tensors and calls :meth:`start`. Threads then copy pieces in the
    transfer's own stream, which begins when the work queued before is done, into a few windows of
    page-locked memory, and from there to ordinary host memory. So page-locked memory is bounded,
    and the device's memory is read as fast as the bus allows, however slow the disk is.

    NOTE: readers hold this object until they have read, so it keeps only the leases of small
    tensors.
    """

    def __init__(self, windows: Windows) -> None:
        self._windows, self._window = windows, WINDOW
        self._leases: list[_DeviceLease] = []
        self._small: list[Tensor] = []
        self._used = 0
        self._lease_of_small: _DeviceLease | None = None
        self._coming: deque[list[_Part]] = deque()
        self._borrowed = 0
        self._error: BaseException | None = None
        self._changed = threading.Condition(threading.RLock())

    def lease_state(self, tensor: Tensor, what: str) -> StagedBytes:
        """Lease a contiguous tensor with announced writes. Errors name it ``what``."""
        self._leases.append(lease := _DeviceLease(tensor))
        return StagedBytes(lease.nbytes, partial(self._unwritten, lease, what))

    def lease_param(self, tensor: Tensor, what: str) -> StagedBytes:
        """Lease a contiguous tensor that other code may write. Its address is a multiple of 8."""
        self._leases.append(lease := _DeviceLease(tensor))
        assert lease.source is not None
        sums = self.copy_small(sums_of_bits(lease.source))
        return StagedBytes(lease.nbytes, partial(self._unchanged, lease, sums, what))

    def copy_small(self, tensor: Tensor) -> StagedBytes:
        """Copy a tensor on its device, together with others."""
        first, self._used = self._used, self._used + tensor.nbytes
        self._small.append(tensor.detach().reshape(-1).view(torch.uint8))
        return StagedBytes(tensor.nbytes, partial(self._small_bytes, first, self._used))

    def start(self, take: Take) -> None:
        """Begin to bring everything down, after the work that is queued in the current stream."""
        leases = self._leases
        if self._small:
            self._lease_of_small = _DeviceLease(torch.cat(self._small))
            leases = [self._lease_of_small, *leases]
        self._leases, self._small = [], []
        total = sum(aligned_bytes(lease.nbytes, torch.uint8) for lease in leases)
        self._window = min(WINDOW, total)
        self._coming.extend(_batches(leases, self._window))
        self._borrowed = len(self._coming)
        after = self._windows.transfer.mark()
        threads = max(2, min(host_share().threads // 2, MOST_THREADS))
        for number in range(min(threads, len(self._coming))):
            name = f"background save {number}"
            work = partial(self._work, take, after)
            threading.Thread(target=work, name=name, daemon=False).start()

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until nothing of the accelerator is read any more; whether that is so."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._borrowed, timeout)

    def stop(self, error: BaseException) -> None:
        """Stop copying. Copies in progress finish, and waiting threads continue."""
        with self._changed:
            self._error = self._error or error
            self._coming.clear()
            self._borrowed = 0
            self._changed.notify_all()

    def _work(self, take: Take, after: Any) -> None:
        try:
            window = self._windows.take(self._window)
            while batch := self._next(take):
                self._bring(batch, window, after)
            self._windows.put(window)
        except BaseException as error:
            self.stop(error)

    def _next(self, take: Take) -> list[_Part]:
        with self._changed:
            if not self._coming:
                return []
            batch = self._coming.popleft()
            for lease in {part.lease for part in batch}:
                if lease.memory is None:
                    lease.memory = take(lease.nbytes)
            return batch

    def _bring(self, batch: list[_Part], window: Tensor, after: Any) -> None:
        pieces = [window[part.place : part.place + part.size] for part in batch]
        sources = []
        for part in batch:
            assert part.lease.source is not None
            sources.append(part.lease.source[part.first : part.first + part.size])
        transfer = self._windows.transfer
        ticket = transfer.download(pieces, sources, after)
        sources.clear()
        transfer.wait(ticket)
        with self._changed:
            for part in batch:
                part.lease.are_down(part.size)
            self._borrowed = max(0, self._borrowed - 1)
            self._changed.notify_all()
        for part, piece in zip(batch, pieces, strict=True):
            assert part.lease.memory is not None
            move(part.lease.memory[part.first : part.first + part.size], piece)
        with self._changed:
            for part in batch:
                part.lease.missing -= part.size
            self._changed.notify_all()

    # -- what has arrived, for readers ------------------------------------------------------------

    def _bytes_of(self, lease: _DeviceLease) -> Tensor:
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

    def _small_bytes(self, first: int, end: int) -> Tensor:
        assert self._lease_of_small is not None
        return self._bytes_of(self._lease_of_small)[first:end]

    def _unwritten(self, lease: _DeviceLease, what: str) -> Tensor:
        memory = self._bytes_of(lease)
        if lease.is_written:
            raise _written_by_others(what)
        return memory

    def _unchanged(self, lease: _DeviceLease, sums: StagedBytes, what: str) -> Tensor:
        memory = self._bytes_of(lease)
        at_the_call = torch.empty(sums.nbytes, dtype=torch.uint8, device="cpu")
        sums.read_into(at_the_call)
        if not torch.equal(sums_of_bits(memory), at_the_call.view(torch.int64)):
            raise RuntimeError(
                f"{what} was written during a background save that copies it from the device, "
                "without a hook of the optimizer or torch; before you write the model's "
                "parameters yourself, call wait_for_device() of the save's handle"
            )
        return memory


# -- leases of the present save, and writers -------------------------------------------------------


class SaveBorrow:
    """All leases of one save.

    Args:
        tensors: contiguous host tensors.

    Attributes:
        leases: one lease for each tensor.
    """

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._lock, self._block = threading.Lock(), Block(0)
        self.leases = [Lease(tensor) for tensor in tensors]
        self._of_devices: dict[torch.device, DeviceBorrow] = {}
        self._apart: list[Lease] = []
        end = 0
        for lease in sorted(self.leases, key=lambda lease: lease.address):
            if lease.address < end:
                lease.copy_rest(self.take)  # another tensor shares this memory
            else:
                self._apart.append(lease)
                end = lease.end
        self._starts = [lease.address for lease in self._apart]

    def take(self, num_bytes: int) -> Tensor:
        """Return host memory for a copy; any thread may call. It is a part of a large piece,
        because first writes to many small pieces cost several times as much. A piece is freed with
        its last copy."""
        size = aligned_bytes(num_bytes, torch.uint8)
        with self._lock:
            if size > self._block.left:
                self._block = Block(max(size, _PIECE))
            return self._block.take(torch.Size([num_bytes]), torch.uint8)

    def of_device(self, device: torch.device) -> DeviceBorrow:
        """Return the leases of an accelerator, created at the first call.

        Before :meth:`start` only the training thread may call this, afterwards any thread.
        """
        if device not in self._of_devices:
            self._of_devices[device] = DeviceBorrow(windows_of(device))
        return self._of_devices[device]

    def start(self) -> None:
        """Begin to bring everything down, after the work that is queued in the current streams."""
        for borrow in self._of_devices.values():
            borrow.start(self.take)

    def wait_for_devices(self, timeout: float | None = None) -> bool:
        """Wait until no memory of an accelerator is read, at most ``timeout`` seconds for each.
        True if none is."""
        waits = [borrow.wait(timeout) for borrow in self._of_devices.values()]
        return all(waits)

    def give_back(self) -> None:
        """End the lease, because the save reads the memory no more."""
        for borrow in self._of_devices.values():
            borrow.stop(RuntimeError("the save is over"))
        if self in borrows:
            borrows.remove(self)

    def leases_of(self, tensor: Tensor) -> Sequence[Lease]:
        """Return the leases of a tensor's memory; all leases, if its memory is unknown."""
        if not is_plain(tensor):
            return self.leases
        if not host_memory.is_on_host(tensor) or not tensor.numel():
            return ()
        begin, extent = tensor.data_ptr(), 1
        for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
            extent += (size - 1) * stride
        end = begin + extent * tensor.itemsize
        first = bisect.bisect_right(self._starts, begin)
        if first and self._apart[first - 1].end > begin:
            first -= 1
        return self._apart[first : bisect.bisect_left(self._starts, end)]


borrows: list[SaveBorrow] = []
"""The background save in progress, at most one. While the list is empty, :func:`before_writing`
does nothing.

NOTE: the training thread adds, the save's thread removes, and any thread reads. Work begun before
the save writes gradients and back buffers, which no save reads.
"""


def lease_tensors(tensors: Sequence[Tensor]) -> SaveBorrow:
    """Lease host tensors until :meth:`SaveBorrow.give_back`."""
    lease_set = SaveBorrow(tensors)
    borrows.append(lease_set)
    _watch_torch_optimizers()
    return lease_set


@cache
def _watch_torch_optimizers() -> None:
    # NOTE: for good: a hook that went while a step in another thread calls hooks would fail it
    register_optimizer_step_pre_hook(_before_torchs_step)


def _before_torchs_step(*_: Any) -> None:
    wait_for_devices()


def give_memory(tensor: Tensor, memory: Tensor) -> None:
    """Have a tensor be in other memory, of any device. Saves go on reading the memory it had."""
    for lease_set in tuple(borrows):
        for lease in lease_set.leases_of(tensor):
            lease.stop_watching()
    tensor.data = memory


def before_writing(*lists: Iterable[Tensor | None]) -> None:
    """Announce that tensors are about to be written, or passed to code that may write them. Copy
    the bytes that saves have not read; for accelerators, wait until saves have read everything.
    Costs nothing without a save in progress."""
    for lease_set in tuple(borrows):
        waits = False
        for tensors in lists:
            for tensor in tensors:
                if tensor is not None:
                    waits |= not is_plain(tensor) or not host_memory.is_on_host(tensor)
                    for lease in lease_set.leases_of(tensor):
                        lease.copy_rest(lease_set.take)
        if waits:
            lease_set.wait_for_devices()


def before_writing_all() -> None:
    """Announce that any state may be written, or handed to code that may: copy everything that
    saves have not read, and wait for accelerators. Free while no save is under way, and after the
    first call of a save."""
    for lease_set in tuple(borrows):
        for lease in lease_set.leases:
            lease.copy_rest(lease_set.take)
    wait_for_devices()


def wait_for_devices() -> None:
    """Wait until saves read nothing of accelerators any more."""
    for lease_set in tuple(borrows):
        lease_set.wait_for_devices()


def is_plain(tensor: Tensor) -> bool:
    """Whether it is known where its memory is; of others, layers above know."""
    return type(tensor) in (Tensor, torch.nn.Parameter)
