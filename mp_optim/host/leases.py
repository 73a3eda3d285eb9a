"""Leases: tensors that a background save still has to read while training continues.

A step calls :func:`before_writing` with the tensors of each launch and window. All other writers of
state call :func:`before_writing_all`, through ``StepMark.open_state``. Both copy the host memory
that the save has not read yet. So the save reads the values at the time of its call, and training
waits only for copies of unread bytes.

Threads copy an accelerator's memory to the host as soon as the save is called, and a writer waits
for these copies. Copies on the accelerator would need more of its memory, which is scarce. NOTE:
the host waits, so kernels that are queued afterwards run after the copies, on any stream.

Only this package writes state. torch's version counter shows other writes. Other code also writes
the model's parameters, often without a new version (``.data``, foreign kernels, CUDA graphs). So a
save compares checksums of the copied parameters with checksums at the time of the call.
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

from mp_optim.host.calls import in_own_modes, writes_counted
from mp_optim.host.host_memory import Block, aligned_bytes
from mp_optim.host.host_share import host_share
from mp_optim.host.transfer import Transfer, transfer_for

WINDOW = 32 << 20
"""Size in bytes of a thread's page-locked window, into which pieces are copied."""
MOST_THREADS = 3
"""Largest number of copying threads. With three threads, the bus transfers one piece while two
other pieces are copied from windows to ordinary memory."""
_PIECE = 256 << 20
"""Size in bytes of one allocation for copies. Pages that are never written occupy no memory."""
_COLUMNS = 256
_WORD = 8

Take = Callable[[int], Tensor]
"""Function that returns ordinary host memory of a given number of bytes."""


def _written_by_others(what: str) -> RuntimeError:
    """Return the error for state that other code wrote without a call of :func:`before_writing`."""
    return RuntimeError(
        f"optimizer.state ({what}): other code than the optimizer wrote this tensor while a "
        "background save read it; call wait() of the save's handle before you write to state, or "
        "read state again by state_dict(), optimizer.state or named_main_params() after the save "
        "began"
    )


def move(to: Tensor, source: Tensor) -> None:
    """Copy bytes between host tensors in the calling thread, without the interpreter's lock."""
    ctypes.memmove(to.data_ptr(), source.data_ptr(), to.nbytes)


# -- host memory ----------------------------------------------------------------------------------


class Lease:
    """The bytes of a contiguous host tensor at the start of the lease, which a save reads once in
    order while training may write the tensor.

    NOTE: the save's thread reads under a lock. A thread that is about to write copies unread bytes
    under the same lock. While :attr:`_source` is the tensor's memory, no thread has written it
    since the start of the lease; :func:`before_writing` ensures that.

    Attributes:
        nbytes: size in bytes.
        address: first address of the tensor's memory at the start of the lease.
        end: first address after the tensor's memory.
        is_unread: True if the save still has to read the tensor's memory.
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
        """Read the next ``to.nbytes`` bytes of the lease into a host tensor.

        Raises:
            RuntimeError: code outside the optimizer wrote the tensor.
        """
        with self._lock:
            move(to, self._source[self._read - self._first :][: to.nbytes])
            self._notice_writes()
            if self._is_lost:
                raise _written_by_others(self._what)
            self._read += to.nbytes
            if self._read == self.nbytes:
                self._read_from(torch.empty(0, dtype=torch.uint8, device="cpu"))

    @in_own_modes
    def copy_rest(self, take: Take) -> None:
        """Copy all unread bytes, so that the tensor's memory may be written."""
        with self._lock:
            if self.is_unread:
                self._notice_writes()
                rest = self._source[self._read - self._first :]
                self._read_from(take(rest.numel()).copy_(rest))

    def stop_watching(self) -> None:
        """Stop comparing versions, because the tensor gets other memory.

        NOTE: a leased tensor may be a view. If the view's base gets other memory, the view keeps
        the old memory, but later writes to the base increase the version of the view.
        """
        with self._lock:
            self._notice_writes()
            self._watched = None

    def _read_from(self, source: Tensor) -> None:
        """Use ``source`` for all later reads. The tensor's version is no longer compared."""
        self._source, self._first = source, self._read
        self._watched, self.is_unread = None, False

    def _notice_writes(self) -> None:
        """Detect writes without :func:`before_writing`, by comparing the tensor's version."""
        # If the tensor has other memory now, writes to the tensor do not reach the leased memory.
        # So ignore the version.
        live = self._watched
        if live is not None and live.data_ptr() == self.address:
            self._is_lost = writes_counted(live) != self._version


