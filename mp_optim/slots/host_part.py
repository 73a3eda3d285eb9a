"""What an optimizer that steps some slots on the host offers to the layer above, and asks of it."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from torch import Tensor

from mp_optim.slots.identity import Slot
from mp_optim.slots.updates import SlotUpdate

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

    def push_hyperparams(self) -> None:
        """Bring settings down to the optimizer that steps; called before a step is begun early."""

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


class HostPart:
    """The stepping of slots on the host, part of which may be done during backward: the face that
    the layer above sees, and what it comes to where nothing is begun early.

    Nothing depends on work being begun early: what was not begun, or from other values, is done in
    the step.

    Attributes:
        works_in_backward: whether :meth:`on_grad_ready` begins anything.
        is_last_microbatch: whether gradients that get ready are complete.
        releases: gradients come with a claim, and are begun only if they can be released.
        transfer_bytes: of the last step.
    """

    works_in_backward = False

    def __init__(self) -> None:
        self.is_last_microbatch = True
        self.releases = False
        self.transfer_bytes = TransferBytes()

    @abstractmethod
    def connect(self, source: GradientSource) -> None:
        """Ask this source from now on; it reports gradients by :meth:`on_grad_ready`."""

    def on_grad_ready(
        self, update: SlotUpdate, claim: Claim | None = None, writes_are_counted: bool = True
    ) -> None:
        """A gradient is complete; the step will be given the same update but for the multiplier, or
        what the claim was released to. Never raises: what goes wrong is reported by
        :meth:`collect`.

        Args:
            writes_are_counted: torch counts every write to it, which it does not for the local
                tensor of a DTensor.
        """

    def collect(self) -> None:
        """Wait for what was begun early.

        Raises:
            WorkerError: it failed. All of it is dropped; nothing was stepped.
        """

    def known_sum_of_squares(self, grad: Tensor) -> float | None:
        """Of a gradient that was measured early and has not changed since; else None."""
        return None

    def state_exposed(self, slot: Slot) -> None:
        """The caller gets live tensors of a slot of the host's optimizer, and may write to them
        without a trace."""

    def forget_released(self) -> None:
        """Released gradients are of no use any more."""

    @property
    def released_bytes(self) -> int:
        """Bytes of gradients in the model's dtype that the device does without where they are
        released."""
        return 0

    def skip(self) -> None:
        """This step changes nothing: drop what was begun early."""

    def discard(self) -> None:
        """Drop what was begun early; the step does it again."""

    @abstractmethod
    def fetch(self, tensor: Tensor) -> Callable[[], Tensor]:
        """Start to copy a small tensor to the host; the result waits for the copy and returns
        it."""

    def notes(self) -> tuple[str, ...]:
        """How the host's part is stepped, in words."""
        return ()

    @abstractmethod
    def metrics(self) -> dict[str, float]:
        """Milliseconds of the last step's stages, and how speculation did so far."""
