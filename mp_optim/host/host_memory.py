"""Host memory for tensors that every step reads and writes: on huge pages, contiguous for small
tensors, and page-locked if a GPU copies the tensors.

A step reads gigabytes. With pages of 4 KiB the processor translates an address every 1,024 FP32
values, and its prefetchers stop at the end of each page. With pages of 2 MiB both are rare.
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
"""Alignment of tensors in bytes: the size of a cache line."""
HUGE_FROM = 4 << 20
"""Smallest allocation in bytes that uses huge pages of 2 MiB."""


def aligned_bytes(numel: int, dtype: torch.dtype) -> int:
    """Return the size in bytes of ``numel`` elements, rounded up to :data:`ALIGNMENT`."""
    return math.ceil(numel * dtype.itemsize / ALIGNMENT) * ALIGNMENT


@in_own_modes
def zeros_host(num_bytes: int) -> Tensor:
    """Return pageable host memory of zeros as a uint8 tensor, shape (num_bytes,).

    From :data:`HUGE_FROM` bytes on, the memory has huge pages if the system supports them.
    """
    if num_bytes < HUGE_FROM or not hasattr(mmap, "MADV_HUGEPAGE"):
        return torch.zeros(num_bytes, dtype=torch.uint8, device="cpu")
    memory, start = mapped(num_bytes)
    return torch.frombuffer(memory, dtype=torch.uint8, count=num_bytes, offset=start)


def mapped(num_bytes: int, alignment: int = 1) -> tuple[mmap.mmap, int]:
    """Map zeroed memory, with huge pages if the system supports huge pages.

    Returns:
        The mapping, and the offset of the first usable byte, a multiple of ``alignment``.
    """
    offset = next(_allocations) * _STAGGER % _HUGE_PAGE
    offset -= offset % alignment
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    # NOTE: mmap chooses the address. So map one huge page more, and skip the bytes before the first
    # multiple of 2 MiB. Address space that is not used costs no memory.
    memory = mmap.mmap(-1, _HUGE_PAGE + offset + num_bytes, flags=flags)
    first = -ctypes.addressof(ctypes.c_char.from_buffer(memory)) % _HUGE_PAGE
    # Ignore the error of Linux kernels without huge pages: small pages are slower, but correct.
    with contextlib.suppress(OSError):
        memory.madvise(mmap.MADV_HUGEPAGE, first, offset + num_bytes)
    return memory, first + offset


_HUGE_PAGE = 2 << 20
_STAGGER = 17 * 1024 + ALIGNMENT
"""Number of bytes by which the start of each allocation is shifted in its huge page, compared with
the previous allocation. Arrays at equal offsets in their pages would compete for cache sets and
memory banks."""
_allocations = itertools.count()


def touch(memory: Tensor) -> None:
    """Write one byte per page of 1-D uint8 memory, in as many threads as torch has, so that the
    operating system allocates the pages.

    Otherwise the runtime that page-locks the memory would allocate all pages in one thread. A piece
    is small enough that torch does not split the piece over threads.
    """
    pieces = [piece[::_PAGE] for piece in torch.split(memory, _TOUCHED_AT_ONCE)]
    if len(pieces) == 1:
        pieces[0].zero_()
        return
    with ThreadPoolExecutor(torch.get_num_threads()) as threads:
        list(threads.map(Tensor.zero_, pieces))


_PAGE = 4096
_TOUCHED_AT_ONCE = 64 << 20


def as_tensor(value: Any) -> Tensor:
    """Return a tensor unchanged, and a number or a list of numbers as a tensor on the host.

    ``torch.as_tensor`` would use the default device instead.
    """
    if isinstance(value, Tensor):
        return value
    return torch.tensor(
        value, dtype=torch.float32 if isinstance(value, float) else None, device="cpu"
    )


@in_own_modes
def zeros(shape: torch.Size, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return a contiguous tensor of zeros. Large host tensors have huge pages."""
    if device.type != "cpu" or shape.numel() * dtype.itemsize < HUGE_FROM:
        return torch.zeros(shape, dtype=dtype, device=device)
    return zeros_host(shape.numel() * dtype.itemsize).view(dtype).view(shape)


