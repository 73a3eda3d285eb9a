"""Where windows are kept between steps: in host memory, or in a file."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from mp_optim.placement.windows import Window


class WindowSource(Protocol):
    """Brings the windows of one step into host memory, in turn, and takes them back.

    Attributes:
        read, written: bytes that were read from a disk and written to it.
    """

    read: int
    written: int

    def fetch(self, number: int) -> Window:
        """The window with its tensors in host memory, once they are there."""

    def store(self, number: int) -> None:
        """Start to take back a window: nothing writes to its memory any more."""

    def finish(self) -> None:
        """Wait until nothing is under way, and what was stored is taken back."""


class HeldWindows:
    """Windows that are in host memory anyway."""

    read = written = 0

    def __init__(self, windows: Sequence[Window]) -> None:
        self._windows = windows

    def fetch(self, number: int) -> Window:
        """See :class:`WindowSource`."""
        return self._windows[number]

    def store(self, number: int) -> None: ...

    def finish(self) -> None: ...
