"""Storages of main params and state between steps: host memory, or a file.

``open_windows`` begins the windows of a step, one step at a time. ``read_window`` returns a window
with its tensors in host memory. ``write_window`` starts to write it back, and its memory must not
be written from then on. ``close_windows`` waits until all windows are stored. ``window_sizes``
returns the bytes of each window that is in memory at a time, from the sizes of slots, the largest
part that cannot be cut (``smallest``), and the number of windows in use (``lag``).

Windows of a file are read ahead and written behind. Tensors of a :class:`StateFile` are pieces of a
mapping of the file, which any code may read and write between steps. A step reads and writes
windows past the page cache. The file is not a checkpoint: it has no name, and is freed with the
process.
"""

from __future__ import annotations

import itertools
import mmap
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from mp_optim.host.calls import in_own_modes
from mp_optim.host.direct_file import DISK_BLOCK, DirectFile, Ticket
from mp_optim.host.host_memory import ALIGNMENT, TensorSpec, aligned_bytes, tensor_in
from mp_optim.host.leases import before_writing
from mp_optim.host.transfer import Transfer
from mp_optim.offload.timeline import WAIT_DISK, StepTimeline
from mp_optim.offload.window_plan import IN_FLIGHT, SMALLEST_WINDOW, Window, WindowForm, view_of

SETTLED_EVERY = 256 << 20
"""Bytes after which what was written to new tensors is brought to the disk."""


