"""What is timed in turn, and the tensors that it is timed on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

PIECE = 2048 * 2048
"""Elements of the tensors that a large model is made of here."""


@dataclass
class Contenders:
    """Steps by name; a contender that cannot be built is noted instead."""

    steps: dict[str, Callable[[], object]] = field(default_factory=dict)
    missing: dict[str, str] = field(default_factory=dict)

    def add(self, name: str, build: Callable[[], Callable[[], object]]) -> None:
        """Build and try a contender once."""
        try:
            step = build()
            step()
        except Exception as error:  # whatever an opponent's import, build or first step raises
            self.missing[name] = (
                f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"[:120]
            )
        else:
            self.steps[name] = step


def tensors(numel: int, count: int, dtype: torch.dtype, value: float | None = None) -> list[Tensor]:
    if value is not None:
        return [torch.full((numel,), value, dtype=dtype) for _ in range(count)]
    generator = torch.Generator().manual_seed(count)
    return [(torch.randn(numel, generator=generator) * 0.02).to(dtype) for _ in range(count)]
