"""A table of what was measured."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from benchmarks.timing import Timing


@dataclass
class Section:
    """One table.

    Attributes:
        rows: contender to its columns: ``ms``, ``spread`` and what the section adds.
        missing: contenders that could not be run, and why.
    """

    title: str
    rows: dict[str, dict[str, float]] = field(default_factory=dict)
    missing: dict[str, str] = field(default_factory=dict)

    def take(
        self, timings: Mapping[str, Timing], **columns: Callable[[str, Timing], float]
    ) -> None:
        """Add rows from timings, with further columns computed from name and timing."""
        for name, timing in timings.items():
            self.rows[name] = {
                "ms": timing.median * 1e3,
                "spread": timing.spread,
                **{key: column(name, timing) for key, column in columns.items()},
            }
