"""The garbage collector, left out where many small objects are made that stay.

Every few hundred new objects it looks for cycles, now and then among all objects of the process;
plans and indices of thousands of entries have no cycles, and half of their time would go into that.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def uncollected() -> Iterator[None]:
    """No automatic collections meanwhile, if there were any before; also a decorator."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
