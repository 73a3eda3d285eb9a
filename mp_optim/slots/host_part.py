"""Where slots are stepped, and what stepping them on the host asks of the layer above."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from torch import Tensor

Place = Literal["device", "host", "streamed"]
"""Where a slot is stepped: where its parameter lies, with its main param and state beside it
(``device``) or brought there from host memory for the step (``streamed``); or in host memory."""


@dataclass
class TransferBytes:
    """Bytes that the last step moved between accelerator and host, and from and to a disk."""

    down: int = 0
    up: int = 0
    read: int = 0
    written: int = 0

    def add(self, down: int = 0, up: int = 0, read: int = 0, written: int = 0) -> None:
        """So many more."""
        self.down, self.up = self.down + down, self.up + up
        self.read, self.written = self.read + read, self.written + written


class GradientSource(Protocol):
    """The layer that has the gradients."""

    def share_settings(self) -> None:
        """Make settings here and of what steps the same; called before a step is begun early."""

    def predicted_multiplier(self) -> float:
        """What gradients will be multiplied with, in FP32, if nothing is clipped or skipped."""

    def sum_of_squares(self, grads: Sequence[Tensor]) -> Tensor:
        """FP64 sum of squares of each tensor of a list on the host, shape (n,)."""


@dataclass(frozen=True)
class Claim:
    """A gradient that may be released: its parameter need not keep it once the host has it.

    Attributes:
        index: of the parameter. released: takes the gradient, by that index.
    """

    param: Tensor
    grad: Tensor
    index: int
    released: dict[int, Tensor]

    def is_there(self) -> bool:
        """Whether it still is its parameter's gradient."""
        return self.param.grad is self.grad

    def release(self, held: Tensor) -> None:
        """Let go of it: from now on it is this tensor on the host, which its download may still be
        writing."""
        self.released[self.index] = held
        self.param.grad = None
