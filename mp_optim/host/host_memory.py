"""Host memory for tensors that every step reads and writes: on huge pages, contiguous for small
tensors, page-locked if a GPU copies it.

A step streams through gigabytes. With pages of 4 KiB the processor looks up an address every 1,024
FP32 values and its prefetchers stop at each page's end; with 2 MiB they rarely do.
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import math
import mmap
import os
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor

from mp_optim.host.accelerator import Accelerator, accelerator_of
from mp_optim.host.calls import in_own_modes

TensorSpec = tuple[torch.Size, torch.dtype]
"""Shape and dtype of a tensor to allocate."""

ALIGNMENT = 64
"""Bytes of a cache line, to which tensors are aligned."""
HUGE_FROM = 4 << 20
"""Smallest allocation, in bytes, that uses huge pages of 2 MiB."""


def aligned_bytes(numel: int, dtype: torch.dtype) -> int:
    """Return the bytes of ``numel`` elements in a block."""
    return math.ceil(numel * dtype.itemsize / ALIGNMENT) * ALIGNMENT


@in_own_modes
def zeros_host(num_bytes: int) -> Tensor:
    """Return a 1-D uint8 tensor of pageable, zeroed host memory, in huge pages if they help and
    exist."""
    if num_bytes < HUGE_FROM or not hasattr(mmap, "MADV_HUGEPAGE"):
        return torch.zeros(num_bytes, dtype=torch.uint8, device="cpu")
    memory, start = mapped(num_bytes)
    return torch.frombuffer(memory, dtype=torch.uint8, count=num_bytes, offset=start)


def mapped(num_bytes: int, alignment: int = 1) -> tuple[mmap.mmap, int]:
    """Map zeroed memory, in huge pages if the system has them. Return the mapping, and the offset
    of its first usable byte."""
    offset = next(_allocations) * _STAGGER % _HUGE_PAGE
    offset -= offset % alignment
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    # NOTE: the system maps where it likes; address space up to a huge page's start costs no memory
    memory = mmap.mmap(-1, _HUGE_PAGE + offset + num_bytes, flags=flags)
    first = -ctypes.addressof(ctypes.c_char.from_buffer(memory)) % _HUGE_PAGE
    with contextlib.suppress(OSError):  # this Linux kernel has no such pages
        memory.madvise(mmap.MADV_HUGEPAGE, first, offset + num_bytes)
    return memory, first + offset


_HUGE_PAGE = 2 << 20
_STAGGER = 17 * 1024 + ALIGNMENT
"""Bytes by which each allocation starts later in a huge page than the previous one. Streams at
equal offsets of their pages would compete for cache sets and memory banks."""
_allocations = itertools.count()


def touch(memory: Tensor) -> None:
    """Have the system give all pages of 1-D uint8 memory now, not when they are first used.

    One write a page, in pieces that torch does not share among threads.
    """
    for piece in torch.split(memory, _TOUCHED_AT_ONCE):
        piece[::_PAGE].zero_()


def touch_together(memory: Tensor) -> None:
    """Touch all pages by as many threads as torch has. The runtime that locks pages would touch
    them one by one in the caller's thread."""
    pieces = torch.split(memory, _TOUCHED_AT_ONCE)
    if len(pieces) == 1:
        touch(memory)
        return
    with ThreadPoolExecutor(torch.get_num_threads()) as threads:
        list(threads.map(touch, pieces))


_PAGE = 4096
_TOUCHED_AT_ONCE = 64 << 20


def as_tensor(value: Any) -> Tensor:
    """Return a tensor unchanged, and a number or several as a tensor on the host.

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
    """Return a tensor without elements, as a placeholder."""
    return torch.zeros(0, dtype=torch.float32, device="cpu")


@in_own_modes
def zeros(shape: torch.Size, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return a contiguous tensor of zeros for state that is stepped."""
    if device.type != "cpu" or shape.numel() * dtype.itemsize < HUGE_FROM:
        return torch.zeros(shape, dtype=dtype, device=device)
    return zeros_host(shape.numel() * dtype.itemsize).view(dtype).view(shape)


