"""What streams and copy engines make of the order in which the host queues a step: the windows of
``mp_optim/offload/streaming.py``.

There is one copy engine a direction. What waits for it in several streams goes in the order in
which it got ready, whole; within a stream that is at once, after an event of another a little
later.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from mp_optim.apps.fit.step_time import IN_FLIGHT, WINDOW, Form, Lanes, Machine

ROW, EVENT = 5e-6, 2e-6
"""Seconds of a copy of some hundred bytes, and until a stream knows of another's work."""


@dataclass(eq=False)
class Work:
    """A copy or a kernel in a stream, after the one before and after some of other streams; ``end``
    is known once it began."""

    engine: str
    seconds: float
    before: Sequence[Work]
    after: Sequence[Work]
    queued: float
    end: float | None = None

    @property
    def ready(self) -> float | None:
        """When nothing but its engine is in its way, if that is known."""
        times = [self.queued]
        for works, later in ((self.before, 0.0), (self.after, EVENT)):
            for work in works:
                if work.end is None:
                    return None
                times.append(work.end + later)
        return max(times)


class Device:
    """Streams and engines, and the thread that queues work and waits.

    Attributes:
        now: the thread's time. waited: seconds that it waited.
    """

    def __init__(self) -> None:
        self.now = self.waited = 0.0
        self._streams: dict[str, deque[Work]] = {}
        self._last: dict[str, Work] = {}
        self._free: dict[str, float] = {}

    def queue(self, stream: str, engine: str, seconds: float, after: Sequence[Work] = ()) -> Work:
        work = Work(engine, seconds, self.last(stream), after, self.now)
        self._streams.setdefault(stream, deque()).append(work)
        self._last[stream] = work
        return work

    def last(self, stream: str) -> list[Work]:
        """What a stream was given last."""
        return [self._last[stream]] if stream in self._last else []

    def wait(self, work: Work) -> None:
        """The thread waits."""
        while work.end is None:
            self._begin_next()
        self.waited += max(0.0, work.end - self.now)
        self.now = max(self.now, work.end)

    def finish(self) -> float:
        """Wait for everything; returns the time."""
        for work in self._last.values():
            self.wait(work)
        return self.now

    def _begin_next(self) -> None:
        """What can begin first, of all streams, begins."""
        start, _, stream = min(self._next())
        work = self._streams[stream].popleft()
        work.end = self._free[work.engine] = start + work.seconds

    def _next(self) -> Iterator[tuple[float, float, str]]:
        for stream, waiting in self._streams.items():
            if waiting and (ready := waiting[0].ready) is not None:
                yield max(ready, self._free.get(waiting[0].engine, 0.0)), ready, stream


@dataclass(frozen=True)
class Order:
    """How a step is queued.

    Attributes:
        rows: each window's kernel is behind a copy of its numbers; else those went up at first.
        waits: a window comes up after all kernels that were queued before.
    """

    rows: bool = False
    waits: bool = False


NOW = Order()
BEFORE = Order(rows=True, waits=True)
"""As it was until the order was looked at."""


def streamed_in(
    order: Order, machine: Machine, form: Form, params: int, window: int = WINDOW
) -> float:
    """Return the seconds of a step with everything streamed, queued as ``WindowLane`` does."""
    device, lanes = Device(), Lanes.of(machine, streams=True)
    size = max(int(window // form.state), 1)
    counts = [min(size, params - start) for start in range(0, params, size)]
    ups: list[Work] = []
    downs: list[Work] = []

    def bring(number: int) -> None:
        after = device.last("compute") if order.waits else ()
        seconds = lanes.up.latency + counts[number] * form.state / lanes.up.rate
        ups.append(device.queue("up", "up", seconds, after))

    if not order.rows:
        device.queue("compute", "up", ROW)
    bring(0)
    for number, count in enumerate(counts):
        if number >= IN_FLIGHT - 1:
            device.wait(downs[number - IN_FLIGHT + 1])
        came = ups[number]
        if number + 1 < len(counts):
            bring(number + 1)
        if order.rows:
            device.queue("compute", "up", ROW, [came])
        traffic = count * (form.update + 2 * form.state)
        seconds = lanes.device.latency + traffic / lanes.device.rate
        stepped = device.queue("compute", "device", seconds, [came])
        seconds = lanes.down.latency + count * form.state / lanes.down.rate
        downs.append(device.queue("down", "down", seconds, [stepped]))
    return device.finish()