# -- memory of accelerators -----------------------------------------------------------------------


def sums_of_bits(values: Tensor) -> Tensor:
    """Return sums of a tensor's 8-byte words, arranged in 256 columns: int64, shape (256,).

    The tensor is not copied.

    Args:
        values: 1-D uint8 tensor; its address is a multiple of 8.
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
    """A transfer from one accelerator and its page-locked windows, which are kept for the next
    save."""

    def __init__(self, transfer: Transfer) -> None:
        self.transfer = transfer
        self._free: list[Tensor] = []
        self._lock = threading.Lock()

    def take(self, num_bytes: int) -> Tensor:
        """Return a window of at least ``num_bytes`` bytes. Any thread may call this."""
        with self._lock:
            while self._free:
                window = self._free.pop()
                if window.numel() >= num_bytes:
                    return window
        return self.transfer.empty_host(num_bytes, pin=True)

    def put(self, window: Tensor) -> None:
        """Make a window available for later calls of :meth:`take`. The caller ensures that no copy
        uses the window."""
        with self._lock:
            self._free.append(window)


@cache
def windows_of(device: torch.device) -> Windows:
    """Return the windows for copies from an accelerator, one object per process."""
    return Windows(transfer_for(device))


class StagedBytes:
    """Bytes that are being copied from an accelerator, to be read once in order.

    Attributes:
        nbytes: number of bytes.
    """

    def __init__(self, nbytes: int, arrive: Callable[[], Tensor]) -> None:
        self.nbytes, self._read = nbytes, 0
        self._arrive: Callable[[], Tensor] | None = arrive
        self._memory: Tensor | None = None

    def read_into(self, to: Tensor) -> None:
        """Read the next ``to.nbytes`` bytes into a host tensor. Waits for the copy.

        Raises:
            RuntimeError: the copy failed, or other code wrote the tensor before it was copied.
        """
        if self._memory is None:
            assert self._arrive is not None
            self._memory, self._arrive = self._arrive(), None
        move(to, self._memory[self._read : self._read + to.nbytes])
        self._read += to.nbytes
        if self._read == self.nbytes:
            self._memory = None


class _DeviceLease:
    """The bytes of a contiguous tensor on an accelerator, and their copy on the host.

    NOTE: read and change the fields only under the lock of the :class:`DeviceBorrow`.

    Attributes:
        nbytes: number of bytes.
        source: the tensor on the accelerator, until all bytes are copied.
        memory: host memory for the copy.
        missing: number of bytes that are not in ``memory`` yet.
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
        """Count ``num_bytes`` more bytes as copied. After the last byte, release the accelerator's
        memory."""
        # If the tensor has other memory now, writes to the tensor do not reach the leased memory.
        # So ignore the version.
        tensor = self._tensor
        if tensor is not None and tensor.data_ptr() == self._address:
            self.is_written |= writes_counted(tensor) != self._version
        self._borrowed -= num_bytes
        if not self._borrowed:
            self.source = self._tensor = None


