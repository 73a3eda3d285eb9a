"""The last collectives of a process: gloo's threads come to an end with them before the interpreter
does.

A thread of gloo first tells the caller that a collective is complete and then lets go of its
tensors, which takes the interpreter's lock where they have a Python object. If the interpreter has
ended by then, the process aborts ("terminate called without an active exception"), with all its
work done.
``destroy_process_group`` joins those threads, unless another object, such as an optimizer or a DDP
model, still holds the group.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import time
from collections.abc import Iterator
from pathlib import Path

_TASKS = Path("/proc/self/task")
_THREAD = "pt_gloo_runloop"
"""The name that torch gives to those threads."""
_LOOK = 1e-3
"""Seconds between two looks; a thread that waits for the lock gets it in between."""
_PATIENCE = 2.0
"""Seconds, after which a collective that hangs is not waited for."""


@functools.cache
def finish_at_exit() -> None:
    """Wait at this process's exit until no thread of gloo has anything left to do."""
    atexit.register(finish)


def finish() -> None:
    """Let gloo's threads run until all of them sleep, for at most two seconds."""
    end = time.monotonic() + _PATIENCE
    while time.monotonic() < end:
        time.sleep(_LOOK)
        if "R" not in _states():
            return


def _states() -> Iterator[str]:
    """Of this process's gloo threads: ``R`` runs or wants to, ``S`` sleeps. None where the system
    has no such list."""
    for task in _TASKS.glob("*"):
        with contextlib.suppress(OSError):  # a thread that has ended meanwhile
            name, _, rest = (task / "stat").read_text().rpartition(")")
            if name.endswith(f"({_THREAD}"):
                yield rest.split()[0]
