"""Saves in the background of what lies on a simulated device."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from unittest import mock

import torch
from torch import Tensor

from mp_optim.checkpoint import save_load, writing
from mp_optim.process import host_memory, leases
from mp_optim.process.leases import SaveBorrow, Windows
from mp_optim.process.transfer import CudaTransfer
from support.accelerator import threads
from support.accelerator.schedules import DEVICE
from support.accelerator.simulation import Simulation

_WINDOW = 640


class Saves:
    """What comes down of the device does so as late as it may: when a save is waited for, or who
    writes waits.

    Attributes:
        waits: how often somebody waited who was about to write.
        windows: of the device.
    """

    def __init__(self, windows: Windows) -> None:
        self.windows, self.waits = windows, 0
        self._go = threading.Event()

    def hold(self) -> None:
        """Of the next save."""
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
    """Have saves find out what lies on a device, and bring it down in many pieces.

    Args:
        smallest: bytes from which tensors are lent.
    """

    def is_on_device(tensor: Tensor) -> bool:
        region = simulation.memory.of(tensor)
        return region is not None and region.device is not None

    with ExitStack() as context:
        for place, name, value in (
            (host_memory, "is_on_host", lambda tensor: not is_on_device(tensor)),
            (leases, "can_stage", is_on_device),
            (leases, "WINDOW", _WINDOW),
            (leases, "threading", threads.stand_in(simulation)),
            (leases, "move", Tensor.copy_),  # which is seen
            (writing, "LENT_FROM", smallest),
        ):
            context.enter_context(mock.patch.object(place, name, value))
        saves = Saves(Windows(CudaTransfer(torch.device("cuda", DEVICE))))
        for patch in saves.patches():
            context.enter_context(patch)
        try:
            yield saves
        finally:
            saves.let_go()
            save_load.wait_for_previous()