class _Part(NamedTuple):
    """Some bytes of a lease, and their offset in a window."""

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
    """The tensors of one accelerator that one save reads, and their copies on the host.

    The training thread adds tensors and calls :meth:`start`. Threads then copy pieces into a few
    page-locked windows, and from a window to ordinary host memory. The copies use the transfer's
    stream, and start after the work that was queued before. So the amount of page-locked memory is
    bounded, and copying does not wait for the disk.

    NOTE: readers reference this object until all bytes are read. So this object must not reference
    leases of large tensors. Otherwise the leases' host memory would stay allocated until then.
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
        """Lease a contiguous tensor of state.

        Args:
            tensor: tensor of state. Its writers call :func:`before_writing` first.
            what: name of the tensor for errors.
        """
        self._leases.append(lease := _DeviceLease(tensor))
        return StagedBytes(lease.nbytes, partial(self._unwritten, lease, what))

    def lease_param(self, tensor: Tensor, what: str) -> StagedBytes:
        """Lease a contiguous parameter, which other code may write.

        Args:
            tensor: tensor at an address that is a multiple of 8.
            what: name of the tensor for errors.
        """
        self._leases.append(lease := _DeviceLease(tensor))
        assert lease.source is not None
        sums = self.copy_small(sums_of_bits(lease.source))
        return StagedBytes(lease.nbytes, partial(self._unchanged, lease, sums, what))

    def copy_small(self, tensor: Tensor) -> StagedBytes:
        """Lease a small tensor.

        :meth:`start` copies all small tensors into one tensor on the device, so that one download
        copies them to the host.
        """
        first, self._used = self._used, self._used + tensor.nbytes
        self._small.append(tensor.detach().reshape(-1).view(torch.uint8))
        return StagedBytes(tensor.nbytes, partial(self._small_bytes, first, self._used))

    def start(self, take: Take) -> None:
        """Start to copy all leased tensors to the host, after the work queued on the current
        stream."""
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
        """Wait until the save does not read the accelerator's memory any more.

        Args:
            timeout: number of seconds; None waits without a limit.

        Returns:
            False if the time ran out, else True.
        """
        with self._changed:
            return self._changed.wait_for(lambda: not self._borrowed, timeout)

    def stop(self, error: BaseException) -> None:
        """Start no further copies. Copies in progress finish, and waiting threads continue."""
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

    # -- reading of copied bytes ------------------------------------------------------------------

    def _bytes_of(self, lease: _DeviceLease) -> Tensor:
        """Wait for all bytes of a lease, and return them.

        Raises:
            RuntimeError: the copy failed.
        """
        with self._changed:
            self._changed.wait_for(lambda: not lease.missing or self._error is not None)
            if lease.missing:
                raise RuntimeError(
                    f"background save: copying from the device failed: {self._error}; save again"
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
                f"{what}: code outside the optimizer wrote this parameter while a background save "
                "copied it from the device; call wait_for_device() of the save's handle before you "
                "write parameters"
            )
        return memory


# -- leases of a save, and writers -----------------------------------------------------------------


class SaveBorrow:
    """All leases of one save.

    Args:
        tensors: contiguous host tensors.

    Attributes:
        leases: one lease for each host tensor.
    """

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._lock, self._block = threading.Lock(), Block(0)
        self.leases = [Lease(tensor) for tensor in tensors]
        self._of_devices: dict[torch.device, DeviceBorrow] = {}
        self._apart: list[Lease] = []
        end = 0
        for lease in sorted(self.leases, key=lambda lease: lease.address):
            if lease.address < end:
                # Leases are found by address, and two leases with common memory have common
                # addresses. So copy the second tensor now.
                lease.copy_rest(self.take)
            else:
                self._apart.append(lease)
                end = lease.end
        self._starts = [lease.address for lease in self._apart]

    def take(self, num_bytes: int) -> Tensor:
        """Return host memory for a copy. Any thread may call this.

        The memory is a part of a large allocation, because first writes to many small allocations
        take several times as long. An allocation is freed with its last copy.
        """
        size = aligned_bytes(num_bytes, torch.uint8)
        with self._lock:
            if size > self._block.left:
                self._block = Block(max(size, _PIECE))
            return self._block.take(torch.Size([num_bytes]), torch.uint8)

    def of_device(self, device: torch.device) -> DeviceBorrow:
        """Return the leases of an accelerator, created by the first call.

        Before :meth:`start` only the training thread may call this, afterwards any thread.
        """
        if device not in self._of_devices:
            self._of_devices[device] = DeviceBorrow(windows_of(device))
        return self._of_devices[device]

    def start(self) -> None:
        """Start to copy all leased tensors to the host, after the work queued on the current
        streams."""
        for borrow in self._of_devices.values():
            borrow.start(self.take)

    def wait_for_devices(self, timeout: float | None = None) -> bool:
        """Wait until the save does not read the memory of any accelerator any more.

        Args:
            timeout: number of seconds for each accelerator; None waits without a limit.

        Returns:
            False if the time ran out for an accelerator, else True.
        """
        waits = [borrow.wait(timeout) for borrow in self._of_devices.values()]
        return all(waits)

    def give_back(self) -> None:
        """End the leases, because the save reads no memory any more."""
        for borrow in self._of_devices.values():
            borrow.stop(RuntimeError("the save has ended"))
        if self in borrows:
            borrows.remove(self)

    def leases_of(self, tensor: Tensor) -> Sequence[Lease]:
        """Return the leases that overlap a tensor's memory; all leases if the memory is unknown."""
        if not is_plain(tensor):
            return self.leases
        if not tensor.is_cpu or not tensor.numel():
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
"""The leases of the background save in progress; at most one. While this list is empty,
:func:`before_writing` does nothing.

NOTE: the training thread appends, the save's thread removes, and any thread reads. Work that began
before the save writes gradients and back buffers, which no save reads.
"""


