"""The last collectives of a process.

A thread of gloo first reports that a collective is complete and then frees its tensors, which takes
the interpreter's lock where they have a Python object. If the interpreter has ended by then, the
process aborts ("terminate called without an active exception"), with all its work done.
``destroy_process_group`` joins those threads, unless another object, such as an optimizer or a DDP
model, still holds the group.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from pathlib import Path

_TASKS = Path("/proc/self/task")
_THREAD = "pt_gloo_runloop"
"""The name that torch gives to gloo's threads."""
_EXIT_PATIENCE = 2.0
"""Seconds, after which a collective that hangs is not waited for."""


def finish() -> None:
    """Let gloo's threads run until all of them sleep, for at most two seconds; registered to be
    called at this process's exit."""
    end = time.monotonic() + _EXIT_PATIENCE
    while time.monotonic() < end:
        time.sleep(1e-3)  # gives the interpreter's lock to a waiting thread
        if "R" not in _states():
            return


def _states() -> Iterator[str]:
    """Yield the state of each of this process's gloo threads: ``R`` runs or wants to, ``S`` sleeps.
    Empty where the system has no such list."""
    for task in _TASKS.glob("*"):
        with contextlib.suppress(OSError):  # the thread has ended meanwhile
            name, _, rest = (task / "stat").read_text().rpartition(")")
            if name.endswith(f"({_THREAD}"):
                yield rest.split()[0]
