"""Ctrl-C: the step at hand is finished and saved, and the run can go on from there."""

from __future__ import annotations

import signal
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any

STATUS = 130
"""Exit status of a run that was interrupted: what shells give for Ctrl-C."""

_Handler = Callable[[int, FrameType | None], Any] | int | None


class Interruption:
    """While it is entered, Ctrl-C (and SIGTERM, which `torchrun` and schedulers send) only asks the
    run to stop; the same signal again ends it at once. Of the main thread."""

    def __init__(self) -> None:
        self.asked = False
        self._before: dict[int, _Handler] = {}

    def __enter__(self) -> Interruption:
        for number in (signal.SIGINT, signal.SIGTERM):
            self._before[number] = signal.signal(number, self._ask)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _ask(self, number: int, frame: FrameType | None) -> None:
        self.asked = True
        signal.signal(number, self._before[number])
