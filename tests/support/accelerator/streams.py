"""Streams and events that run their work when the host waits."""

import random
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from enum import Enum

from support.accelerator.clocks import Actor


class Pace(Enum):
    LAZY = "lazy"
    OTHERS_FIRST = "others first"
    RANDOM = "random"


Place = tuple["Stream", int]
"""A position: a stream, and a number of its operations."""


class Operation:
    """An operation in a stream, or a wait for another stream."""

    def __init__(self, run: Callable[[], None] | None, needs: Sequence[Place]) -> None:
        self.run, self.needs = run, needs

    @property
    def is_free(self) -> bool:
        return all(stream.done >= count for stream, count in self.needs)


class Stream(Actor):
    """A queue of operations on a device.

    Attributes:
        device: index.
        queued: number of queued operations.
        done: number of finished operations.
    """

    def __init__(self, name: str, device: int) -> None:
        super().__init__(name)
        self.device = device
        self.queued = self.done = 0
        self._operations: deque[Operation] = deque()

    def add(self, run: Callable[[], None] | None, needs: Sequence[Place] = ()) -> None:
        self._operations.append(Operation(run, needs))
        self.queued += 1

    @property
    def next(self) -> Operation | None:
        return self._operations[0] if self._operations else None

    def go_on(self) -> None:
        """Run the next operation."""
        operation = self._operations.popleft()
        if operation.run is not None:
            operation.run()
        self.done += 1


class Executor:
    """Runs queued operations in one of the allowed orders."""

    def __init__(self, pace: Pace, seed: int) -> None:
        self._pace = pace
        self._chance = random.Random(seed)
        self.streams: list[Stream] = []

    def reach(self, stream: Stream, count: int) -> None:
        """Run the first ``count`` operations of a stream."""
        if self._pace is Pace.OTHERS_FIRST and stream.done < count:
            self._exhaust(other for other in self.streams if other is not stream)
        while stream.done < count:
            operation = stream.next
            assert operation is not None
            for other, needed in operation.needs:
                self.reach(other, needed)
            stream.go_on()

    def stir(self) -> None:
        """Run a random number of operations."""
        if self._pace is Pace.RANDOM and self._chance.random() < 0.3:
            stream = self._chance.choice(self.streams)
            if stream.next is not None and stream.next.is_free:
                stream.go_on()

    @staticmethod
    def _exhaust(streams: Iterable[Stream]) -> None:
        """Run these streams until each waits for a stream outside of them."""
        every = list(streams)
        while moving := [s for s in every if s.next is not None and s.next.is_free]:
            for stream in moving:
                stream.go_on()
