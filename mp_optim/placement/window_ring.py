"""Where windows are stepped: in a ring on the device, with the copies between it and the host."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from mp_optim.placement.windows import IN_FLIGHT, Tensors, Window
from mp_optim.process.host_memory import Form, aligned_bytes
from mp_optim.process.leases import before_writing
from mp_optim.process.transfer import Transfer


class SteppingPlace(Protocol):
    """Where the windows of one step are stepped, in turn: each comes, is stepped by the caller,
    goes back.

    Attributes:
        lag: before a window is stepped, the one so many before it has to be back: the next one
            takes its room.
        up, down: bytes that were copied between accelerator and host.
    """

    lag: int
    up: int
    down: int

    def bring(self, window: Window) -> Sequence[Tensors]:
        """Start to bring the next window, whose tensors are in host memory; the one ``lag + 1``
        before it is back. Returns its tensors where they are stepped; :meth:`arrive` comes before
        they are used."""

    def arrive(self) -> None:
        """Let work that is queued from now on find the windows that were brought so far."""

    def send_back(self, number: int, window: Window, lying: Sequence[Tensors]) -> None:
        """Start to send back a window, the ``number``-th of the step, after all work queued so
        far."""

    def wait_for(self, number: int) -> None:
        """Wait until a window is back."""

    def wait(self) -> None:
        """Wait until no copy is under way."""


class _Lane:
    """The memory of one window at a time.

    Attributes:
        tickets: of its copies that may be under way.
    """

    def __init__(self, memory: Tensor) -> None:
        self._memory = memory
        self.tickets: list[Any] = []

    def lay_out(self, window: Window) -> list[Tensors]:
        """Tensors like those of the window's pieces, side by side."""
        lying: list[Tensors] = []
        used = 0
        for piece in window:
            tensors = {}
            for key, held in piece.held.items():
                tensors[key] = view_of(self._memory, used, (held.shape, held.dtype))
                used += aligned_bytes(held.numel(), held.dtype)
            lying.append(tensors)
        return lying


def view_of(memory: Tensor, start: int, form: Form) -> Tensor:
    """A contiguous tensor in 1-D uint8 memory, which shares its storage."""
    shape, dtype = form
    size = shape.numel() * dtype.itemsize
    return memory[start : start + size].view(dtype).view(shape)


class WindowRing:
    """Windows of one step on the device.

    NOTE: an upload starts after all work that is queued on the device by then. So window ``n + 1``
    is brought up before window ``n`` is stepped: it waits for the steps before, and runs beside
    that of ``n``. What was brought down is on the host after :meth:`wait`.

    Args:
        sizes: bytes of each window's memory, which is given back with the ring.
        like: a tensor on the device.
    """

    lag = IN_FLIGHT - 1

    def __init__(self, transfer: Transfer, sizes: Sequence[int], like: Tensor) -> None:
        self._transfer = transfer
        self._lanes = [_Lane(like.new_empty(size, dtype=torch.uint8)) for size in sizes]
        self._uploads = 0
        self.up = self.down = 0

    def bring(self, window: Window) -> list[Tensors]:
        """See :class:`SteppingPlace`."""
        lane = self._lane(self._uploads)
        self._uploads += 1
        lying = lane.lay_out(window)
        held = _tensors([piece.held for piece in window])
        lane.tickets.append(self._transfer.upload(_tensors(lying), held))
        self.up += sum(tensor.nbytes for tensor in held)
        return lying

    def arrive(self) -> None:
        """See :class:`SteppingPlace`."""
        self._transfer.join()

    def send_back(self, number: int, window: Window, lying: Sequence[Tensors]) -> None:
        """See :class:`SteppingPlace`."""
        held = _tensors([piece.held for piece in window])
        before_writing(held)
        ticket = self._transfer.download(held, _tensors(lying))
        self._lane(number).tickets.append(ticket)
        self.down += sum(tensor.nbytes for tensor in held)

    def wait_for(self, number: int) -> None:
        """See :class:`SteppingPlace`."""
        self._wait(self._lane(number))

    def wait(self) -> None:
        """See :class:`SteppingPlace`."""
        for lane in self._lanes:
            self._wait(lane)

    def _lane(self, number: int) -> _Lane:
        return self._lanes[number % len(self._lanes)]

    def _wait(self, lane: _Lane) -> None:
        while lane.tickets:
            ticket = lane.tickets.pop()
            self._transfer.wait(ticket)


def _tensors(of_pieces: Sequence[Tensors]) -> list[Tensor]:
    return [tensor for tensors in of_pieces for tensor in tensors.values()]
