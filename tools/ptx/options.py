"""Options of ``tools/gpu_static.py``."""

from __future__ import annotations

from dataclasses import dataclass

ARCHES = (80, 86, 89, 90, 100, 120)
"""Compute capabilities that kernels are compiled for. ``record.TARGETS`` names their cards."""


@dataclass
class Options:
    """Trials to execute, and their targets."""

    arches: tuple[int, ...] = ARCHES
    """Compute capabilities."""
    elements: int = 1_000_000
    """Elements of each trial, summed over its launches; half of them with odd values."""
    only: tuple[str, ...] = ()
    """Trials whose names have one of these regular expressions."""
    every: int = 1
    """Execute every n-th trial."""
    list: bool = False
    """True to show the names of trials, and execute none."""
    proof: bool = False
    """True to execute the library's own self-test instead: a step of each rule."""
    record: bool = False
    """True to write the results to docs/gpu.json."""
