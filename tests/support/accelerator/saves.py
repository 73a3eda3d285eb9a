"""Background saves of simulated devices."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from unittest import mock

from torch import Tensor

from mp_optim.checkpoint import save_load, writing
from mp_optim.host import leases
from mp_optim.host.leases import SaveBorrow, Windows
from mp_optim.host.transfer import transfer_for
from support.accelerator.schedules import DEVICE
from support.accelerator.simulation import Simulation, device_at

_WINDOW = 640


class Saves:
    """Downloads of saves, delayed until a save or a writer waits for them.

    Attributes:
        waits: number of writers that waited.
        windows: staging windows of the device.
    """

    def __init__(self, windows: Windows) -> None:
        self.windows, self.waits = windows, 0
        self._go = threading.Event()

    def hold(self) -> None:
        self._go.clear()

    def let_go(self) -> None:
        self._go.set()

    def patches(self) -> Iterator[mock._patch[object]]:
        take, wait = self.windows.take, SaveBorrow.wait_for_devices

        def take_late(num_bytes: int) -> Tensor:
            assert self._go.wait(60)
            return take(num_bytes)

        def wait_for(lent: SaveBorrow, timeout: float | None = None) -> bool:
            self.waits += 1
            if timeout is None:
                self.let_go()
            return wait(lent, timeout)

        yield mock.patch.object(leases, "windows_of", lambda _: self.windows)
        yield mock.patch.object(self.windows, "take", take_late)
        yield mock.patch.object(SaveBorrow, "wait_for_devices", wait_for)


@contextmanager
def saves_of(simulation: Simulation, smallest: int = 5) -> Iterator[Saves]:
    """Make saves download device tensors in many pieces.

    Args:
        smallest: smallest size of a borrowed tensor, in bytes.
    """

    with ExitStack() as context:
        for place, name, value in ((leases, "WINDOW", _WINDOW), (writing, "LENT_FROM", smallest)):
            context.enter_context(mock.patch.object(place, name, value))
        saves = Saves(Windows(transfer_for(device_at(DEVICE))))
        for patch in saves.patches():
            context.enter_context(patch)
        try:
            yield saves
        finally:
            saves.let_go()
            save_load.finish_previous(raise_errors=False)
