"""Time and memory of this process and its device."""

from __future__ import annotations

import math
import time
from pathlib import Path

import torch

from mp_optim.host import host_memory, transfer
from mp_optim.host.host_share import Host
from mp_optim.host.memory_limits import memory_limits

GIB = float(1 << 30)
MATMUL = 8192


class Clock:
    """Moments of the device's own clock; on a CPU of the host's."""

    def __init__(self, device: torch.device) -> None:
        self.on_gpu = device.type == "cuda"

    def now(self) -> torch.cuda.Event | float:
        """Return the moment at which the work queued so far is done."""
        if not self.on_gpu:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def seconds(self, start: torch.cuda.Event | float, end: torch.cuda.Event | float) -> float:
        """Return the seconds between two moments, and wait for the second."""
        if isinstance(start, float) or isinstance(end, float):
            return float(end) - float(start)  # type: ignore[arg-type]
        end.synchronize()
        return start.elapsed_time(end) / 1e3


class Pinned:
    """Bytes of page-locked memory at their peak: torch's and the package's own.

    The package registers memory itself, which no counter of torch has, so that its function is
    replaced by one that counts.
    """

    def __init__(self) -> None:
        self.own = 0
        original = host_memory.page_locked

        def page_locked(num_bytes: int, device: torch.device) -> torch.Tensor:
            taken = original(num_bytes, device)
            self.own += num_bytes
            return taken

        transfer.page_locked = page_locked  # type: ignore[attr-defined]

    def bytes(self) -> int:
        """Return the sum: memory that the package has released in between counts, too."""
        stats = torch.cuda.host_memory_stats() if torch.cuda.is_initialized() else {}
        return self.own + int(stats.get("allocated_bytes.peak", 0))


def memory(device: torch.device, pinned: Pinned) -> dict[str, float]:
    """Return the peaks of this process, in GiB: allocated and reserved on the device, resident and
    page-locked on the host."""
    found = {"rss": _peak_rss() / GIB, "pinned": pinned.bytes() / GIB}
    if device.type == "cuda":
        found["allocated"] = torch.cuda.max_memory_allocated(device) / GIB
        found["reserved"] = torch.cuda.max_memory_reserved(device) / GIB
    return found


def host_memory_left() -> float:
    """Return the GiB that processes can still take of the host; infinite if no limit is known."""
    limits = memory_limits(Host(frozenset()))
    return min((limit.free for limit in limits), default=math.inf) / GIB


def _kib(path: str, name: str) -> int:
    file = Path(path)
    lines = file.read_text().splitlines() if file.exists() else []
    return next((int(line.split()[1]) for line in lines if line.startswith(name)), 0)


def _peak_rss() -> int:
    return _kib("/proc/self/status", "VmHWM:") << 10


def card(device: torch.device, rounds: int) -> dict[str, float]:
    """Return what the device can do at most: the rate of a product of two bf16 matrices of 8192 x
    8192, and of copies of 1 GiB, up and down at the same time from page-locked memory.

    Args:
        rounds: repetitions; the best counts.
    """
    on_gpu = device.type == "cuda"
    size, clock = MATMUL if on_gpu else 256, Clock(device)
    left, right = (torch.randn(size, size, device=device).bfloat16() for _ in range(2))
    best = float("inf")
    for _ in range(rounds + 1):
        start = clock.now()
        for _ in range(5):
            left @ right
        best = min(best, clock.seconds(start, clock.now()) / 5)
    found = {"tflops": 2.0 * size**3 / best / 1e12}
    return {**found, **_bus(device, rounds)} if on_gpu else found


def _bus(device: torch.device, rounds: int) -> dict[str, float]:
    there = [torch.zeros(1 << 30, dtype=torch.uint8, device=device) for _ in range(2)]
    here = [torch.zeros(1 << 30, dtype=torch.uint8, pin_memory=True) for _ in range(2)]
    streams, best = (torch.cuda.Stream(), torch.cuda.Stream()), float("inf")
    for _ in range(rounds + 1):
        torch.cuda.synchronize()
        started = time.perf_counter()
        with torch.cuda.stream(streams[0]):
            there[0].copy_(here[0], non_blocking=True)
        with torch.cuda.stream(streams[1]):
            here[1].copy_(there[1], non_blocking=True)
        torch.cuda.synchronize()
        best = min(best, time.perf_counter() - started)
    return {"bus_each_way": (1 << 30) / best / 1e9}
