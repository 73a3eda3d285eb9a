"""A file that stores main params and state. Their tensors are pieces of a mapping of the file,
which any code may read and write between steps. A step reads and writes windows past the page
cache.

The file is not a checkpoint: it has no name, and is freed with the process.
"""

from __future__ import annotations

import mmap
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from mp_optim.host.calls import in_own_modes
from mp_optim.host.direct_file import DISK_BLOCK, DirectFile, Ticket
from mp_optim.host.host_memory import TensorSpec, tensor_in

SETTLED_EVERY = 256 << 20
"""Bytes after which what was written to new tensors is brought to the disk."""


def blocks_bytes(num_bytes: int) -> int:
    """Return the bytes of a tensor in the file: whole blocks, so that no two tensors share one."""
    return -(-num_bytes // DISK_BLOCK) * DISK_BLOCK


@dataclass
class _Segment:
    """A mapped part of the file.

    Attributes:
        begin: its offset in the file. used: bytes of it that were handed out.
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
        """The next tensors."""
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
        """The caller gets tensors, and may write to them.

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

    def read_into(self, memory: Tensor, offset: int) -> Ticket:
        """See :meth:`~mp_optim.host.direct_file.DirectFile.read_into`."""
        return self.file.read_into(memory, offset)

    def write_from(self, memory: Tensor, offset: int) -> Ticket:
        """See :meth:`~mp_optim.host.direct_file.DirectFile.write_from`."""
        return self.file.write_from(memory, offset)

    def notes(self) -> tuple[str, ...]:
        """Return notes for the user about the folder."""
        if self._file is None or self._file.direct:
            return ()
        return (f"optimizer_state_path: {self._file.why}; state goes through the page cache",)
