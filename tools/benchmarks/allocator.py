"""The C allocator, told to keep what is freed.

By default glibc returns large tensors to the system as they are freed, or not, depending on what
the process did before. A contender that makes temporary tensors in its step then pays for page
faults in one run (which can double its time) and not in another. None of them is to be charged for
that, so freed memory is kept until a section is over.
"""

from __future__ import annotations

import ctypes
from typing import Any

_TRIM_THRESHOLD, _MMAP_THRESHOLD = (-1, -3)  # M_TRIM_THRESHOLD and M_MMAP_THRESHOLD of <malloc.h>
_NEVER = -1
_LARGEST = 32 * 1024 * 1024
"""What the mapping threshold can be at most on a 64-bit system; larger tensors are always mapped
afresh."""


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
    """Return to the system what was kept."""
    if (library := _glibc()) is not None:
        library.malloc_trim(ctypes.c_size_t(0))
