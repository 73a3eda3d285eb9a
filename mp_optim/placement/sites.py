"""Sites: where the windows of one step are stepped. On the host that is where their source lent
them; on the device it is a ring of memory, with the copies between that and the host.

The caller has each window come by ``bring``, which returns its tensors where they are stepped;
calls ``arrive`` before it uses them; steps them; and sends them back by ``send_back``, after all
work that it has queued so far. Before a window is stepped, the one ``lag`` before it has to be back
(``wait_for``): the next one takes its room. ``wait`` ends all copies. ``up`` and ``down`` are bytes
that were copied between accelerator and host.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from mp_optim.placement.windows import GRAD, IN_FLIGHT, OUTPUT, Tensors, Window
from mp_optim.process.host_memory import TensorSpec, aligned_bytes
from mp_optim.process.leases import before_writing
from mp_optim.process.transfer import Transfer


class HostSite:
    """Windows are stepped in the host memory that they were lent in; gradients come to them from
    the device, and parameters go there.

    Args:
        windows: of the step, with what comes along where it is on the device.
    """

    lag = 1

    def __init__(self, transfer: Transfer, windows: Sequence[Window]) -> None:
        self._transfer, self._windows = transfer, windows
        self._coming: list[Any] = []
        self._going: dict[int, Any] = {}
        self._brought = 0
        self.up = self.down = 0

    def bring(self, window: Window) -> list[Tensors]:
        grads = _along(self._windows[self._brought], GRAD)
        if grads:
            ticket = self._transfer.download(_along(window, GRAD), grads)
            self._coming.append(ticket)
            self.down += sum(grad.nbytes for grad in grads)
        self._brought += 1
        return [{**piece.held, **piece.along} for piece in window]

    def arrive(self) -> None:
        while self._coming:
            ticket = self._coming.pop()
            self._transfer.wait(ticket)

    def send_back(self, number: int, window: Window, resident: Sequence[Tensors]) -> None:
        outputs = _along(self._windows[number], OUTPUT)
        if outputs:
            before_writing(outputs)
            self._going[number] = self._transfer.upload(outputs, _along(window, OUTPUT))
            self.up += sum(output.nbytes for output in outputs)

    def wait_for(self, number: int) -> None:
        if number in self._going:
            self._transfer.wait(self._going.pop(number))

    def wait(self) -> None:
        self.arrive()
        for number in list(self._going):
            self.wait_for(number)


def _along(window: Window, key: str) -> list[Tensor]:
    return [piece.along[key] for piece in window if key in piece.along]


def view_of(memory: Tensor, start: int, form: TensorSpec) -> Tensor:
    """A contiguous tensor in 1-D uint8 memory, which shares its storage."""
    shape, dtype = form
    size = shape.numel() * dtype.itemsize
    return memory[start : start + size].view(dtype).view(shape)


class DeviceRing:
    """Windows are stepped in memory of the device; a gradient that comes along waits on the host.

    NOTE: an upload waits on the device for nothing that was queued since the ring was made: what
    its room had before is on the host by then (``wait_for``). So it runs beside all steps. What
    was brought down is on the host after :meth:`wait`.

    Args:
        sizes: bytes of each window's memory, which is given back with the ring.
        like: a tensor on the device.

    Attributes:
        device: where windows are stepped.
    """

    lag = IN_FLIGHT - 1

    def __init__(self, transfer: Transfer, sizes: Sequence[int], like: Tensor) -> None:
        self._transfer = transfer
        self._rooms = [like.new_empty(size, dtype=torch.uint8) for size in sizes]
        self._tickets: list[list[Any]] = [[] for _ in sizes]  # of each room's copies
        self.device, self._made = like.device, transfer.mark()
        self._uploads = 0
        self.up = self.down = 0

    def bring(self, window: Window) -> list[Tensors]:
        room = self._uploads % len(self._rooms)
        self._uploads += 1
        memory, used = self._rooms[room], 0
        resident: list[Tensors] = []
        for piece in window:
            tensors = {}
            for key, each in (*piece.held.items(), *piece.along.items()):
                tensors[key] = view_of(memory, used, (each.shape, each.dtype))
                used += aligned_bytes(each.numel(), each.dtype)
            resident.append(tensors)
        sources = _tensors([{**piece.held, **piece.along} for piece in window])
        ticket = self._transfer.upload(_tensors(resident), sources, self._made)
        self._tickets[room].append(ticket)
        self.up += sum(tensor.nbytes for tensor in sources)
        return resident

    def arrive(self) -> None:
        self._transfer.join()

    def send_back(self, number: int, window: Window, resident: Sequence[Tensors]) -> None:
        held = _tensors([piece.held for piece in window])
        before_writing(held)
        pairs = zip(window, resident, strict=True)
        stepped = [tensors[key] for piece, tensors in pairs for key in piece.held]
        ticket = self._transfer.download(held, stepped)
        self._tickets[number % len(self._rooms)].append(ticket)
        self.down += sum(tensor.nbytes for tensor in held)

    def wait_for(self, number: int) -> None:
        tickets = self._tickets[number % len(self._rooms)]
        while tickets:
            ticket = tickets.pop()
            self._transfer.wait(ticket)

    def wait(self) -> None:
        for number in range(len(self._rooms)):
            self.wait_for(number)


def _tensors(of_pieces: Sequence[Tensors]) -> list[Tensor]:
    return [tensor for tensors in of_pieces for tensor in tensors.values()]


Site = HostSite | DeviceRing
