"""The accelerator, as far as the package uses one: the only module that names ``torch.cuda``.

``torch.accelerator`` has the calls that are the same for all kinds. A kind that differs is a
subclass of :class:`Accelerator` in :data:`KINDS`.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

Stream = torch.Stream
Event = torch.Event


class Accelerator:
    """NVIDIA's devices, and AMD's, which torch calls by the same names.

    NOTE: ``torch.cuda`` restores the device that was current before without setting it up;
    ``torch.accelerator.set_stream`` sets it up.

    Args:
        type: of its devices, as torch has it.
    """

    def __init__(self, type: str) -> None:
        self.type = type

    def is_available(self) -> bool:
        """Whether torch finds a device."""
        return torch.cuda.is_available()

    def is_initialized(self) -> bool:
        """Whether this process has used a device; not so in a forked child."""
        return bool(torch.cuda.is_initialized())  # type: ignore[no-untyped-call]

    def current(self) -> torch.device:
        """Return the calling thread's device."""
        return self.current_stream().device

    # -- streams ----------------------------------------------------------------------------------

    def on(self, device: torch.device) -> AbstractContextManager[Any]:
        """Make a device the thread's current one for a block."""
        return torch.cuda.device(device)

    def stream(self, device: torch.device) -> Stream:
        """Return a new stream of a device."""
        return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def current_stream(self) -> Stream:
        """Return the stream of the current device on which the calling thread queues."""
        return torch.accelerator.current_stream()

    def queue_on(self, stream: Stream) -> AbstractContextManager[Any]:
        """Queue the work of a block on a stream, with the stream's device as the current one."""
        return torch.cuda.stream(stream)  # type: ignore[arg-type]

    def event(self, sleeps: bool = False) -> Event:
        """Return a point of a stream, once it is recorded.

        Args:
            sleeps: a thread that waits for it sleeps; else it spins and keeps a core busy.
                :class:`torch.Event` always spins.
        """
        return torch.cuda.Event(blocking=sleeps)  # type: ignore[no-untyped-call]

    def synchronize(self) -> None:
        """Wait for all work that is queued on the current device."""
        torch.accelerator.synchronize()

    def is_capturing(self) -> bool:
        """Whether the current stream records a graph."""
        return bool(torch.cuda.is_current_stream_capturing())

    # -- memory of the host -----------------------------------------------------------------------

    def register(self, address: int, num_bytes: int) -> str | None:
        """Page-lock host memory, so that the current device copies it without the CPU. Return the
        runtime's error text, or None on success.

        Raises:
            AssertionError, AttributeError, RuntimeError: the runtime is missing or too old.
        """
        runtime = self._runtime()
        status = runtime.cudaHostRegister(address, num_bytes, 0)
        return f"cudaHostRegister: {runtime.cudaGetErrorString(status)}" if int(status) else None

    def unregister(self, address: int) -> bool:
        """Undo :meth:`register`; whether the runtime did."""
        return not int(self._runtime().cudaHostUnregister(address))

    def _runtime(self) -> Any:
        return torch.cuda.cudart()  # type: ignore[no-untyped-call]

    # -- properties -------------------------------------------------------------------------------

    def devices(self) -> tuple[Any, ...]:
        """Return torch's properties of each device, by index."""
        return tuple(map(torch.cuda.get_device_properties, range(torch.cuda.device_count())))

    def memory_bytes(self, device: torch.device) -> int:
        """Return the bytes of memory of a device."""
        return int(torch.cuda.get_device_properties(device).total_memory)

    def has_bf16(self) -> bool:
        """Whether the current device computes in bfloat16."""
        return bool(torch.cuda.is_bf16_supported())


CUDA = Accelerator("cuda")
KINDS: dict[str, Accelerator] = {CUDA.type: CUDA}
"""By type of device."""


def accelerator_of(device: torch.device) -> Accelerator | None:
    """Return the interface of a device; None for the host, meta tensors and unknown devices."""
    return KINDS.get(device.type)


def current_device(device: torch.device) -> AbstractContextManager[Any]:
    """Make a device the current one, because kernels launch on the current device's stream. Do
    nothing for the host."""
    accelerator = accelerator_of(device)
    return nullcontext() if accelerator is None else accelerator.on(device)


def is_capturing(device: torch.device) -> bool:
    """Whether the current stream of a device's kind records a graph."""
    accelerator = accelerator_of(device)
    return accelerator is not None and accelerator.is_capturing()