def lease_tensors(tensors: Sequence[Tensor]) -> SaveBorrow:
    """Lease contiguous host tensors until the caller calls :meth:`SaveBorrow.give_back`."""
    lease_set = SaveBorrow(tensors)
    borrows.append(lease_set)
    _watch_torch_optimizers()
    return lease_set


@cache
def _watch_torch_optimizers() -> None:
    # NOTE: never remove the hook. Removing the hook while a step in another thread runs all hooks
    # would make that step fail.
    register_optimizer_step_pre_hook(wait_for_devices)


def give_memory(tensor: Tensor, memory: Tensor) -> None:
    """Replace a tensor's memory by that of another tensor on any device. Saves still read the old
    memory."""
    for lease_set in tuple(borrows):
        for lease in lease_set.leases_of(tensor):
            lease.stop_watching()
    tensor.data = memory


def before_writing(*lists: Iterable[Tensor | None]) -> None:
    """Copy the bytes of tensors that saves have not read, because the tensors are about to be
    written.

    For tensors on accelerators, wait until saves have read all accelerator memory. Without a save
    in progress the function returns at once.

    Args:
        *lists: lists of tensors; None entries are skipped.
    """
    for lease_set in tuple(borrows):
        waits = False
        for tensors in lists:
            for tensor in tensors:
                if tensor is not None:
                    waits |= not is_plain(tensor) or not tensor.is_cpu
                    for lease in lease_set.leases_of(tensor):
                        lease.copy_rest(lease_set.take)
        if waits:
            lease_set.wait_for_devices()


def before_writing_all() -> None:
    """Copy all bytes that saves have not read, and wait for accelerators, because any state may be
    written.

    Returns at once without a save in progress, and after the first call during a save.
    """
    for lease_set in tuple(borrows):
        for lease in lease_set.leases:
            lease.copy_rest(lease_set.take)
    wait_for_devices()


def wait_for_devices(*_: Any) -> None:
    """Wait until saves read no accelerator's memory any more.

    torch also calls this function as a hook before each step of any optimizer, with arguments that
    the function ignores.
    """
    for lease_set in tuple(borrows):
        lease_set.wait_for_devices()


def is_plain(tensor: Tensor) -> bool:
    """True for tensors with memory at their ``data_ptr``. Subclasses of Tensor may have other
    memory."""
    return type(tensor) in (Tensor, torch.nn.Parameter)
