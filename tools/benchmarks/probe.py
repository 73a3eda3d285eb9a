"""The bandwidth limit: memory read and written in place, the pattern that optimizers have. It is
measured in the same rounds as what it is compared with."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from benchmarks.section import Section
from benchmarks.timing import Timing, alternate
from mp_optim.core import Slot, SlotUpdate
from mp_optim.rules.rule_optimizer import RuleOptimizer


@dataclass(frozen=True)
class ProbedTiming(Timing):
    """A contender's seconds, and the probe's in the same rounds.

    Attributes:
        limits: bytes per second of the probe, one value a round.
    """

    limits: tuple[float, ...] = ()

    def share(self, nbytes: int) -> float:
        shares = sorted(
            nbytes / seconds / limit
            for seconds, limit in zip(self.seconds, self.limits, strict=True)
        )
        middle = len(shares) // 2
        return (shares[middle] + shares[-1 - middle]) / 2


@dataclass(frozen=True)
class Probe:
    """A way to read and write memory in place.

    Attributes:
        nbytes: that ``run`` reads and writes.
        rate: bytes per second that it was chosen for.
    """

    run: Callable[[], object]
    nbytes: int
    rate: float

    def alternate(
        self, contenders: Mapping[str, Callable[[], object]], rounds: int, label: str
    ) -> dict[str, ProbedTiming]:
        """Time contenders and probe in turn."""
        timings = alternate({**contenders, "probe": self.run}, rounds, label)
        limits = tuple(self.nbytes / seconds for seconds in timings["probe"].seconds)
        return {name: ProbedTiming(timings[name].seconds, limits) for name in contenders}


def memory_limit(numel: int, rounds: int) -> tuple[Section, Probe]:
    flat, other = torch.zeros(2 * numel), torch.zeros(numel)
    lion = RuleOptimizer("lion", [torch.zeros(numel)])
    update = [SlotUpdate(Slot(0, 0), other)]
    ways: dict[str, tuple[Callable[[], object], int]] = {
        "x *= c": (lambda: flat.mul_(1.0001), 2 * flat.nbytes),
        "x += y": (lambda: flat[:numel].add_(other), 3 * other.nbytes),
        "copy": (lambda: other.copy_(flat[:numel]), 2 * other.nbytes),
        "p, m updated from g (our Lion kernel: no division, no root)": (
            lambda: lion.step_slots(update),
            5 * other.nbytes,
        ),
    }
    timings = alternate({name: run for name, (run, _) in ways.items()}, rounds, "memory")
    section = Section("Memory: GB/s of bytes asked for")
    section.take(timings, gbs=lambda name, t: ways[name][1] / t.median / 1e9)
    best = max(ways, key=lambda name: section.rows[name]["gbs"])
    run, nbytes = ways[best]
    return section, Probe(run, nbytes, section.rows[best]["gbs"] * 1e9)
