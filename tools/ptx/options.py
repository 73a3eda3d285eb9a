"""What ``tools/gpu_static.py`` is asked for."""

from __future__ import annotations

from dataclasses import dataclass

ARCHES = (80, 86, 89, 90, 100, 120)
"""Compute capabilities that kernels are compiled for. ``record.TARGETS`` names their cards."""


@dataclass
class Options:
    """What to carry out, and for which targets."""

    arches: tuple[int, ...] = ARCHES
    """Compute capabilities."""
    elements: int = 1_000_000
    """Of each trial, counted in each launch, in tensors of odd sizes; half of them with odd
    values."""
    only: tuple[str, ...] = ()
    """Trials whose names have one of these regular expressions."""
    every: int = 1
    """One trial of so many."""
    list: bool = False
    """Show the names of trials."""
    proof: bool = False
    """The library's own self-test instead: a step of each rule."""
    record: bool = False
    """Note in docs/gpu.json what was found."""
