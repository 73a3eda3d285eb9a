"""What does one thing at a time, and when a schedule's work on it is done."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field


@dataclass(frozen=True, eq=False)
class Lane:
    """A direction of the bus, the device or the host: one piece of work after the other, in the
    order they were given, as in a CUDA stream."""

    name: str
    rate: float
    """Bytes a second."""
    latency: float = 0.0
    """Seconds that a piece takes whatever its size."""


@dataclass(frozen=True)
class Work:
    """A piece of work: bytes through a lane, from ``begin`` to ``end`` in seconds."""

    lane: Lane
    bytes: float
    begin: float
    end: float


@dataclass
class Schedule:
    """Work in the order in which it was given to its lanes."""

    works: list[Work] = field(default_factory=list)
    free: dict[Lane, float] = field(default_factory=dict)
    """When each lane is done with what it was given."""

    def add(self, lane: Lane, size: float, after: Iterable[int] = (), earliest: float = 0.0) -> int:
        """Give ``size`` bytes to a lane. They wait for the work whose indices are in ``after``, and
        for ``earliest``. Returns the index of this work."""
        ready = max((self.works[i].end for i in after), default=0.0)
        begin = max(earliest, ready, self.free.get(lane, 0.0))
        self.free[lane] = begin + lane.latency + size / lane.rate
        self.works.append(Work(lane, size, begin, self.free[lane]))
        return len(self.works) - 1

    @property
    def seconds(self) -> float:
        """When everything is done."""
        return max(self.free.values(), default=0.0)

    def bytes_of(self, name: str) -> float:
        """All bytes that go through the lane of a name."""
        return sum(work.bytes for work in self.works if work.lane.name == name)