def tensor_in(memory: Tensor, start: int, shape: torch.Size, dtype: torch.dtype) -> Tensor:
    """Return a contiguous tensor over a part of 1-D uint8 memory.

    The tensor has a separate storage and version counter. So ``torch.save`` writes only this
    tensor's bytes, neighbors may have other dtypes, and a write increases no other tensor's
    version. The storage keeps the whole memory allocated.

    Args:
        memory: uint8 tensor.
        start: first byte of the part.
        shape: shape of the new tensor.
        dtype: dtype of the new tensor.
    """
    if memory.device.type == "meta":
        return torch.empty(shape, dtype=dtype, device="meta")
    storage = memory.untyped_storage()
    first = memory.storage_offset() + start
    piece = storage[first : first + shape.numel() * dtype.itemsize]
    tensor = torch.empty(0, dtype=dtype, device=memory.device)
    strides = torch.empty(shape, dtype=dtype, device="meta").stride()
    return tensor.set_(piece, 0, shape, strides)


class Block:
    """Host memory that is divided into tensors, one after the other.

    Args:
        num_bytes: size in bytes.
        allocate: function that returns a 1-D uint8 tensor of a given number of bytes. The first
            :meth:`take` calls this function.
    """

    def __init__(self, num_bytes: int, allocate: Callable[[int], Tensor] = zeros_host) -> None:
        self.capacity = num_bytes
        self._allocate = allocate
        self._memory: Tensor | None = None
        self._used = 0

    @property
    def allocated(self) -> int:
        """Number of allocated bytes: the capacity, or 0 before the first :meth:`take`."""
        return 0 if self._memory is None else self.capacity

    @property
    def left(self) -> int:
        """Number of bytes that are still free for :meth:`take`."""
        return self.capacity - self._used

    def with_room(self, num_bytes: int) -> Block:
        """Return this block if the block has ``num_bytes`` left, else a new block of that size."""
        return self if num_bytes <= self.left else Block(num_bytes, self._allocate)

    @in_own_modes
    def take(self, shape: torch.Size, dtype: torch.dtype) -> Tensor:
        """Return the next contiguous tensor of the block, with the values that ``allocate`` wrote.

        Raises:
            ValueError: the block has too few bytes left.
        """
        size = aligned_bytes(shape.numel(), dtype)
        if size > self.left:
            raise ValueError(
                f"num_bytes={size}: the block has {self.left} bytes left; use a larger block"
            )
        if self._memory is None:
            self._memory = self._allocate(self.capacity)
        tensor = tensor_in(self._memory, self._used, shape, dtype)
        self._used += size
        return tensor

    def reset(self) -> None:
        """Make all memory available again. The caller ensures that earlier tensors are not used any
        more."""
        self._used = 0


def allocate_contiguous(
    specs: Sequence[TensorSpec], allocate: Callable[[int], Tensor] = zeros_host
) -> list[Tensor]:
    """Return zeroed tensors in one contiguous allocation, for tensors that are stepped together.

    Args:
        specs: shape and dtype of each tensor.
        allocate: function that returns a 1-D uint8 tensor of zeros of a given number of bytes.
    """
    size = sum(aligned_bytes(shape.numel(), dtype) for shape, dtype in specs)
    block = Block(size, allocate)
    return [block.take(shape, dtype) for shape, dtype in specs]


# -- page-locked memory ---------------------------------------------------------------------------
#
# This module maps memory on huge pages and registers the memory with the device's runtime. torch's
# allocator of page-locked memory rounds each allocation up to a power of two and frees none: 32.6
# GiB of main params would take 64 GiB.

REGISTERED_FROM = 1 << 20
"""Smallest allocation in bytes that is registered with the device's runtime. torch's allocator
serves and caches smaller allocations."""
_SYSTEM_HAS_IT = hasattr(mmap, "MADV_HUGEPAGE") and hasattr(mmap, "MADV_DONTFORK")


class PageLockError(RuntimeError):
    """Memory could not be page-locked."""


