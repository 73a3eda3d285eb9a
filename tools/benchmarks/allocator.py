"""Settings of the C allocator that keep freed memory.

By default glibc returns freed large tensors to the system in some runs and not in others. A
contender with temporary tensors then pays for page faults in some runs, which can double its time.
So freed memory is kept until a section is over.
"""

from __future__ import annotations

import ctypes
from typing import Any

_TRIM_THRESHOLD, _MMAP_THRESHOLD = (-1, -3)  # M_TRIM_THRESHOLD and M_MMAP_THRESHOLD of <malloc.h>
_NEVER = -1
_LARGEST = 32 * 1024 * 1024
"""Largest mapping threshold on a 64-bit system. Larger tensors always get new pages."""


def _glibc() -> Any:
    try:
        library = ctypes.CDLL(None)
        return library if hasattr(library, "mallopt") and hasattr(library, "malloc_trim") else None
    except (OSError, TypeError):
        return None


def keep_freed() -> None:
    if (library := _glibc()) is not None:
        library.mallopt(_MMAP_THRESHOLD, _LARGEST)
        library.mallopt(_TRIM_THRESHOLD, _NEVER)


def release() -> None:
    """Return the kept memory to the system."""
    if (library := _glibc()) is not None:
        library.malloc_trim(ctypes.c_size_t(0))
