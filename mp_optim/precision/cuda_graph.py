"""Work that a device is given once and repeats on demand."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TypeVar

import torch

from mp_optim.process.accelerator import CUDA, Cuda, accelerator_of

_Result = TypeVar("_Result")


class CudaGraph:
    """A CUDA graph with a memory pool of its own. Its tensors, also those it made, are at the same
    addresses in every replay. Other threads may use the device while it is captured."""

    def __init__(self, device: torch.device, accelerator: Cuda = CUDA) -> None:
        self._accelerator, self._device = accelerator, device
        self._graph = accelerator.new_graph()
        # NOTE: torch's own stream for captures belongs to the device that was current when any
        # graph was first captured; on another device nothing would be captured, in silence.
        self._stream = accelerator.stream(device)

    def capture(self, work: Callable[[], _Result]) -> _Result:
        """Let ``work`` queue what it does into the graph; nothing happens on the device before
        :meth:`replay`."""
        with (
            self._accelerator.on(self._device),
            self._accelerator.capture(self._graph, self._stream),
        ):
            return work()

    def replay(self) -> None:
        """Queue the captured work once; nothing waits."""
        self._graph.replay()


def graph_for(device: torch.device) -> Callable[[], CudaGraph]:
    """What makes graphs on a device.

    Raises:
        ValueError: there are none on this type of device.
    """
    accelerator = accelerator_of(device)
    if accelerator is None:
        raise ValueError(
            f"optimizer_cuda_graph=True: the model's parameters are on {device.type}, where there "
            "are no CUDA graphs; move the model to a GPU, or set optimizer_cuda_graph=False"
        )
    return partial(CudaGraph, device, accelerator)
