"""Host memory for what is read and written in every step: on huge pages, and small tensors side by
side.

A step streams through gigabytes. With pages of 4 KiB the processor looks up an address every 1,024
FP32 values and its prefetchers stop at each page's end; with 2 MiB they rarely do.
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import math
import mmap
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from mp_optim.process.torch_modes import in_own_modes

Form = tuple[torch.Size, torch.dtype]
"""What a tensor is to be."""

ALIGNMENT = 64
"""Bytes: a cache line, and what wide vector loads like."""
HUGE_FROM = 4 << 20
"""Bytes from which memory is asked for in huge pages, of 2 MiB each."""


def aligned_bytes(numel: int, dtype: torch.dtype) -> int:
    """Bytes that ``numel`` elements take beside others."""
    return math.ceil(numel * dtype.itemsize / ALIGNMENT) * ALIGNMENT


@in_own_modes
def zeros_host(num_bytes: int) -> Tensor:
    """A 1-D uint8 tensor of pageable, zeroed host memory, in huge pages where they pay and the
    system has them."""
    if num_bytes < HUGE_FROM or not hasattr(mmap, "MADV_HUGEPAGE"):
        return torch.zeros(num_bytes, dtype=torch.uint8, device="cpu")
    memory, start = mapped(num_bytes)
    return torch.frombuffer(memory, dtype=torch.uint8, count=num_bytes, offset=start)


def mapped(num_bytes: int, alignment: int = 1) -> tuple[mmap.mmap, int]:
    """Zeroed memory of its own, in huge pages where the system has them, and the byte of it from
    which so many are for use."""
    offset = next(_allocations) * _STAGGER % _HUGE_PAGE
    offset -= offset % alignment
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    # NOTE: the system maps where it likes; address space up to a huge page's start costs no memory
    memory = mmap.mmap(-1, _HUGE_PAGE + offset + num_bytes, flags=flags)
    first = -ctypes.addressof(ctypes.c_char.from_buffer(memory)) % _HUGE_PAGE
    with contextlib.suppress(OSError):  # a kernel without them
        memory.madvise(mmap.MADV_HUGEPAGE, first, offset + num_bytes)
    return memory, first + offset


_HUGE_PAGE = 2 << 20
_STAGGER = 17 * 1024 + ALIGNMENT
"""Bytes by which allocations start later in a huge page than the one before: streams that run side
by side at the same offsets of their pages meet in the same cache sets and memory banks."""
_allocations = itertools.count()


def touch(memory: Tensor) -> None:
    """Have the system give all pages of 1-D uint8 memory now, not when they are first used.

    One write a page, in pieces that torch does not share among threads.
    """
    for piece in torch.split(memory, _TOUCHED_AT_ONCE):
        piece[::_PAGE].zero_()


_PAGE = 4096
_TOUCHED_AT_ONCE = 64 << 20


def as_tensor(value: Any) -> Tensor:
    """A tensor itself, where it lies; a number, or several, as a tensor on the host.

    ``torch.as_tensor`` would move both to the default device.
    """
    if isinstance(value, Tensor):
        return value
    return torch.tensor(
        value, dtype=torch.float32 if isinstance(value, float) else None, device="cpu"
    )


def is_on_host(tensor: Tensor) -> bool:
    """Whether the host reads a tensor's memory as it is."""
    return tensor.device.type == "cpu"


def empty_host_tensor() -> Tensor:
    """A tensor of no elements, where one has to stand."""
    return torch.zeros(0, dtype=torch.float32, device="cpu")


@in_own_modes
def zeros(shape: torch.Size, dtype: torch.dtype, device: torch.device) -> Tensor:
    """A contiguous tensor of zeros that will be stepped through."""
    if device.type != "cpu" or shape.numel() * dtype.itemsize < HUGE_FROM:
        return torch.zeros(shape, dtype=dtype, device=device)
    return zeros_host(shape.numel() * dtype.itemsize).view(dtype).view(shape)


def cut(memory: Tensor, start: int, shape: torch.Size, dtype: torch.dtype) -> Tensor:
    """A contiguous tensor in a piece of 1-D uint8 memory.

    It has a storage of its own over that piece, which keeps all of the memory alive; so
    ``torch.save`` writes its bytes and no others, and takes neighbours of another dtype. And a
    version counter: a write to one is no write to all.
    """
    if memory.device.type == "meta":
        return torch.empty(shape, dtype=dtype, device="meta")
    storage = memory.untyped_storage()
    first = memory.storage_offset() + start
    piece = storage[first : first + shape.numel() * dtype.itemsize]
    tensor = torch.empty(0, dtype=dtype, device=memory.device)
    return tensor.set_(piece, 0, shape, _contiguous_strides(shape))


def _contiguous_strides(shape: torch.Size) -> tuple[int, ...]:
    strides, size = [], 1
    for extent in reversed(shape):
        strides.append(size)
        size *= max(extent, 1)
    return tuple(reversed(strides))


class Block:
    """Host memory that tensors are cut from, one after the other, each once.

    Args:
        num_bytes: how many there are.
        allocate: returns so many bytes as a 1-D uint8 tensor; called when the first tensor is cut.
    """

    def __init__(
        self, num_bytes: int, allocate: Callable[[int], Tensor] = zeros_host
    ) -> None:
        self.capacity = num_bytes
        self._allocate = allocate
        self._memory: Tensor | None = None
        self._used = 0

    @property
    def left(self) -> int:
        """Bytes not handed out yet."""
        return self.capacity - self._used

    def with_room(self, num_bytes: int) -> Block:
        """This block if so many bytes are left, else a new one of that size."""
        return self if num_bytes <= self.left else Block(num_bytes, self._allocate)

    @in_own_modes
    def take(self, shape: torch.Size, dtype: torch.dtype) -> Tensor:
        """The next contiguous tensor, with the values that ``allocate`` left there.

        Raises:
            ValueError: there is not enough left.
        """
        size = aligned_bytes(shape.numel(), dtype)
        if size > self.left:
            raise ValueError(f"{size} bytes asked for, {self.left} left")
        if self._memory is None:
            self._memory = self._allocate(self.capacity)
        tensor = cut(self._memory, self._used, shape, dtype)
        self._used += size
        return tensor

    def reset(self) -> None:
        """Hand everything out again. The caller makes sure that what was taken is not used."""
        self._used = 0


def zeros_beside(
    forms: Sequence[Form], allocate: Callable[[int], Tensor]
) -> list[Tensor]:
    """Zeroed tensors in one piece of memory, which ``allocate`` returns."""
    size = sum(aligned_bytes(shape.numel(), dtype) for shape, dtype in forms)
    block = Block(size, allocate)
    return [block.take(shape, dtype).zero_() for shape, dtype in forms]


def beside(forms: Sequence[Form]) -> list[Tensor] | None:
    """Zeroed host tensors that lie one after the other, for many that are stepped together; None if
    all of them are too little to be worth it."""
    size = sum(aligned_bytes(shape.numel(), dtype) for shape, dtype in forms)
    if size < HUGE_FROM or len(forms) < 2:
        return None
    block = Block(size)
    return [block.take(shape, dtype) for shape, dtype in forms]
