"""Storages of main params and state between steps: host memory, or a file.

``open_windows`` begins the windows of a step, one step at a time. ``read_window`` returns a window
whose tensors are in host memory. ``write_window`` starts to store the window; the caller must not
write to the window's memory after this call. ``close_windows`` waits until all windows are stored.
``window_sizes`` returns the bytes of each window that is in memory at a time. Its arguments are the
sizes of slots, the bytes of the largest tensor that cannot be cut (``smallest``), and the number of
windows in use (``lag``).

Windows of a file are read ahead and written behind. Tensors of a :class:`StateFile` are pieces of a
mapping of the file, which any code may read and write between steps. A step reads and writes
windows past the page cache. The file is not a checkpoint: it has no name, and is freed with the
process.
"""

from __future__ import annotations

import itertools
import mmap
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from mp_optim.config.state_forms import BLOCK, packed_bytes
from mp_optim.core.slot_state import is_scale
from mp_optim.host.calls import in_own_modes
from mp_optim.host.direct_file import DISK_BLOCK, DirectFile, Ticket
from mp_optim.host.host_memory import ALIGNMENT, TensorSpec, aligned_bytes, tensor_in
from mp_optim.host.leases import before_writing
from mp_optim.host.transfer import Transfer
from mp_optim.kernels.codecs import is_packed
from mp_optim.offload.buckets import WAIT_DISK, StepTimeline

GRAD, OUTPUT = "grad", "output"
IN_FLIGHT = 3
"""Windows on the device: one is copied up, one is stepped, and one is copied down."""
SMALLEST_WINDOW = 4096
"""Smallest size of a window in bytes: 256 elements with state of any format fit into this size."""

Tensors = Mapping[str, Tensor]
"""Tensors of some elements by key: the main param under ``MAIN``, and state under its keys. A
gradient and an output that are copied with them are under ``GRAD`` and ``OUTPUT``."""
FLUSHED_EVERY = 256 << 20
"""Bytes of new tensors after which their values are written to the disk."""