def page_locked_bytes(num_bytes: int) -> int:
    """Return the bytes that a page-locked allocation occupies.

    Registered memory consists of whole pages. torch's allocator rounds up to a power of two.
    """
    if num_bytes < REGISTERED_FROM:
        return power_of_two(num_bytes)
    return -(-num_bytes // mmap.PAGESIZE) * mmap.PAGESIZE


def power_of_two(num_bytes: int) -> int:
    """Return the bytes that torch's page-locked allocator takes for ``num_bytes``."""
    return 1 << (num_bytes - 1).bit_length() if num_bytes else 0


@in_own_modes
def page_locked(num_bytes: int, device: torch.device) -> Tensor:
    """Return a 1-D uint8 tensor of zeros in page-locked memory, which the GPU ``device`` can copy.

    The memory is freed with the last tensor over it. A forked child does not have the memory,
    because the fork would copy all pages.

    NOTE: torch's allocator does not know this memory, so it does not wait for copies. The caller
    keeps source and destination of a copy alive until the copy is complete.

    Args:
        num_bytes: size in bytes, at least 1.
        device: device that copies the memory.

    Raises:
        PageLockError: the operating system, or one of its limits, refuses. No memory stays
            allocated.
    """
    if not _SYSTEM_HAS_IT:
        raise PageLockError("mmap of this system has no MADV_HUGEPAGE or MADV_DONTFORK")
    accelerator = accelerator_of(device)
    if accelerator is None:
        raise PageLockError(f"no runtime of device type {device.type!r} page-locks memory")
    while _dropped:
        _release(*_dropped.pop())
    memory, start = mapped(num_bytes, mmap.PAGESIZE)
    # Ignore the error of Linux kernels without MADV_DONTFORK: a fork then copies the pages.
    with contextlib.suppress(OSError):
        memory.madvise(mmap.MADV_DONTFORK)
    values = (ctypes.c_char * num_bytes).from_buffer(memory, start)
    address = ctypes.addressof(values)
    touch(torch.frombuffer(values, dtype=torch.uint8))
    try:
        with accelerator.on(device):
            refusal = accelerator.register(address, num_bytes)
    except (AssertionError, AttributeError, RuntimeError) as error:
        raise PageLockError(str(error).partition("\n")[0]) from error
    if refusal is not None:
        _forget_error(device)
        raise PageLockError(refusal)
    # NOTE: only _release may unmap the memory. A forked child may have other memory at this
    # address, so a child must not unmap. A copy may be running when the interpreter exits, so the
    # exit must not unmap either.
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(memory))
    owner = os.getpid()
    finalizer = weakref.finalize(values, _release, memory, address, accelerator, device, owner)
    finalizer.atexit = False
    return torch.frombuffer(values, dtype=torch.uint8)


_dropped: list[tuple[mmap.mmap, int, Accelerator, torch.device, int]] = []
"""Memory that was deleted during the capture of a CUDA graph. The next allocation frees it."""


def _release(
    memory: mmap.mmap, address: int, accelerator: Accelerator, device: torch.device, owner: int
) -> None:
    if os.getpid() != owner:
        return
    # Release the memory later, because synchronizing would end the capture of the CUDA graph.
    if accelerator.is_capturing():
        _dropped.append((memory, address, accelerator, device, owner))
        return
    with contextlib.suppress(AssertionError, RuntimeError), accelerator.on(device):
        # Wait, because the caller may have started a copy of this memory.
        accelerator.synchronize()
        if accelerator.unregister(address):
            ctypes.pythonapi.Py_DecRef(ctypes.py_object(memory))
        else:
            # Keep the memory mapped, because the runtime still has the memory registered.
            _forget_error(device)


def _forget_error(device: torch.device) -> None:
    """Clear the error of a failed runtime call, by launching an empty kernel.

    Otherwise torch would raise the error after its next kernel.
    """
    with contextlib.suppress(AssertionError, RuntimeError):
        torch.zeros(1, dtype=torch.float32, device=device)


# -- comparison of values -------------------------------------------------------------------------


def same_values(one: Tensor, other: Tensor) -> bool:
    """True if two tensors on one device have equal shapes and values. NaNs are equal, unlike in
    ``torch.equal``."""
    if torch.equal(one, other):
        return True
    if one.shape != other.shape:
        return False
    return bool(((one == other) | (one.isnan() & other.isnan())).all())
