"""Time and memory of this process and its device."""

from __future__ import annotations

import math
from pathlib import Path

import torch

from benchmarks.timing import Clock
from mp_optim.host.host_share import Host
from mp_optim.host.memory_limits import memory_limits

GIB = float(1 << 30)
MATMUL = 8192


def memory(device: torch.device) -> dict[str, float]:
    """Return the peaks of this process, in GiB: allocated and reserved on the device, resident on
    the host, and page-locked there by torch."""
    status = Path("/proc/self/status")
    lines = status.read_text().splitlines() if status.exists() else []
    peaks = [int(line.split()[1]) << 10 for line in lines if line.startswith("VmHWM:")]
    found = {"rss": sum(peaks) / GIB}
    if device.type == "cuda":
        found["pinned"] = torch.cuda.host_memory_stats().get("allocated_bytes.peak", 0) / GIB
        found["allocated"] = torch.cuda.max_memory_allocated(device) / GIB
        found["reserved"] = torch.cuda.max_memory_reserved(device) / GIB
    return found


def host_memory_left() -> float:
    """Return the GiB that processes can still take of the host; infinite if no limit is known."""
    limits = memory_limits(Host(frozenset()))
    return min((limit.free for limit in limits), default=math.inf) / GIB


def card(device: torch.device, rounds: int) -> dict[str, float]:
    """Return the device's rate of a product of two bf16 matrices of 8192 x 8192.

    Args:
        rounds: repetitions; the best counts.
    """
    size, clock = MATMUL if device.type == "cuda" else 256, Clock(device)
    left, right = (torch.randn(size, size, device=device).bfloat16() for _ in range(2))
    best = float("inf")
    for _ in range(rounds + 1):
        start = clock.now()
        for _ in range(5):
            left @ right
        best = min(best, clock.seconds(start, clock.now()) / 5)
    return {"tflops": 2.0 * size**3 / best / 1e12}
