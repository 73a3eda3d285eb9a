"""Work that a device is given once and repeats on demand."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TypeVar

import torch

_Result = TypeVar("_Result")


class CudaGraph:
    """A CUDA graph with a memory pool of its own. Its tensors, also those it made, are at the same
    addresses in every replay. Other threads may use the device while it is captured."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._graph = torch.cuda.CUDAGraph()
        # NOTE: torch's own stream for captures belongs to the device that was current when any
        # graph was first captured; on another device nothing would be captured, in silence.
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def capture(self, work: Callable[[], _Result]) -> _Result:
        """Let ``work`` queue what it does into the graph; nothing happens on the device before
        :meth:`replay`."""
        with (
            torch.cuda.device(self._device),
            torch.cuda.graph(self._graph, stream=self._stream, capture_error_mode="thread_local"),
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
    if device.type != "cuda":
        raise ValueError(
            f"optimizer_cuda_graph=True: the model's parameters are on {device.type}, where there "
            "are no CUDA graphs; move the model to a GPU, or set optimizer_cuda_graph=False"
        )
    return partial(CudaGraph, device)
