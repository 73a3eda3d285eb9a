"""A receiver of published weights that knows what it should have been given."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from mp_optim import WeightDelta, apply_delta
from mp_optim.apps.deltas import Position


def differing(one: Tensor, other: Tensor) -> Tensor:
    integers = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[one.element_size()]
    return one.contiguous().view(integers) != other.contiguous().view(integers)


class Receiver:
    """A copy of a model's weights at the moment that changes begin to be remembered.

    Attributes:
        copies: by name.
            listed: number of published elements, without full publications.
            changed: number of these that differed.
    """

    def __init__(self, weights: dict[str, Tensor]) -> None:
        self.copies = {name: value.detach().clone() for name, value in weights.items()}
        self.after: Position | None = None
        self.listed = self.changed = 0

    def take(self, parts: Sequence[WeightDelta], now: dict[str, Tensor], exact: bool = True) -> Any:
        """Apply a publication through its bytes, and check that the copies equal the weights.

        Args:
            exact: True to count the listed elements.
        """
        parts = [WeightDelta.from_bytes(part.to_bytes()) for part in parts]
        if exact and not parts[0].is_full:
            self.listed += sum(part.changed for part in parts)
            self.changed += sum(
                int(differing(self.copies[name], value.detach()).sum())
                for name, value in now.items()
            )
        seen: dict[str, list[Tensor]] = {}
        for patch in (patch for part in parts for patch in part.patches):
            indices = patch.indices
            if indices is None:
                indices = torch.arange(patch.numel)
            seen.setdefault(patch.name, []).append(indices)
        for name, lists in seen.items():
            every = torch.cat(lists)
            assert every.unique().numel() == every.numel(), f"{name}: something is published twice"
        self.after = apply_delta(self.copies, parts, self.after)
        for name, value in now.items():
            wrong = differing(self.copies[name], value.detach())
            assert not bool(wrong.any()), f"{name}: {int(wrong.sum())} elements were missed"
        return parts

    @property
    def precision(self) -> float:
        return self.changed / max(1, self.listed)
