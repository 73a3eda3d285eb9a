"""What stands in for the part of the CUDA runtime that locks pages: the kernel locks them."""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from unittest import mock

import torch

_libc = ctypes.CDLL(None, use_errno=True)


class LockingRuntime:
    """``torch.cuda.cudart()``.

    Attributes:
        registered: bytes by address, of what is.
        calls: what was asked for, in order: (what, address, current device).
        status: what calls return; they do nothing unless it is 0.
        is_capturing: whether the current stream records a CUDA graph, in which nothing may be
            called.
    """

    def __init__(self) -> None:
        self.registered: dict[int, int] = {}
        self.calls: list[tuple[str, int, int]] = []
        self.status = 0
        self.device = 0
        self.is_capturing = False

    def _call(self, what: str, address: int) -> int:
        assert not self.is_capturing
        self.calls.append((what, address, self.device))
        return self.status

    def cudaHostRegister(self, address: int, num_bytes: int, flags: int) -> int:
        if not self._call("register", address):
            assert flags == 0 and address % mmap.PAGESIZE == 0
            pointer, size = ctypes.c_void_p(address), ctypes.c_size_t(num_bytes)
            assert _libc.mlock(pointer, size) == 0
            self.registered[address] = num_bytes
        return self.status

    def cudaHostUnregister(self, address: int) -> int:
        if not self._call("unregister", address):
            size = self.registered.pop(address)
            # fails for what is not mapped any more
            assert _libc.munlock(ctypes.c_void_p(address), ctypes.c_size_t(size + 1)) == 0
        return self.status

    def cudaGetErrorString(self, status: int) -> str:
        return f"error {status}"

    def synchronize(self) -> None:
        self._call("synchronize", 0)


class _CurrentDevice:
    """``torch.cuda.device``."""

    def __init__(self, runtime: LockingRuntime, device: torch.device) -> None:
        self._runtime, self._index = runtime, device.index

    def __enter__(self) -> None:
        self._before, self._runtime.device = self._runtime.device, self._index

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._runtime.device = self._before


@contextmanager
def locking_runtime() -> Iterator[LockingRuntime]:
    """Have the kernel lock pages in place of CUDA."""
    runtime = LockingRuntime()
    with (
        mock.patch.object(torch.cuda, "cudart", lambda: runtime),
        mock.patch.object(torch.cuda, "synchronize", runtime.synchronize),
        mock.patch.object(torch.cuda, "is_current_stream_capturing", lambda: runtime.is_capturing),
        mock.patch.object(torch.cuda, "device", lambda place: _CurrentDevice(runtime, place)),
    ):
        yield runtime


def can_lock(num_bytes: int) -> bool:
    """Whether this process may lock so many bytes."""
    memory = mmap.mmap(-1, num_bytes)
    first = ctypes.c_char.from_buffer(memory)
    return bool(_libc.mlock(ctypes.byref(first), ctypes.c_size_t(num_bytes)) == 0)


def locked_bytes() -> int:
    """Bytes that this process has locked."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmLck:"):
            return int(line.split()[1]) << 10
    raise AssertionError("the kernel does not say")


def is_mapped(address: int) -> bool:
    """Whether this process has memory there."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        first, last = (int(number, 16) for number in line.split()[0].split("-"))
        if first <= address < last:
            return True
    return False
