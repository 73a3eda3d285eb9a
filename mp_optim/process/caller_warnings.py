"""Warnings that point at a line of the caller's program."""

from __future__ import annotations

import sys
import warnings
from pathlib import Path

import torch

_INSIDE = (str(Path(__file__).parents[1]), str(Path(torch.__file__ or "").parent))


def warn(message: str) -> None:
    """Warn from the innermost line that is neither this package's nor torch's, which wraps
    ``step``."""
    level, frame = 2, sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_INSIDE):
        frame, level = frame.f_back, level + 1
    warnings.warn(message, stacklevel=level)
