"""Contenders timed in turn in one process, so that other load on the machine affects all alike."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from rich.progress import track

BUSY = 20_000_000
"""Cycles for which the device is kept busy: some 10 ms."""
CPU = torch.device("cpu")


@dataclass(frozen=True)
class Timing:
    """Seconds of one contender, one value a round."""

    seconds: list[float]

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)

    @property
    def spread(self) -> float:
        if len(self.seconds) == 1:
            return 0.0
        low, _, high = statistics.quantiles(self.seconds, n=4)
        return (high - low) / 2 / self.median


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


def alternate(
    contenders: Mapping[str, Callable[[], object]],
    rounds: int,
    label: str,
    device: torch.device = CPU,
    behind: bool = False,
) -> dict[str, Timing]:
    """Time every contender once a round, after two rounds that do not count.

    The device's clock includes launches that the device waits for.

    Args:
        behind: True to queue the contender behind other work, as after a backward pass. The host is
            ahead then, and only the contender's own waits count.
    """
    clock, seconds = Clock(device), {name: list[float]() for name in contenders}
    for number in track(range(-2, rounds), description=label, transient=True):
        for name, run in contenders.items():
            if clock.on_gpu:
                torch.cuda.synchronize(device)
            if clock.on_gpu and behind:
                torch.cuda._sleep(BUSY)
            start = clock.now()
            run()
            took = clock.seconds(start, clock.now())
            if number >= 0:
                seconds[name].append(took)
    return {name: Timing(values) for name, values in seconds.items()}


def ratio(of: Timing, to: Timing) -> float:
    return statistics.median(a / b for a, b in zip(of.seconds, to.seconds, strict=True))
