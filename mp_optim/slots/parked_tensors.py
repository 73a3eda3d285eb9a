"""Main params and state that wait on the host while something else needs the accelerator's memory:
all of them (``offload_to_cpu``), or what was moved by hand (``optimizer.state``)."""

from __future__ import annotations

import weakref
from collections.abc import Iterable

import torch
from torch import Tensor

from mp_optim.process.accelerator import accelerator_of
from mp_optim.process.leases import before_writing

HOST = torch.device("cpu")


class ParkedTensors:
    """Tensors that were given memory of the host, and where they are at home. They stay the same
    objects, so nothing that holds them has to know.

    Attributes:
        homes: by ``id`` of a tensor, itself and its home. A tensor that is gone is not kept.
    """

    def __init__(self) -> None:
        self.homes: dict[int, tuple[weakref.ref[Tensor], torch.device]] = {}

    def park(self, tensors: Iterable[Tensor]) -> None:
        """Move those that are on an accelerator to the host."""
        for tensor in tensors:
            if tensor.device != HOST:
                self.give(tensor, tensor.data.cpu())

    def restore(self) -> None:
        """Move all of them home."""
        for reference, home in list(self.homes.values()):
            if (tensor := reference()) is not None:
                self.give(tensor, tensor.data.to(home))
        self.homes.clear()

    def give(self, tensor: Tensor, memory: Tensor) -> None:
        """Have a tensor be in memory of another device; its values are what is there."""
        before = tensor.device
        before_writing([tensor])  # a save would keep its memory
        tensor.data = memory
        if memory.device != HOST:
            self.homes.pop(id(tensor), None)
        elif before != HOST:
            self.homes[id(tensor)] = self._when_gone(tensor), before

    def home_of(self, tensor: Tensor) -> torch.device:
        """Where a tensor came from that waits here; of any other, where it is."""
        parked = self.homes.get(id(tensor))
        return tensor.device if parked is None else parked[1]

    def _when_gone(self, tensor: Tensor) -> weakref.ref[Tensor]:
        key, homes = id(tensor), self.homes
        return weakref.ref(tensor, lambda _: homes.pop(key, None))


def wait_for(device: torch.device) -> None:
    """Wait for what the calling thread has queued on a device, as are copies that were begun
    without waiting: who reads the host's memory asks no device. Nothing for the host."""
    if (accelerator := accelerator_of(device)) is not None:
        with accelerator.on(device):
            accelerator.current_stream().synchronize()
