"""Interface to the accelerator. No other module of the package names ``torch.cuda``.

``torch.accelerator`` has the calls that are equal for all kinds of accelerators. A kind with other
calls is a subclass of :class:`Accelerator` in :data:`KINDS`.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

Stream = torch.Stream
Event = torch.Event


class Accelerator:
    """Devices of NVIDIA and AMD. Calls for both vendors are in ``torch.cuda``.

    NOTE: at the end of a block, ``torch.cuda`` makes the former device current again without
    initializing the former device. ``torch.accelerator.set_stream`` would initialize the former
    device.

    Args:
        type: device type in torch, such as ``"cuda"``.
    """

    def __init__(self, type: str) -> None:
        self.type = type

    def is_available(self) -> bool:
        """True if torch finds a device."""
        return torch.cuda.is_available()

    def is_initialized(self) -> bool:
        """True if this process has used a device. A forked child of such a process gets False."""
        return bool(torch.cuda.is_initialized())  # type: ignore[no-untyped-call]

    def current(self) -> torch.device:
        """Return the calling thread's current device."""
        return self.current_stream().device

    # -- streams ----------------------------------------------------------------------------------

    def on(self, device: torch.device) -> AbstractContextManager[Any]:
        """Make a device the calling thread's current device inside the block."""
        return torch.cuda.device(device)

    def stream(self, device: torch.device) -> Stream:
        """Return a new stream of a device."""
        return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def current_stream(self) -> Stream:
        """Return the stream of the current device to which the calling thread queues kernels."""
        return torch.accelerator.current_stream()

    def queue_on(self, stream: Stream) -> AbstractContextManager[Any]:
        """Queue kernels of a block on a stream, and make the stream's device the current device."""
        return torch.cuda.stream(stream)  # type: ignore[arg-type]

    def event(self, sleeps: bool = False) -> Event:
        """Return a new event, which the caller records on a stream.

        Args:
            sleeps: True if a thread that waits for the event sleeps. False if the thread spins,
                which keeps a core busy. :class:`torch.Event` always spins.
        """
        return torch.cuda.Event(blocking=sleeps)  # type: ignore[no-untyped-call]

    def synchronize(self) -> None:
        """Wait until all kernels and copies that are queued on the current device are complete."""
        torch.accelerator.synchronize()

    def is_capturing(self) -> bool:
        """True if the current stream records a CUDA graph."""
        return bool(torch.cuda.is_current_stream_capturing())

    # -- memory of the host -----------------------------------------------------------------------

    def register(self, address: int, num_bytes: int) -> str | None:
        """Page-lock host memory, so that the current device copies the memory without the CPU.

        Args:
            address: first address of the memory.
            num_bytes: size of the memory in bytes.

        Returns:
            The runtime's error text, or None on success.

        Raises:
            AssertionError, AttributeError, RuntimeError: the runtime is missing or too old.
        """
        runtime = self._runtime()
        status = runtime.cudaHostRegister(address, num_bytes, 0)
        return f"cudaHostRegister: {runtime.cudaGetErrorString(status)}" if int(status) else None

    def unregister(self, address: int) -> bool:
        """Undo :meth:`register` for memory at an address. True on success."""
        return not int(self._runtime().cudaHostUnregister(address))

    def _runtime(self) -> Any:
        return torch.cuda.cudart()  # type: ignore[no-untyped-call]

    # -- properties -------------------------------------------------------------------------------

    def devices(self) -> tuple[Any, ...]:
        """Return torch's properties of each device, in the order of device indices."""
        return tuple(map(torch.cuda.get_device_properties, range(torch.cuda.device_count())))

    def memory_bytes(self, device: torch.device) -> int:
        """Return the total memory of a device in bytes."""
        return int(torch.cuda.get_device_properties(device).total_memory)


CUDA = Accelerator("cuda")
KINDS: dict[str, Accelerator] = {CUDA.type: CUDA}
"""Interface of each kind of accelerator, by torch's device type."""


def accelerator_of(device: torch.device) -> Accelerator | None:
    """Return the interface to a device's kind; None for the CPU, meta devices and unknown kinds."""
    return KINDS.get(device.type)


def current_device(device: torch.device) -> AbstractContextManager[Any]:
    """Make a device the current device inside a block. Do nothing for the CPU.

    Kernels are launched on the current device's stream.
    """
    accelerator = accelerator_of(device)
    return nullcontext() if accelerator is None else accelerator.on(device)


def is_capturing(device: torch.device) -> bool:
    """True if the current stream of a device's kind records a CUDA graph."""
    accelerator = accelerator_of(device)
    return accelerator is not None and accelerator.is_capturing()
