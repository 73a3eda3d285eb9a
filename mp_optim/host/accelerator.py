"""The accelerator, as far as the package speaks of one: the only module that names ``torch.cuda``.

:class:`Accelerator` is any kind that torch knows, by what ``torch.accelerator`` has for all of
them. A kind that can do more, or does something better by functions of its own, is a class of it in
:data:`KINDS`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch

Stream = torch.Stream
Event = torch.Event


class Accelerator:
    """A kind of accelerator. It copies from and to memory that torch's allocator locked; registered
    memory is for kinds that override these methods.

    Args:
        type: of its devices, as torch has it.
        name: in messages.
    """

    def __init__(self, type: str, name: str) -> None:
        self.type, self.name = type, name

    def is_available(self) -> bool:
        """Whether torch finds a device."""
        found = torch.accelerator.current_accelerator()
        return found is not None and found.type == self.type and self._module().is_available()

    def is_initialized(self) -> bool:
        """Whether this process has used a device; not so in a forked child."""
        return bool(self._module().is_initialized())

    def current(self) -> torch.device:
        """The calling thread's device."""
        return self.current_stream().device

    def _module(self) -> Any:
        """What torch has for this kind alone, by names that are the same for most."""
        return torch.get_device_module(self.type)

    # -- what a thread queues -----------------------------------------------------------------

    def on(self, device: torch.device) -> AbstractContextManager[Any]:
        """Make a device the thread's current one for a block."""
        return _queued_on(torch.accelerator.current_stream(device))

    def stream(self, device: torch.device) -> Stream:
        """A new stream of a device."""
        return torch.Stream(device)

    def current_stream(self) -> Stream:
        """The stream of the current device on which the calling thread queues."""
        return torch.accelerator.current_stream()

    def queue_on(self, stream: Stream) -> AbstractContextManager[Any]:
        """Queue the work of a block on a stream, whose device is current meanwhile."""
        return _queued_on(stream)

    def event(self, sleeps: bool = False) -> Event:
        """A point of a stream, once it is recorded.

        Args:
            sleeps: a thread that waits for it sleeps, where the kind has such events; else it spins
                and keeps a core busy.
        """
        return torch.Event(self.type)

    def synchronize(self) -> None:
        """Wait for all that is queued on the current device."""
        torch.accelerator.synchronize()

    def is_capturing(self) -> bool:
        """Whether the current stream records a graph."""
        return False

    # -- memory of the host ------------------------------------------------------------------------

    def register(self, address: int, num_bytes: int) -> str | None:
        """Lock pages of the host, which the current device then copies by itself; returns what the
        runtime says against it.

        Raises:
            AssertionError, AttributeError, RuntimeError: there is no runtime, or an older one.
        """
        return f"torch registers none for {self.name}"

    def unregister(self, address: int) -> bool:
        """Undo :meth:`register`; whether the runtime did."""
        return False

    # -- what there is --------------------------------------------------------------------------

    def devices(self) -> tuple[Any, ...]:
        """torch's properties of each device, by index."""
        module = self._module()
        return tuple(module.get_device_properties(index) for index in range(module.device_count()))

    def memory_bytes(self, device: torch.device) -> int:
        """All memory of a device."""
        return int(self._module().get_device_properties(device).total_memory)

    def has_bf16(self) -> bool:
        return bool(self._module().is_bf16_supported())


@contextmanager
def _queued_on(stream: Stream) -> Iterator[None]:
    before = torch.accelerator.current_stream()
    there = torch.accelerator.current_stream(stream.device)
    torch.accelerator.set_stream(stream)  # and its device
    try:
        yield
    finally:
        torch.accelerator.set_stream(there)
        torch.accelerator.set_stream(before)


class Cuda(Accelerator):
    """NVIDIA's, and AMD's, which torch calls by the same names. It has
    registered host memory, and events that a thread waits for asleep, which a
    :class:`torch.Event` leaves out.

    NOTE: ``torch.cuda`` restores the device that was current before without setting it up;
    ``torch.accelerator.set_stream`` sets it up.
    """

    def is_available(self) -> bool:
        return torch.cuda.is_available()

    def on(self, device: torch.device) -> AbstractContextManager[Any]:
        return torch.cuda.device(device)

    def stream(self, device: torch.device) -> Stream:
        return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def queue_on(self, stream: Stream) -> AbstractContextManager[Any]:
        return torch.cuda.stream(stream)  # type: ignore[arg-type]

    def event(self, sleeps: bool = False) -> Event:
        return torch.cuda.Event(blocking=sleeps)  # type: ignore[no-untyped-call]

    def is_capturing(self) -> bool:
        return bool(torch.cuda.is_current_stream_capturing())

    def register(self, address: int, num_bytes: int) -> str | None:
        runtime = self._runtime()
        status = runtime.cudaHostRegister(address, num_bytes, 0)
        return f"cudaHostRegister: {runtime.cudaGetErrorString(status)}" if int(status) else None

    def unregister(self, address: int) -> bool:
        return not int(self._runtime().cudaHostUnregister(address))

    def _runtime(self) -> Any:
        return torch.cuda.cudart()  # type: ignore[no-untyped-call]


CUDA = Cuda("cuda", "CUDA")
KINDS: dict[str, Accelerator] = {CUDA.type: CUDA}
"""By type of device. Another kind of accelerator enters here."""


def accelerator_of(device: torch.device) -> Accelerator | None:
    """What runs a device; None for the host, meta tensors, and what is not known here."""
    return KINDS.get(device.type)


def current_device(device: torch.device) -> AbstractContextManager[Any]:
    """Make a device the current one: kernels launch on the current device's stream whatever they
    are handed. Nothing for the host."""
    accelerator = accelerator_of(device)
    return nullcontext() if accelerator is None else accelerator.on(device)


def is_capturing(device: torch.device) -> bool:
    """Whether the current stream of a device's kind records a graph."""
    accelerator = accelerator_of(device)
    return accelerator is not None and accelerator.is_capturing()