def blocks_bytes(num_bytes: int) -> int:
    """Return the bytes of a tensor in the file: whole blocks, so that no two tensors share one."""
    return -(-num_bytes // DISK_BLOCK) * DISK_BLOCK


@dataclass
class _Segment:
    """A mapped part of the file.

    Attributes:
        begin: offset in the file.
        used: number of bytes in use.
    """

    begin: int
    mapping: mmap.mmap
    memory: Tensor
    used: int = 0

    @property
    def left(self) -> int:
        return self.memory.numel() - self.used

    def offset_of(self, tensor: Tensor) -> int | None:
        inside = tensor.data_ptr() - self.memory.data_ptr()
        is_here = inside >= 0 and inside + tensor.nbytes <= self.memory.numel()
        return self.begin + inside if is_here else None


class StateFile:
    """A file on a local disk from which tensors are cut one after the other, each once.

    NOTE: Linux keeps a mapping and direct transfers of one file consistent unless they use a page
    at the same time. Before a direct read it writes changes of the mapping, and around a direct
    write it drops the pages. :meth:`settle` does both beforehand. So direct transfers happen within
    ``step()``, after it, and no other code uses the tensors then.

    Args:
        folder: the folder in which the first :meth:`reserve` makes the file.
        is_planned: True for a model on the meta device: no file is made, and tensors are meta
            tensors.

    Attributes:
        capacity: bytes allocated on the disk.
    """

    def __init__(self, folder: str | Path, is_planned: bool = False) -> None:
        self.folder = Path(folder)
        self.capacity = 0
        self._is_planned = is_planned
        self._file: DirectFile | None = None
        self._segments: list[_Segment] = []
        self._unsettled, self._is_exposed = 0, False

    @property
    def file(self) -> DirectFile:
        assert self._file is not None  # reserve() is called first
        return self._file

    def reserve(self, num_bytes: int) -> None:
        """Allocate ``num_bytes`` on the disk in total.

        Raises:
            OSError: the disk has too little space; with the path and the remedy.
        """
        unit = mmap.ALLOCATIONGRANULARITY  # offsets of mappings must be multiples of it
        more = max(-(-num_bytes // unit) * unit - self.capacity, 0)
        if not self._is_planned:
            if self._file is None:
                self._file = DirectFile(self.folder, more)
            else:
                self._file.grow(more)
            if more:
                mapping = self.file.mapped(self.capacity, more)
                memory = torch.frombuffer(mapping, dtype=torch.uint8)
                self._segments.append(_Segment(self.capacity, mapping, memory))
        self.capacity += more

    @in_own_modes
    def take(self, shape: torch.Size, dtype: torch.dtype) -> Tensor:
        """Return the next contiguous tensor, of zeros.

        Raises:
            OSError: the disk has too little space beyond the reserved bytes.
        """
        if self._is_planned:
            return torch.empty(shape, dtype=dtype, device="meta")
        size = blocks_bytes(shape.numel() * dtype.itemsize)
        if self._unsettled + size > SETTLED_EVERY:
            self.settle()
        segment = self._with_room(size)
        tensor = tensor_in(segment.memory, segment.used, shape, dtype)
        segment.used += size
        self._unsettled += size
        return tensor

    def _with_room(self, size: int) -> _Segment:
        for segment in self._segments:
            if size <= segment.left:
                return segment
        self.reserve(self.capacity + max(size, 1))
        return self._segments[-1]

    def zeros(self, forms: Sequence[TensorSpec]) -> list[Tensor]:
        """Return the next zeroed tensors of the file."""
        return [self.take(shape, dtype) for shape, dtype in forms]

    def offset_of(self, tensor: Tensor) -> int | None:
        """Return the offset of a contiguous tensor in the file; None if it is stored elsewhere, or
        is empty."""
        if tensor.nbytes:
            for segment in self._segments:
                if (offset := segment.offset_of(tensor)) is not None:
                    return offset
        return None

    # -- the mapping, and transfers past it -------------------------------------------------------

    def check_owner(self) -> None:
        """See :meth:`~mp_optim.host.direct_file.DirectFile.check_owner`."""
        if self._file is not None:
            self._file.check_owner()

    def exposed(self) -> None:
        """Record that a caller gets tensors, and may write to them.

        Raises:
            RuntimeError: this is a forked child (:meth:`DirectFile.check_owner`).
        """
        self.check_owner()
        self._is_exposed = True

    def settle(self) -> None:
        """Bring to the disk what was written to tensors, and hold no page of the file in memory.

        Raises:
            OSError: the disk does not take it; with the path and what to do.
        """
        if not (self._is_exposed or self._unsettled) or self._file is None:
            return
        with self._file.explained("writing"):
            for segment in self._segments:
                segment.mapping.flush()
                if hasattr(mmap, "MADV_DONTNEED"):
                    segment.mapping.madvise(mmap.MADV_DONTNEED)
        self._file.forget_cache()
        self._unsettled, self._is_exposed = 0, False

    def notes(self) -> tuple[str, ...]:
        """Return notes for the user about the folder."""
        if self._file is None or self._file.direct:
            return ()
        return (f"optimizer_state_path: {self._file.why}; state goes through the page cache",)


# -- windows of a step ----------------------------------------------------------------------------

AHEAD, BEHIND = 1, 2
"""Windows that are read before the next is needed; windows that may still be written."""


class MemoryStorage:
    """Main params and state in host memory. Windows are views of them."""

    form = WindowForm()
    read = written = allocated = 0
    _windows: Sequence[Window] = ()

    def window_sizes(self, sizes: Sequence[int], smallest: int, most: int, lag: int) -> list[int]:
        """Return window sizes within ``most``; together about all state, if that is less."""
        total = sum(sizes)
        if total <= most:
            return [total]
        third = -(-total // (IN_FLIGHT * ALIGNMENT)) * ALIGNMENT
        return [min(most, max(third, smallest, SMALLEST_WINDOW))] * IN_FLIGHT

    def host_bytes(self, sizes: Sequence[int]) -> tuple[int, ...]:
        return ()

    def resize(self, sizes: Sequence[int]) -> None: ...

    def open_windows(self, windows: Sequence[Window]) -> MemoryStorage:
        self._windows = windows
        return self

    def read_window(self, number: int) -> Window:
        window = self._windows[number]
        for piece in window:
            before_writing(piece.held.values())
        return window

    def write_window(self, number: int) -> None: ...

    def close_windows(self) -> None:
        self._windows = ()


@dataclass
class _Extent:
    """Neighbouring blocks of the file, and their memory."""

    offset: int
    memory_from: int
    size: int


class FileWindows:
    """Windows of a file during one step.

    NOTE: no two windows share a block of the file, so one can be read while the previous one is
    written. A window's memory is read into again only after it was written.

    Args:
        windows: the windows of the step; tensors outside the file are used in place.
        rooms: memory of one window each, at least :func:`windows_held` of them.
        stages: see :class:`FileStorage`.

    Attributes:
        read: bytes read from the file.
        written: bytes written to the file.
    """

    def __init__(
        self,
        file: StateFile,
        windows: Sequence[Window],
        rooms: Sequence[Tensor],
        timeline: StepTimeline,
        stages: bool,
    ) -> None:
        self._file, self._windows, self._rooms = file, windows, rooms
        self._timeline, self._stages = timeline, stages
        self._begun: list[tuple[Window, list[_Extent]]] = []
        self._reads: dict[int, list[Ticket]] = {}
        self._writes: dict[int, list[Ticket]] = {}
        self.read = self.written = 0

    def read_window(self, number: int) -> Window:
        last = min(number + AHEAD, len(self._windows) - 1)
        while len(self._begun) <= last:
            self._begin(len(self._begun))
        self._wait(self._reads.pop(number, ()))
        return self._begun[number][0]

    def write_window(self, number: int) -> None:
        memory, (_, extents) = self._room(number), self._begun[number]
        for piece in self._windows[number]:
            before_writing(piece.held.values())
        tickets = self._writes.setdefault(number, [])
        for extent in extents:
            part = memory[extent.memory_from :][: extent.size]
            tickets.append(self._file.file.write_from(part, extent.offset))
            self.written += extent.size

    def close_windows(self) -> None:
        under_way = [*self._reads.values(), *self._writes.values()]
        self._reads, self._writes = {}, {}
        self._wait(itertools.chain.from_iterable(under_way))

    def _begin(self, number: int) -> None:
        """Start to read a window, once what was there before is in the file."""
        self._wait(self._writes.pop(number - len(self._rooms), ()))
        memory = self._room(number)
        window, extents, used = _laid_out(self._windows[number], self._file, memory)
        if self._stages:
            window = _with_room(window, memory, used)
        self._begun.append((window, extents))
        self.read += sum(extent.size for extent in extents)
        tickets = self._reads.setdefault(number, [])
        for extent in extents:
            part = memory[extent.memory_from :][: extent.size]
            tickets.append(self._file.file.read_into(part, extent.offset))

    def _room(self, number: int) -> Tensor:
        return self._rooms[number % len(self._rooms)]

    def _wait(self, tickets: Iterable[Ticket]) -> None:
        """Wait for all transfers, then raise the first error."""
        failed = []
        with self._timeline.stage(WAIT_DISK):
            for ticket in tickets:
                try:
                    ticket.wait()
                except OSError as error:
                    failed.append(error)
        if failed:
            del failed[1:]
            raise failed.pop()  # a reference from this frame to its own error would be a cycle


def windows_held(lag: int) -> int:
    """Return the number of windows in host memory at a time: ``BEHIND`` are written, one is read,
    and ``lag`` are stepped or written back."""
    return AHEAD + 1 + lag + BEHIND


def _laid_out(window: Window, file: StateFile, memory: Tensor) -> tuple[Window, list[_Extent], int]:
    """Return the window with tensors in a room's memory, in the order of the file; the extents of
    the file; and the used bytes of the room.

    Args:
        window: pieces with tensors in the file.
        file: the state file.
        memory: memory of the room, 1-D uint8.
    """
    found = []
    for index, piece in enumerate(window):
        for key, tensor in piece.held.items():
            if (offset := file.offset_of(tensor)) is not None:
                found.append((offset, index, key, tensor))
    held = [dict(piece.held) for piece in window]
    extents: list[_Extent] = []
    used = 0
    for offset, index, key, tensor in sorted(found, key=lambda each: each[0]):
        held[index][key] = view_of(memory, used, (tensor.shape, tensor.dtype))
        size = blocks_bytes(tensor.nbytes)
        if extents and extents[-1].offset + extents[-1].size == offset:
            extents[-1].size += size
        else:
            extents.append(_Extent(offset, used, size))
        used += size
    pairs = zip(window, held, strict=True)
    return [replace(piece, held=tensors) for piece, tensors in pairs], extents, used


def _with_room(window: Window, memory: Tensor, used: int) -> Window:
    """Return the window with memory for gradients and outputs, behind the used bytes."""
    pieces = []
    for piece in window:
        along = {}
        for key, each in piece.along.items():
            along[key] = view_of(memory, used, (each.shape, each.dtype))
            used += aligned_bytes(each.numel(), each.dtype)
        pieces.append(replace(piece, along=along))
    return pieces


class FileStorage:
    """Main params and state in a file.

    Args:
        stages: True if a window's memory has room for its gradients and outputs.
    """

    form = WindowForm(DISK_BLOCK)

    def __init__(
        self, file: StateFile, transfer: Transfer, pin: bool, timeline: StepTimeline, stages: bool
    ) -> None:
        self.file, self._transfer, self._pin, self._timeline = file, transfer, pin, timeline
        self._stages = stages
        self._sizes: list[int] = []
        self._memory: Tensor | None = None

    def window_sizes(self, sizes: Sequence[int], smallest: int, most: int, lag: int) -> list[int]:
        """Return window sizes within ``most``; together about all state, if that is less."""
        count = windows_held(lag)
        share = -(-sum(sizes) // count)
        wanted = blocks_bytes(max(share, smallest, DISK_BLOCK))
        return [min(most // DISK_BLOCK * DISK_BLOCK, wanted)] * count

    def host_bytes(self, sizes: Sequence[int]) -> tuple[int, ...]:
        """Return the bytes of all windows, with room to align the first one to a block."""
        return (sum(sizes) + DISK_BLOCK,)

    @property
    def allocated(self) -> int:
        """Bytes of host memory that windows take now."""
        return 0 if self._memory is None else self._memory.nbytes

    def resize(self, sizes: Sequence[int]) -> None:
        if list(sizes) != self._sizes:
            self._memory = None
            self._sizes = list(sizes)  # assign last, so that after a signal the work is repeated

    def _rooms(self) -> list[Tensor]:
        """Return memory for each window, kept between steps."""
        if self._memory is None:
            (size,) = self.host_bytes(self._sizes)
            self._memory = self._transfer.empty_host(size, self._pin)
        begin = -self._memory.data_ptr() % DISK_BLOCK
        return list(torch.split(self._memory[begin:][: sum(self._sizes)], self._sizes))

    def open_windows(self, windows: Sequence[Window]) -> FileWindows:
        self.file.check_owner()
        self.file.settle()
        return FileWindows(self.file, windows, self._rooms(), self._timeline, self._stages)


Storage = MemoryStorage | FileStorage
OpenWindows = MemoryStorage | FileWindows
