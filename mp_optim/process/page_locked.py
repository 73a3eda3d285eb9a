"""Page-locked host memory of exact size: mapped on huge pages, then registered with CUDA.

torch's allocator of page-locked memory rounds every allocation up to a power of two and gives
nothing back: 32.6 GiB of main params take 64.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import weakref
from typing import Any

import torch
from torch import Tensor

from mp_optim.process.host_memory import mapped
from mp_optim.process.torch_modes import in_own_modes

REGISTERED_FROM = 1 << 20
"""Bytes from which an allocation is registered. Smaller ones are torch's, which keeps them for the
next."""
_SYSTEM_HAS_IT = hasattr(mmap, "MADV_HUGEPAGE") and hasattr(mmap, "MADV_DONTFORK")


class PageLockError(RuntimeError):
    """Why memory could not be registered."""


def page_locked_bytes(num_bytes: int) -> int:
    """Bytes that are taken for so many page-locked ones: whole pages if registered, as torch's
    allocator rounds if not."""
    if num_bytes < REGISTERED_FROM:
        return power_of_two(num_bytes)
    return -(-num_bytes // mmap.PAGESIZE) * mmap.PAGESIZE


def power_of_two(num_bytes: int) -> int:
    """What torch's allocator of page-locked memory takes for so many bytes."""
    return 1 << (num_bytes - 1).bit_length() if num_bytes else 0


@in_own_modes
def page_locked(num_bytes: int, device: torch.device) -> Tensor:
    """A 1-D uint8 tensor of zeroed memory that the GPU ``device`` copies from and to by itself.

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
    while _dropped:
        _release(*_dropped.pop())
    memory, start = mapped(num_bytes, mmap.PAGESIZE)
    with contextlib.suppress(OSError):  # a kernel without it
        memory.madvise(mmap.MADV_DONTFORK)
    values = (ctypes.c_char * num_bytes).from_buffer(memory, start)
    address = ctypes.addressof(values)
    _register(address, num_bytes, device)
    # NOTE: only _release unmaps it. In a forked child, where other memory may lie there, and when
    # the interpreter ends, where a copy may be under way, it stays as it is.
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(memory))
    finalizer = weakref.finalize(values, _release, memory, address, device, os.getpid())
    finalizer.atexit = False
    return torch.frombuffer(values, dtype=torch.uint8)


def _register(address: int, num_bytes: int, device: torch.device) -> None:
    try:
        with torch.cuda.device(device):
            runtime = _runtime()
            status = runtime.cudaHostRegister(address, num_bytes, 0)
    except (AssertionError, AttributeError, RuntimeError) as error:
        raise PageLockError(str(error).partition("\n")[0]) from error
    if int(status):
        _forget_error(device)
        raise PageLockError(f"cudaHostRegister: {runtime.cudaGetErrorString(status)}")


_dropped: list[tuple[mmap.mmap, int, torch.device, int]] = []
"""What was dropped while this thread captured a CUDA graph; the next allocation releases it."""


def _release(memory: mmap.mmap, address: int, device: torch.device, owner: int) -> None:
    if os.getpid() != owner:
        return
    if (
        torch.cuda.is_current_stream_capturing()
    ):  # which a wait for the device would end
        _dropped.append((memory, address, device, owner))
        return
    with contextlib.suppress(AssertionError, RuntimeError), torch.cuda.device(device):
        torch.cuda.synchronize()  # a caller may have started a copy of its own
        if int(_runtime().cudaHostUnregister(address)):
            _forget_error(device)  # and keep the memory
        else:
            ctypes.pythonapi.Py_DecRef(ctypes.py_object(memory))


def _runtime() -> Any:
    return torch.cuda.cudart()  # type: ignore[no-untyped-call]


def _forget_error(device: torch.device) -> None:
    """The runtime keeps the error of a failed call, and torch would raise it after its next kernel:
    have a kernel of no use raise it now."""
    with contextlib.suppress(AssertionError, RuntimeError):
        torch.zeros(1, dtype=torch.float32, device=device)
