"""Contenders timed in turn in one process, so that what the machine does meanwhile hits all of them
alike."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from rich.progress import track


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


def alternate(
    contenders: Mapping[str, Callable[[], object]], rounds: int, label: str
) -> dict[str, Timing]:
    """Time every contender once a round, after one round that does not count."""
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    for number in track(range(rounds + 1), description=label, transient=True):
        for name, run in contenders.items():
            started = time.perf_counter()
            run()
            if number:
                seconds[name].append(time.perf_counter() - started)
    return {name: Timing(values) for name, values in seconds.items()}


def ratio(of: Timing, to: Timing) -> float:
    return statistics.median(a / b for a, b in zip(of.seconds, to.seconds, strict=True))
