"""The ring of windows on the device, and the copies between them and the host."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from mp_optim.placement.transfer import Transfer
from mp_optim.placement.windows import Tensors, Window
from mp_optim.process.host_memory import Form, aligned_bytes


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
                tensors[key] = _view(self._memory, used, (held.shape, held.dtype))
                used += aligned_bytes(held.numel(), held.dtype)
            lying.append(tensors)
        return lying


def _view(memory: Tensor, start: int, form: Form) -> Tensor:
    shape, dtype = form
    size = shape.numel() * dtype.itemsize
    return memory[start : start + size].view(dtype).view(shape)


class WindowRing:
    """Windows of one step, in turn: each is brought up, stepped by the caller, brought down.

    NOTE: an upload starts after all work that is queued on the device by then. So window ``n + 1``
    is brought up before window ``n`` is stepped: it waits for the steps before, and runs beside
    that of ``n``. What was brought down is on the host after :meth:`wait`.

    Args:
        sizes: bytes of each window's memory, which is given back with the ring.
        like: a tensor on the device.

    Attributes:
        up, down: bytes that were copied.
    """

    def __init__(self, transfer: Transfer, sizes: Sequence[int], like: Tensor) -> None:
        self._transfer = transfer
        self._lanes = [_Lane(like.new_empty(size, dtype=torch.uint8)) for size in sizes]
        self._uploads = 0
        self.up = self.down = 0

    def upload(self, window: Window) -> list[Tensors]:
        """Start to bring up the next window, as soon as one is free. Returns its tensors on the
        device; :meth:`arrive` comes before they are used."""
        lane = self._lanes[self._uploads % len(self._lanes)]
        self._uploads += 1
        self._wait(lane)
        lying = lane.lay_out(window)
        held = _tensors([piece.held for piece in window])
        lane.tickets.append(self._transfer.upload(_tensors(lying), held))
        self.up += sum(tensor.nbytes for tensor in held)
        return lying

    def arrive(self) -> None:
        """Let work that is queued from now on find the windows that were brought up so far."""
        self._transfer.join()

    def download(self, number: int, window: Window, lying: Sequence[Tensors]) -> None:
        """Start to bring down a window, the ``number``-th of the step, after all work queued so
        far."""
        lane = self._lanes[number % len(self._lanes)]
        held = _tensors([piece.held for piece in window])
        lane.tickets.append(self._transfer.download(held, _tensors(lying)))
        self.down += sum(tensor.nbytes for tensor in held)

    def wait(self) -> None:
        """Wait until no copy is under way."""
        for lane in self._lanes:
            self._wait(lane)

    def _wait(self, lane: _Lane) -> None:
        while lane.tickets:
            ticket = lane.tickets.pop()
            self._transfer.wait(ticket)


def _tensors(of_pieces: Sequence[Tensors]) -> list[Tensor]:
    return [tensor for tensors in of_pieces for tensor in tensors.values()]
