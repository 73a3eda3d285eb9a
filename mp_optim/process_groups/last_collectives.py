"""Lets the threads of the last collectives end before the interpreter ends.

A gloo thread first reports that a collective is complete, and then frees the tensors of the
collective. For tensors with a Python object this takes the interpreter's lock. If the interpreter
has ended by then, the process aborts ("terminate called without an active exception") although all
of its work is done. ``destroy_process_group`` joins these threads, unless another object (an
optimizer, a DDP model) still refers to the group.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from pathlib import Path

_TASKS = Path("/proc/self/task")
_THREAD = "pt_gloo_runloop"
"""Name of gloo's threads, as torch sets it."""
_EXIT_PATIENCE = 2.0
"""Most seconds to wait at exit. A collective that hangs must not keep the process alive."""


def finish() -> None:
    """Wait until all gloo threads of this process sleep, for at most two seconds. Registered with
    ``atexit``."""
    end = time.monotonic() + _EXIT_PATIENCE
    while time.monotonic() < end:
        # Sleeping gives the interpreter's lock to a gloo thread that waits for the lock.
        time.sleep(1e-3)
        if "R" not in _states():
            return


def _states() -> Iterator[str]:
    """Yield the state of each gloo thread of this process: ``R`` for a thread that runs or is ready
    to run, ``S`` for a thread that sleeps. Yield nothing on systems without ``/proc/self/task``."""
    for task in _TASKS.glob("*"):
        # The file is gone if the thread has ended since glob() listed it.
        with contextlib.suppress(OSError):
            name, _, rest = (task / "stat").read_text().rpartition(")")
            if name.endswith(f"({_THREAD}"):
                yield rest.split()[0]
