"""Copies between accelerator and host behind one small interface: copy, wait, join.

The only module that talks to CUDA streams. Code above must be right for every implementation; one
in the tests delays each copy until the caller waits for it, so a missing wait fails on any machine.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from mp_optim.process.host_memory import zeros_host
from mp_optim.process.torch_modes import in_own_modes


class Transfer(Protocol):
    """Asynchronous copies. A ticket stands for a batch of copies that may still be under way.

    ``to`` and ``sources`` are parallel lists (with thousands of tensors, an object for each pair
    would cost more than the copies) of the same shapes and dtypes; on the host, contiguous.
    """

    def empty_host(self, num_bytes: int, pin: bool) -> Tensor:
        """A 1-D uint8 host buffer, page-locked if ``pin`` and the accelerator can use it."""

    def mark(self) -> Any:
        """A point in the work that the calling thread has queued so far, for ``download(after=)``
        in another thread."""

    def download(
        self, to: Sequence[Tensor], sources: Sequence[Tensor], after: Any = None
    ) -> Any:
        """Start copying accelerator tensors to the host, after a mark or all work queued so far.
        Returns a ticket."""

    def upload(self, to: Sequence[Tensor], sources: Sequence[Tensor]) -> Any:
        """Start copying host tensors to the accelerator, after all work queued so far. Returns a
        ticket."""

    def wait(self, ticket: Any) -> None:
        """Block the host until the ticket's copies are done."""

    def join(self) -> None:
        """Make accelerator work queued from now on see every upload started so far."""


class ImmediateTransfer:
    """Both places are host memory: copies happen at once and waiting is free."""

    def empty_host(self, num_bytes: int, pin: bool) -> Tensor:
        return zeros_host(num_bytes)

    def mark(self) -> None: ...

    def download(
        self, to: Sequence[Tensor], sources: Sequence[Tensor], after: None = None
    ) -> None:
        if to:
            torch._foreach_copy_(list(to), list(sources))

    def upload(self, to: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
        self.download(to, sources)

    def wait(self, ticket: None) -> None: ...

    def join(self) -> None: ...


class MetaTransfer(ImmediateTransfer):
    """Nothing is anywhere: the host of a model on the meta device."""

    def empty_host(self, num_bytes: int, pin: bool) -> Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8, device="meta")


class CudaTransfer:
    """One side stream per direction, so downloads, uploads and kernels overlap.

    NOTE: the thread that calls may have another current device: a new one has the first, and so
    has a caller that never set it. What torch restores there, and what the runtime does for a
    thread that only waits, would set up that device: half a gigabyte of it for every rank.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._down = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._up = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    @in_own_modes
    def empty_host(self, num_bytes: int, pin: bool) -> Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8, device="cpu", pin_memory=pin)

    def mark(self) -> torch.cuda.Event:
        with torch.cuda.device(self._device):
            event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record()
            return event

    def _copy(
        self,
        stream: torch.cuda.Stream,
        to: Sequence[Tensor],
        sources: Sequence[Tensor],
        after: torch.cuda.Event | None = None,
    ) -> torch.cuda.Event:
        with torch.cuda.device(self._device):
            if after is None:
                stream.wait_stream(torch.cuda.current_stream())
            else:
                stream.wait_event(after)
            with torch.cuda.stream(stream):
                for destination, source in zip(to, sources, strict=True):
                    destination.copy_(source, non_blocking=True)
                event = torch.cuda.Event()  # type: ignore[no-untyped-call]
                event.record(stream)
        # NOTE: the caller may free what lies on the accelerator while it is still being copied.
        for tensor in sources if stream is self._down else to:
            tensor.record_stream(stream)
        return event

    def download(
        self,
        to: Sequence[Tensor],
        sources: Sequence[Tensor],
        after: torch.cuda.Event | None = None,
    ) -> torch.cuda.Event:
        return self._copy(self._down, to, sources, after)

    def upload(
        self, to: Sequence[Tensor], sources: Sequence[Tensor]
    ) -> torch.cuda.Event:
        return self._copy(self._up, to, sources)

    def wait(self, ticket: torch.cuda.Event) -> None:
        with torch.cuda.device(self._device):
            ticket.synchronize()

    def join(self) -> None:
        with torch.cuda.device(self._device):
            torch.cuda.current_stream().wait_stream(self._up)


def transfer_for(device: torch.device) -> Transfer:
    """The transfer between ``device`` and the host.

    Raises:
        ValueError: for an accelerator that has no implementation here.
    """
    if device.type == "cpu":
        return ImmediateTransfer()
    if device.type == "meta":
        return MetaTransfer()
    if device.type == "cuda":
        return CudaTransfer(device)
    raise ValueError(
        f"optimizer_cpu_offload=True: no transfer for device type {device.type!r} (available: cpu, "
        "cuda); set optimizer_cpu_offload=False"
    )