def blocks_bytes(num_bytes: int) -> int:
    """Round the bytes of a tensor up to whole blocks of the file, so that no block belongs to two
    tensors."""
    return -(-num_bytes // DISK_BLOCK) * DISK_BLOCK


@dataclass(frozen=True, slots=True)
class Piece:
    """Some elements of one tensor of a launch.

    Attributes:
        launch: index of the launch in the step.
        index: index of the tensor in the launch's lists.
        start: first element.
        count: number of elements.
        is_whole: True if the piece has all elements of the tensor.
        held: state of these elements, and their main param unless it is stepped in place.
        along: gradient and output of these elements, if they are copied with the window.
        num_bytes: bytes in the window.
    """

    launch: int
    index: int
    start: int
    count: int
    is_whole: bool
    held: Tensors
    along: Tensors
    num_bytes: int


Window = list[Piece]


@dataclass(frozen=True)
class WindowForm:
    """The layout of tensors in a window, and the boundaries at which tensors are cut.

    Attributes:
        unit: alignment of main params and state in bytes: a cache line in memory, or a block in a
            file, so that neighbours are one transfer.
    """

    unit: int = ALIGNMENT

    def forms_bytes(self, forms: Iterable[TensorSpec]) -> int:
        """Return the bytes of tensors with these shapes and dtypes."""
        sizes = (shape.numel() * dtype.itemsize for shape, dtype in forms)
        return sum(-(-size // self.unit) * self.unit for size in sizes)

    def bytes_of(self, held: Tensors, along: Tensors) -> int:
        """Return the bytes of these tensors in a window: state and main params, and gradients
        and outputs."""
        size = self.forms_bytes((each.shape, each.dtype) for each in held.values())
        return size + sum(aligned_bytes(each.numel(), each.dtype) for each in along.values())

    def cuts(self, dtypes: Mapping[str, torch.dtype]) -> tuple[int, int]:
        """Return the number of elements in the smallest piece of a tensor, and the bytes of this
        piece. A tensor is cut only at multiples of this number.

        In a file a piece fills whole blocks for each dtype. The dtypes may be empty for a parameter
        that is stepped in place.
        """
        sizes = []  # Bytes of 256 elements of each tensor.
        for key, dtype in dtypes.items():
            if is_scale(key):
                sizes.append(dtype.itemsize)
            else:
                sizes.append(
                    packed_bytes(BLOCK) if is_packed(key, dtype) else dtype.itemsize * BLOCK
                )
        count = max(1, self.unit // min(sizes, default=self.unit)) if self.unit > ALIGNMENT else 1
        return count * BLOCK, count * sum(sizes)


def view_of(memory: Tensor, start: int, form: TensorSpec) -> Tensor:
    """Return a contiguous tensor that shares 1-D uint8 memory.

    Args:
        memory: 1-D uint8 tensor.
        start: first byte of the tensor in the memory.
        form: shape and dtype of the tensor.
    """
    shape, dtype = form
    size = shape.numel() * dtype.itemsize
    return memory[start : start + size].view(dtype).view(shape)


@dataclass
class _Segment:
    """Bytes of the file that are mapped into memory.

    Attributes:
        begin: offset of the first byte in the file.
        used: number of bytes in use.
    """

    begin: int
    mapping: mmap.mmap
    memory: Tensor
    used: int = 0


class StateFile:
    """A file on a local disk from which tensors are cut one after the other, each once.

    NOTE: the file is accessed in two ways: tensors are in a mapping of the file, and a step also
    transfers bytes directly, past the page cache. Linux keeps both consistent unless both use a
    page at the same time. Therefore :meth:`flush_mapping` first writes the changed pages and drops
    them. Direct transfers happen only within ``step()``, after that call, and no other code may use
    the tensors meanwhile.

    Args:
        folder: the folder in which the first :meth:`reserve` makes the file.
        is_planned: True for a model on the meta device: no file is made, and tensors are meta
            tensors.

    Attributes:
        capacity: bytes allocated on the disk.
        is_exposed: True if a caller may have written to tensors of the file.
    """

    def __init__(self, folder: str | Path, is_planned: bool = False) -> None:
        self.folder = Path(folder)
        self.capacity = 0
        self._is_planned = is_planned
        self._file: DirectFile | None = None
        self._segments: list[_Segment] = []
        self._unwritten, self.is_exposed = 0, False

    @property
    def file(self) -> DirectFile:
        # reserve() is always called before the first use of the file.
        assert self._file is not None
        return self._file

    def reserve(self, num_bytes: int) -> None:
        """Allocate ``num_bytes`` on the disk in total.

        Raises:
            OSError: the disk has too little space; the message has the path and the remedy.
        """
        unit = mmap.ALLOCATIONGRANULARITY  # Offsets of mappings must be multiples of this unit.
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
        """Return a contiguous tensor of zeros from the unused bytes of the file.

        Raises:
            OSError: the disk has too little space beyond the reserved bytes.
        """
        if self._is_planned:
            return torch.empty(shape, dtype=dtype, device="meta")
        size = blocks_bytes(shape.numel() * dtype.itemsize)
        if self._unwritten + size > FLUSHED_EVERY:
            self.flush_mapping()
        with_room = (each for each in self._segments if size <= each.memory.numel() - each.used)
        segment = next(with_room, None)
        if segment is None:
            self.reserve(self.capacity + max(size, 1))
            segment = self._segments[-1]
        tensor = tensor_in(segment.memory, segment.used, shape, dtype)
        segment.used += size
        self._unwritten += size
        return tensor

    def zeros(self, forms: Sequence[TensorSpec]) -> list[Tensor]:
        """Return one tensor of zeros from the file for each shape and dtype."""
        return [self.take(shape, dtype) for shape, dtype in forms]

    def offset_of(self, tensor: Tensor) -> int | None:
        """Return the offset of a contiguous tensor in the file; None if the tensor is stored
        elsewhere, or is empty."""
        for segment in self._segments if tensor.nbytes else ():
            inside = tensor.data_ptr() - segment.memory.data_ptr()
            if 0 <= inside <= segment.memory.numel() - tensor.nbytes:
                return segment.begin + inside
        return None

    # -- the mapping, and transfers past it -------------------------------------------------------

    def check_owner(self) -> None:
        """Raise RuntimeError if this process is a forked child, because the file changes with the
        steps of the parent."""
        if self._file is not None:
            self._file.check_owner()

    def flush_mapping(self) -> None:
        """Write changed tensors of the mapping to the disk, and drop the pages of the file from
        memory.

        Raises:
            OSError: writing failed; the message has the path and the remedy.
        """
        if not (self.is_exposed or self._unwritten) or self._file is None:
            return
        with self._file.explained("writing"):
            for segment in self._segments:
                segment.mapping.flush()
                if hasattr(mmap, "MADV_DONTNEED"):
                    segment.mapping.madvise(mmap.MADV_DONTNEED)
        self._file.forget_cache()
        self._unwritten, self.is_exposed = 0, False

    def notes(self) -> tuple[str, ...]:
        """Return notes for ``describe()``, if the folder's file system has no direct transfers."""
        if self._file is None or self._file.direct:
            return ()
        return (f"optimizer_state_path: {self._file.why}; state goes through the page cache",)


# -- windows of a step ----------------------------------------------------------------------------

AHEAD, BEHIND = 1, 2
"""Number of windows that are read before they are needed, and number of windows that may still
be written."""


class MemoryStorage:
    """Main params and state in host memory. A window consists of views of these tensors."""

    form = WindowForm()
    read = written = allocated = 0
    _windows: Sequence[Window] = ()

    def window_sizes(self, sizes: Sequence[int], smallest: int, most: int, lag: int) -> list[int]:
        """Return window sizes of at most ``most`` bytes. If all state is smaller than a window,
        one window has all of it."""
        total = sum(sizes)
        if total <= most:
            return [total]
        third = -(-total // (IN_FLIGHT * ALIGNMENT)) * ALIGNMENT
        return [min(most, max(third, smallest, SMALLEST_WINDOW))] * IN_FLIGHT

    def host_bytes(self, sizes: Sequence[int]) -> tuple[int, ...]:
        return ()

    def open_windows(self, windows: Sequence[Window], sizes: Sequence[int]) -> MemoryStorage:
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
    """Neighbouring blocks of the file, and their position in the memory of a window."""

    offset: int
    memory_from: int
    size: int


class FileWindows:
    """Windows of a file during one step.

    NOTE: no two windows share a block of the file, so one window can be read while the previous one
    is written. The memory of a window takes another window only after the first window was written
    to the file.

    Args:
        windows: the windows of the step; tensors outside the file are used in place.
        buffers: memory of one window each, in turn.
        stages: True if a window's memory has space for its gradients and outputs.

    Attributes:
        read: bytes read from the file.
        written: bytes written to the file.
    """

    def __init__(
        self,
        file: StateFile,
        windows: Sequence[Window],
        buffers: Sequence[Tensor],
        timeline: StepTimeline,
        stages: bool,
    ) -> None:
        self._file, self._windows, self._buffers = file, windows, buffers
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
        memory, (_, extents) = self._buffers[number % len(self._buffers)], self._begun[number]
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
        """Start to read a window into its memory, in the order of the file. First wait until the
        previous window in this memory was written to the file."""
        self._wait(self._writes.pop(number - len(self._buffers), ()))
        memory, window = self._buffers[number % len(self._buffers)], self._windows[number]
        found = []
        for index, piece in enumerate(window):
            for key, tensor in piece.held.items():
                if (offset := self._file.offset_of(tensor)) is not None:
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
        laid_out = []
        for piece, tensors in zip(window, held, strict=True):
            along = dict(piece.along)
            # Gradients and outputs follow the tensors of the file.
            for key, each in piece.along.items() if self._stages else ():
                along[key] = view_of(memory, used, (each.shape, each.dtype))
                used += aligned_bytes(each.numel(), each.dtype)
            laid_out.append(replace(piece, held=tensors, along=along))
        self._begun.append((laid_out, extents))
        self.read += sum(extent.size for extent in extents)
        tickets = self._reads.setdefault(number, [])
        for extent in extents:
            part = memory[extent.memory_from :][: extent.size]
            tickets.append(self._file.file.read_into(part, extent.offset))

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
            # Drop the list's reference: a reference from this frame to its own error would be a
            # cycle.
            raise failed.pop()


class FileStorage:
    """Main params and state in a file.

    Args:
        file: the state file.
        transfer: the transfer that allocates the host memory of windows.
        pin: True to page-lock this memory.
        timeline: record of the time of waits for the disk.
        stages: True if a window's memory has space for its gradients and outputs.
    """

    form = WindowForm(DISK_BLOCK)

    def __init__(
        self, file: StateFile, transfer: Transfer, pin: bool, timeline: StepTimeline, stages: bool
    ) -> None:
        self.file, self._transfer, self._pin, self._timeline = file, transfer, pin, timeline
        self._stages = stages
        self._memory: Tensor | None = None

    def window_sizes(self, sizes: Sequence[int], smallest: int, most: int, lag: int) -> list[int]:
        """Return equal window sizes of at most ``most`` bytes. If all state is smaller, the
        windows together have about its size."""
        # Count the windows in memory at a time: AHEAD + 1 are read, ``lag`` are stepped or copied
        # back, and BEHIND are written to the file.
        count = AHEAD + 1 + lag + BEHIND
        share = -(-sum(sizes) // count)
        wanted = blocks_bytes(max(share, smallest, DISK_BLOCK))
        return [min(most // DISK_BLOCK * DISK_BLOCK, wanted)] * count

    def host_bytes(self, sizes: Sequence[int]) -> tuple[int, ...]:
        """Return the bytes of all windows, with additional bytes to align the first window to a
        block."""
        return (sum(sizes) + DISK_BLOCK,)

    @property
    def allocated(self) -> int:
        """Bytes of host memory that are allocated for windows now."""
        return 0 if self._memory is None else self._memory.nbytes

    def open_windows(self, windows: Sequence[Window], sizes: Sequence[int]) -> FileWindows:
        self.file.check_owner()
        self.file.flush_mapping()
        if self._memory is None:  # Keep the memory for all later steps.
            (size,) = self.host_bytes(sizes)
            self._memory = self._transfer.empty_host(size, self._pin)
        begin = -self._memory.data_ptr() % DISK_BLOCK
        buffers = torch.split(self._memory[begin:][: sum(sizes)], list(sizes))
        return FileWindows(self.file, windows, buffers, self._timeline, self._stages)


Storage = MemoryStorage | FileStorage
OpenWindows = MemoryStorage | FileWindows
