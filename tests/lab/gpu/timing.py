"""Contenders timed in turn by the device's own clock."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

import torch
from rich.progress import track

from benchmarks.timing import Timing

BUSY = 20_000_000
"""Cycles that the device is kept busy for: some 10 ms."""


def alternate(
    device: torch.device,
    contenders: Mapping[str, Callable[[], object]],
    rounds: int,
    label: str,
    behind: bool = False,
) -> dict[str, Timing]:
    """Time every contender once a round, after two rounds that do not count. Includes what the host
    adds: launches that the device waits for show in its clock; ``behind`` other work, as after a
    backward pass, the host is ahead, and only waits of its own show."""
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    for number in track(range(-2, rounds), description=label, transient=True):
        for name, run in contenders.items():
            took = _timed(device, run, behind)
            if number >= 0:
                seconds[name].append(took)
    return {name: Timing(values) for name, values in seconds.items()}


def _timed(device: torch.device, run: Callable[[], object], behind: bool) -> float:
    if device.type != "cuda":
        started = time.perf_counter()
        run()
        return time.perf_counter() - started
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize(device)
    if behind:
        torch.cuda._sleep(BUSY)
    start.record()
    run()
    end.record()
    torch.cuda.synchronize(device)
    return start.elapsed_time(end) / 1e3
