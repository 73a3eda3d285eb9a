"""A stand-in for the part of the CUDA runtime that locks pages."""

import ctypes
import mmap
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from mp_optim.host.accelerator import KINDS, Accelerator

_libc = ctypes.CDLL(None, use_errno=True)


class LockingRuntime:
    """A stand-in for ``torch.cuda.cudart()``.

    Attributes:
        registered: size in bytes by address.
        calls: (function, address, current device), in order.
        status: result of all calls; the calls do nothing unless it is 0.
        is_capturing: True while the current stream records a CUDA graph, which allows no call.
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
            # munlock fails for memory that is no longer mapped.
            assert _libc.munlock(ctypes.c_void_p(address), ctypes.c_size_t(size + 1)) == 0
        return self.status

    def cudaGetErrorString(self, status: int) -> str:
        return f"error {status}"

    def synchronize(self) -> None:
        self._call("synchronize", 0)


class LockingCuda(Accelerator):
    def __init__(self, kind: str, runtime: LockingRuntime) -> None:
        super().__init__(kind)
        self.runtime = runtime

    def _runtime(self) -> LockingRuntime:
        return self.runtime

    def synchronize(self) -> None:
        self.runtime.synchronize()

    def is_capturing(self) -> bool:
        return self.runtime.is_capturing

    @contextmanager
    def on(self, device: torch.device) -> Iterator[None]:
        before, self.runtime.device = self.runtime.device, device.index
        try:
            yield
        finally:
            self.runtime.device = before


@contextmanager
def locking_runtime(kind: str = "cuda") -> Iterator[LockingRuntime]:
    """Lock pages by the system's mlock instead of CUDA, for devices of a type."""
    runtime, kinds = LockingRuntime(), KINDS
    before = dict(kinds)
    kinds[kind] = LockingCuda(kind, runtime)
    try:
        yield runtime
    finally:
        kinds.clear()
        kinds.update(before)


def can_lock(num_bytes: int) -> bool:
    memory = mmap.mmap(-1, num_bytes)
    first = ctypes.c_char.from_buffer(memory)
    return bool(_libc.mlock(ctypes.byref(first), ctypes.c_size_t(num_bytes)) == 0)


def locked_bytes() -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmLck:"):
            return int(line.split()[1]) << 10
    raise AssertionError("the kernel does not say")


def is_mapped(address: int) -> bool:
    """True if this process has memory mapped at the address."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        first, last = (int(number, 16) for number in line.split()[0].split("-"))
        if first <= address < last:
            return True
    return False
