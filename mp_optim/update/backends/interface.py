"""What a backend is."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from mp_optim.update.lists import AdamScalars, LambScalars, LionScalars, SgdScalars, TensorLists

__all__ = ["Backend"]


class Backend(Protocol):
    """Each method updates every tensor of the lists in place and writes the outputs."""

    name: str

    def adam(self, lists: TensorLists, scalars: AdamScalars, multiplier: float) -> None: ...

    def lamb(self, lists: TensorLists, scalars: LambScalars, multiplier: float) -> None:
        """The whole step, for tensors that are whole parameters."""
        ...

    def lamb_moments(self, lists: TensorLists, scalars: LambScalars, multiplier: float) -> Tensor:
        """Update the moments; return FP64 (sum p^2, sum u^2) per tensor, shape (n, 2)."""
        ...

    def lamb_apply(self, lists: TensorLists, scalars: LambScalars, ratios: Sequence[float]) -> None:
        """Take the step, each tensor with its own ratio (FP32 value)."""
        ...

    def lion(self, lists: TensorLists, scalars: LionScalars, multiplier: float) -> None: ...

    def sgd(self, lists: TensorLists, scalars: SgdScalars, multiplier: float) -> None: ...

    def sum_of_squares(self, tensors: Sequence[Tensor]) -> Tensor:
        """FP64, shape (n,)."""
        ...
