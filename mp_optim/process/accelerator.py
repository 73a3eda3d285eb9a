"""The accelerator, as far as the package speaks of one: the only module that names ``torch.cuda``.

Another kind of accelerator is one more class with these methods, in ``_KINDS``. NOTE: what torch
2.6 has for every kind (``torch.accelerator``) answers for whichever the build has, also Apple's,
which has neither 64-bit floats nor host memory that is registered; and it has no guard.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

Stream = torch.cuda.Stream
Event = torch.cuda.Event


class Cuda:
    """NVIDIA's, and AMD's, which torch calls by the same names."""

    type = "cuda"
    name = "CUDA"

    def is_available(self) -> bool:
        """Whether torch finds a device."""
        return torch.cuda.is_available()

    def is_initialized(self) -> bool:
        """Whether this process has used a device; not so in a forked child."""
        return bool(torch.cuda.is_initialized())  # type: ignore[no-untyped-call]

    def current(self) -> torch.device:
        """The calling thread's device."""
        return torch.device(self.type, torch.cuda.current_device())

    # -- what a thread queues -----------------------------------------------------------------

    def on(self, device: torch.device) -> AbstractContextManager[Any]:
        """Make a device the thread's current one for a block; what was current before is restored
        without being set up."""
        return torch.cuda.device(device)

    def stream(self, device: torch.device) -> Stream:
        """A new stream of a device."""
        return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def current_stream(self) -> Stream:
        return torch.cuda.current_stream()

    def queue_on(self, stream: Stream) -> AbstractContextManager[Any]:
        """Queue the work of a block on a stream."""
        return torch.cuda.stream(stream)

    def event(self, sleeps: bool = False) -> Event:
        """A point of a stream, once it is recorded.

        Args:
            sleeps: a thread that waits for it sleeps; else it spins and keeps a core busy.
        """
        return torch.cuda.Event(blocking=sleeps)  # type: ignore[no-untyped-call]

    def synchronize(self) -> None:
        """Wait for all that is queued on the current device."""
        torch.cuda.synchronize()

    def is_capturing(self) -> bool:
        """Whether the current stream records a graph."""
        return bool(torch.cuda.is_current_stream_capturing())

    def new_graph(self) -> torch.cuda.CUDAGraph:
        return torch.cuda.CUDAGraph()

    def capture(self, graph: torch.cuda.CUDAGraph, stream: Stream) -> AbstractContextManager[Any]:
        """Record what a block queues on a stream; other threads may use the device meanwhile."""
        return torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local")

    # -- memory of the host ------------------------------------------------------------------------

    def register(self, address: int, num_bytes: int) -> str | None:
        """Lock pages of the host, which the current device then copies by itself; returns what the
        runtime says against it.

        Raises:
            AssertionError, AttributeError, RuntimeError: there is no runtime, or an older one.
        """
        runtime = self._runtime()
        status = runtime.cudaHostRegister(address, num_bytes, 0)
        return f"cudaHostRegister: {runtime.cudaGetErrorString(status)}" if int(status) else None

    def unregister(self, address: int) -> bool:
        """Undo :meth:`register`; whether the runtime did."""
        return not int(self._runtime().cudaHostUnregister(address))

    def _runtime(self) -> Any:
        return torch.cuda.cudart()  # type: ignore[no-untyped-call]

    # -- what there is --------------------------------------------------------------------------

    def devices(self) -> tuple[Any, ...]:
        """torch's properties of each device, by index."""
        count = torch.cuda.device_count()
        return tuple(torch.cuda.get_device_properties(index) for index in range(count))

    def memory_bytes(self, device: torch.device) -> int:
        """All memory of a device."""
        return torch.cuda.get_device_properties(device).total_memory

    def identity(self, device: torch.device) -> str:
        """What compiled code depends on: the kind of device, its driver, torch's runtime."""
        found = torch.cuda.get_device_properties(device)
        driver = torch._C._cuda_getDriverVersion()  # type: ignore[attr-defined]
        runtime = torch.version.cuda or torch.version.hip
        return f"{found.name} {found.major}.{found.minor}, driver {driver}, runtime {runtime}"

    def has_bf16(self) -> bool:
        return bool(torch.cuda.is_bf16_supported())


CUDA = Cuda()
_KINDS = {CUDA.type: CUDA}


def accelerator_of(device: torch.device) -> Cuda | None:
    """What runs a device; None for the host, meta tensors, and what is not known here."""
    return _KINDS.get(device.type)


def current_device(device: torch.device) -> AbstractContextManager[Any]:
    """Make a device the current one: kernels launch on the current device's stream whatever they
    are handed. Nothing for the host."""
    accelerator = accelerator_of(device)
    return nullcontext() if accelerator is None else accelerator.on(device)


def is_capturing(device: torch.device) -> bool:
    """Whether the current stream of a device's kind records a graph."""
    accelerator = accelerator_of(device)
    return accelerator is not None and accelerator.is_capturing()