def tensor_in(memory: Tensor, start: int, shape: torch.Size, dtype: torch.dtype) -> Tensor:
    """Return a contiguous tensor in a piece of 1-D uint8 memory.

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
    for length in reversed(shape):
        strides.append(size)
        size *= max(length, 1)
    return tuple(reversed(strides))


class Block:
    """Host memory from which tensors are cut one after the other, each once.

    Args:
        num_bytes: size in bytes.
        allocate: returns a 1-D uint8 tensor of a size in bytes; called for the first tensor.
    """

    def __init__(self, num_bytes: int, allocate: Callable[[int], Tensor] = zeros_host) -> None:
        self.capacity = num_bytes
        self._allocate = allocate
        self._memory: Tensor | None = None
        self._used = 0

    @property
    def allocated(self) -> int:
        """Bytes that are allocated: all, or none before the first tensor is cut."""
        return 0 if self._memory is None else self.capacity

    @property
    def left(self) -> int:
        """Bytes not handed out yet."""
        return self.capacity - self._used

    def with_room(self, num_bytes: int) -> Block:
        """Return this block if it has ``num_bytes`` left, else a new one of that size."""
        return self if num_bytes <= self.left else Block(num_bytes, self._allocate)

    @in_own_modes
    def take(self, shape: torch.Size, dtype: torch.dtype) -> Tensor:
        """Return the next contiguous tensor, with the values that ``allocate`` left there.

        Raises:
            ValueError: the block has too few bytes left.
        """
        size = aligned_bytes(shape.numel(), dtype)
        if size > self.left:
            raise ValueError(f"{size} bytes asked for, {self.left} left")
        if self._memory is None:
            self._memory = self._allocate(self.capacity)
        tensor = tensor_in(self._memory, self._used, shape, dtype)
        self._used += size
        return tensor

    def reset(self) -> None:
        """Make all memory available again. The caller ensures that no former tensor is used."""
        self._used = 0


def allocate_contiguous(
    specs: Sequence[TensorSpec], allocate: Callable[[int], Tensor] = zeros_host
) -> list[Tensor]:
    """Return zeroed tensors in one piece of memory, for tensors that are stepped together.

    Args:
        specs: shapes and dtypes.
        allocate: returns a 1-D uint8 tensor of zeros, of a size in bytes.
    """
    size = sum(aligned_bytes(shape.numel(), dtype) for shape, dtype in specs)
    block = Block(size, allocate)
    return [block.take(shape, dtype) for shape, dtype in specs]


# -- page-locked memory ---------------------------------------------------------------------------
#
# Of exact size: mapped on huge pages, then registered with the device's runtime. torch's allocator
# of page-locked memory rounds every allocation up to a power of two and gives nothing back: 32.6
# GiB of main params take 64.

REGISTERED_FROM = 1 << 20
"""Smallest allocation, in bytes, that is registered with the device. torch allocates smaller ones,
and caches them."""
_SYSTEM_HAS_IT = hasattr(mmap, "MADV_HUGEPAGE") and hasattr(mmap, "MADV_DONTFORK")


class PageLockError(RuntimeError):
    """Why memory could not be registered."""


def page_locked_bytes(num_bytes: int) -> int:
    """Return the bytes that a page-locked allocation takes: whole pages if it is registered, a
    power of two if torch allocates it."""
    if num_bytes < REGISTERED_FROM:
        return power_of_two(num_bytes)
    return -(-num_bytes // mmap.PAGESIZE) * mmap.PAGESIZE


def power_of_two(num_bytes: int) -> int:
    """Return the bytes that torch's page-locked allocator takes for ``num_bytes``."""
    return 1 << (num_bytes - 1).bit_length() if num_bytes else 0


@in_own_modes
def page_locked(num_bytes: int, device: torch.device) -> Tensor:
    """Return a 1-D uint8 tensor of zeroed memory that the GPU ``device`` can copy from and to.

    It is unregistered and unmapped when the last tensor over it goes. NOTE: torch's allocator waits
    for copies of its own memory and does not know this one; the owner of a copy keeps both ends of
    it. A forked child does not have the memory: its pages would otherwise be copied in the fork.

    Args:
        num_bytes: at least 1.

    Raises:
        PageLockError: the system, or a limit of it, does not allow it; nothing is left.
    """
    if not _SYSTEM_HAS_IT:
        raise PageLockError("this system cannot map memory for it")
    accelerator = accelerator_of(device)
    if accelerator is None:
        raise PageLockError(f"nothing here copies memory to {device.type} by itself")
    while _dropped:
        _release(*_dropped.pop())
    memory, start = mapped(num_bytes, mmap.PAGESIZE)
    with contextlib.suppress(OSError):  # this Linux kernel does not support it
        memory.madvise(mmap.MADV_DONTFORK)
    values = (ctypes.c_char * num_bytes).from_buffer(memory, start)
    address = ctypes.addressof(values)
    touch_together(torch.frombuffer(values, dtype=torch.uint8))
    _register(accelerator, address, num_bytes, device)
    # NOTE: only _release unmaps it. In a forked child, where other memory may be there, and when
    # the interpreter ends, where a copy may be under way, it stays as it is.
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(memory))
    owner = os.getpid()
    finalizer = weakref.finalize(values, _release, memory, address, accelerator, device, owner)
    finalizer.atexit = False
    return torch.frombuffer(values, dtype=torch.uint8)


def _register(accelerator: Accelerator, address: int, num_bytes: int, device: torch.device) -> None:
    try:
        with accelerator.on(device):
            refusal = accelerator.register(address, num_bytes)
    except (AssertionError, AttributeError, RuntimeError) as error:
        raise PageLockError(str(error).partition("\n")[0]) from error
    if refusal is not None:
        _forget_error(device)
        raise PageLockError(refusal)


_dropped: list[tuple[mmap.mmap, int, Accelerator, torch.device, int]] = []
"""Memory that was dropped while the caller captured a CUDA graph; the next allocation releases
it."""


def _release(
    memory: mmap.mmap, address: int, accelerator: Accelerator, device: torch.device, owner: int
) -> None:
    if os.getpid() != owner:
        return
    if accelerator.is_capturing():  # synchronizing would end a capture
        _dropped.append((memory, address, accelerator, device, owner))
        return
    with contextlib.suppress(AssertionError, RuntimeError), accelerator.on(device):
        accelerator.synchronize()  # a caller may have started its own copy
        if accelerator.unregister(address):
            ctypes.pythonapi.Py_DecRef(ctypes.py_object(memory))
        else:
            _forget_error(device)  # keep the memory if the wait fails


def _forget_error(device: torch.device) -> None:
    """Clear the error of a failed runtime call. torch would raise it after its next kernel, so an
    empty kernel is launched here."""
    with contextlib.suppress(AssertionError, RuntimeError):
        torch.zeros(1, dtype=torch.float32, device=device)


# -- values ---------------------------------------------------------------------------------------


def same_values(one: Tensor, other: Tensor) -> bool:
    """True if two tensors of one device have the same shape and values. All NaNs are equal here,
    unlike in ``torch.equal``."""
    if torch.equal(one, other):
        return True
    if one.shape != other.shape:
        return False
    return bool(((one == other) | (one.isnan() & other.isnan())).all())
