"""Windows that are stepped where they lie, by the host; gradients come to them and parameters go
from them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from mp_optim.placement.windows import GRAD, OUTPUT, Tensors, Window
from mp_optim.process.leases import before_writing
from mp_optim.process.transfer import Transfer


class HostWindows:
    """Windows of one step in host memory: a
    :class:`~mp_optim.placement.window_ring.SteppingPlace`.

    Args:
        windows: of the step, with the gradients and outputs of the device, if those have to be
            copied.
    """

    lag = 1

    def __init__(self, transfer: Transfer, windows: Sequence[Window]) -> None:
        self._transfer, self._windows = transfer, windows
        self._coming: list[Any] = []
        self._going: dict[int, Any] = {}
        self._brought = 0
        self.up = self.down = 0

    def bring(self, window: Window) -> list[Tensors]:
        """See :class:`~mp_optim.placement.window_ring.SteppingPlace`."""
        grads = _beside(self._windows[self._brought], GRAD)
        if grads:
            ticket = self._transfer.download(_beside(window, GRAD), grads)
            self._coming.append(ticket)
            self.down += sum(grad.nbytes for grad in grads)
        self._brought += 1
        return [piece.held for piece in window]

    def arrive(self) -> None:
        """See :class:`~mp_optim.placement.window_ring.SteppingPlace`."""
        while self._coming:
            ticket = self._coming.pop()
            self._transfer.wait(ticket)

    def send_back(self, number: int, window: Window, lying: Sequence[Tensors]) -> None:
        """See :class:`~mp_optim.placement.window_ring.SteppingPlace`."""
        outputs = _beside(self._windows[number], OUTPUT)
        if outputs:
            before_writing(outputs)
            self._going[number] = self._transfer.upload(
                outputs, _beside(window, OUTPUT)
            )
            self.up += sum(output.nbytes for output in outputs)

    def wait_for(self, number: int) -> None:
        """See :class:`~mp_optim.placement.window_ring.SteppingPlace`."""
        if number in self._going:
            self._transfer.wait(self._going.pop(number))

    def wait(self) -> None:
        """See :class:`~mp_optim.placement.window_ring.SteppingPlace`."""
        self.arrive()
        for number in list(self._going):
            self.wait_for(number)


def _beside(window: Window, key: str) -> list[Tensor]:
    return [piece.beside[key] for piece in window if key in piece.beside]
