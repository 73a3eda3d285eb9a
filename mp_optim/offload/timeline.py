"""Time and bytes of a step: spans of named stages, which the profiler shows under the same
names, and numbers of copied bytes."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple

from torch.profiler import record_function

WAIT_COPIES, WAIT_DISK, WAIT_WORKER = "wait_copies", "wait_disk", "wait_worker"
ARITHMETIC = ("host_add", "host_measure", "host_step")
"""Stages that compute on the host."""


class Span(NamedTuple):
    """One stage of one thread, in seconds of ``time.perf_counter``. ``label`` names the slots of
    the stage."""

    stage: str
    thread: str
    start: float
    end: float
    label: str


class StepTimeline:
    """Spans since the last step ended, and spans of the step before.

    Attributes:
        last: spans of the last backward and step.
        began: time at which the last ``step()`` began to wait for the worker.
    """

    def __init__(self) -> None:
        self._spans: list[Span] = []
        self._began: float | None = None
        self.last: list[Span] = []
        self.began = 0.0

    @contextmanager
    def stage(self, name: str, label: str = "") -> Iterator[None]:
        """Record the time of a ``with`` block as a span. Any thread may call this."""
        with record_function(f"mp_optim::{name}"):
            start = time.perf_counter()
            try:
                yield
            finally:
                self._spans.append(
                    Span(name, threading.current_thread().name, start, time.perf_counter(), label)
                )

    def begin_step(self) -> None:
        """Record when the caller begins to wait. Spans that end before this time are hidden."""
        if self._began is None:
            self._began = time.perf_counter()

    def end_step(self) -> None:
        """Move the recorded spans to ``last``, and begin a new record."""
        self.last, self._spans = self._spans, []
        self.began = time.perf_counter() if self._began is None else self._began
        self._began = None

    def metrics(self) -> dict[str, float]:
        """Return the milliseconds of the last backward and step.

        - ``copy_wait_ms``: waiting for copies, in any thread.
        - ``worker_wait_ms``: ``step()`` waiting for the worker.
        - ``host_ms``: arithmetic on the host.
        - ``hidden_ms``: arithmetic on the host that ended before ``step()`` began. With ``overlap``
          copies alone may be hidden.
        """

        arithmetic = [span for span in self.last if span.stage in ARITHMETIC]
        hidden = sum(max(0.0, min(span.end, self.began) - span.start) for span in arithmetic)
        return {
            "copy_wait_ms": self.milliseconds(WAIT_COPIES),
            "worker_wait_ms": self.milliseconds(WAIT_WORKER),
            "host_ms": self.milliseconds(*ARITHMETIC),
            "hidden_ms": 1e3 * hidden,
        }

    def milliseconds(self, *stages: str) -> float:
        """Return the milliseconds of some stages of the last backward and step, in all threads."""
        spans = [span for span in self.last if span.stage in stages]
        return 1e3 * sum(span.end - span.start for span in spans)


@dataclass
class TransferBytes:
    """Bytes that the last step copied between accelerator and host (down and up), and read from
    and wrote to a disk."""

    down: int = 0
    up: int = 0
    read: int = 0
    written: int = 0

    def add(self, down: int = 0, up: int = 0, read: int = 0, written: int = 0) -> None:
        """Add numbers of bytes to the counts."""
        self.down, self.up = self.down + down, self.up + up
        self.read, self.written = self.read + read, self.written + written
