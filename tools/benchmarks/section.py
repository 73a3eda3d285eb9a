"""A table of measurements, and the contenders that it compares."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from benchmarks.timing import CPU, Timing

Step = Callable[[], object]
PIECE = 2048 * 2048
"""Elements of the tensors of a large model on the host."""


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

    def built(self, builds: Mapping[str, Callable[[], Step]]) -> dict[str, Step]:
        """Build each contender and try it once; return the steps, and note the contenders that
        raise as missing."""
        steps: dict[str, Step] = {}
        for name, build in builds.items():
            try:
                step = build()
                step()
            except Exception as error:  # An opponent's import, build or first step raises anything.
                first = (str(error).splitlines() or [""])[0]
                self.missing[name] = f"{type(error).__name__}: {first}"[:120]
            else:
                steps[name] = step
        return steps


def tensors(
    sizes: Sequence[int], dtype: torch.dtype, value: float | None = None, device: torch.device = CPU
) -> list[Tensor]:
    """Return flat tensors of one value; without a value, of small random numbers."""
    if value is not None:
        return [torch.full((size,), value, dtype=dtype, device=device) for size in sizes]
    generator = torch.Generator().manual_seed(len(sizes))
    return [(torch.randn(size, generator=generator) * 0.02).to(device, dtype) for size in sizes]


def pieces(numel: int) -> list[int]:
    return [PIECE] * (numel // PIECE)


def clones(originals: Sequence[Tensor]) -> list[Tensor]:
    return [tensor.clone() for tensor in originals]
