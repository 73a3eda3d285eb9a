"""Copies between accelerator and host behind one small interface: copy, wait, join.

The only module that talks to CUDA streams. Code above must be right for every implementation; one
in the tests delays each copy until somebody waits for it, so a missing wait fails on any machine.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from mp_optim.process.host_memory import zeros_host
from mp_optim.process.torch_modes import in_own_modes

__all__ = ["CudaTransfer", "ImmediateTransfer", "MetaTransfer", "Transfer", "transfer_for"]

CopyPair = tuple[Tensor, Tensor]
"""(destination, source): same shape and dtype, destination contiguous on a download."""


class Transfer(Protocol):
    """Asynchronous copies. A ticket stands for a batch of copies that may still be under way."""

    def empty_host(self, num_bytes: int, pin: bool) -> Tensor:
        """A 1-D uint8 host buffer, page-locked if ``pin`` and the accelerator can use it."""

    def mark(self) -> Any:
        """A point in the work that the calling thread has queued so far, for ``download(after=)``
        in another thread."""

    def download(self, pairs: Sequence[CopyPair], after: Any = None) -> Any:
        """Start copying accelerator tensors to the host, after a mark or all work queued so far.
        Returns a ticket."""

    def upload(self, pairs: Sequence[CopyPair]) -> Any:
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

    def download(self, pairs: Sequence[CopyPair], after: None = None) -> None:
        if pairs:
            destinations, sources = zip(*pairs, strict=True)
            torch._foreach_copy_(destinations, sources)

    def upload(self, pairs: Sequence[CopyPair]) -> None:
        self.download(pairs)

    def wait(self, ticket: None) -> None: ...

    def join(self) -> None: ...


class MetaTransfer(ImmediateTransfer):
    """Nothing is anywhere: the host of a model on the meta device."""

    def empty_host(self, num_bytes: int, pin: bool) -> Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8, device="meta")


class CudaTransfer:
    """One side stream per direction, so downloads, uploads and kernels overlap."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._down = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._up = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    @in_own_modes
    def empty_host(self, num_bytes: int, pin: bool) -> Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8, device="cpu", pin_memory=pin)

    def mark(self) -> torch.cuda.Event:
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self._device))
        return event

    def _copy(
        self,
        stream: torch.cuda.Stream,
        pairs: Sequence[CopyPair],
        device_side: int,
        after: torch.cuda.Event | None = None,
    ) -> torch.cuda.Event:
        if after is None:
            stream.wait_stream(torch.cuda.current_stream(self._device))
        else:
            stream.wait_event(after)
        with torch.cuda.stream(stream):
            for pair in pairs:
                pair[0].copy_(pair[1], non_blocking=True)
                pair[device_side].record_stream(stream)
            event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record(stream)
        return event

    def download(
        self, pairs: Sequence[CopyPair], after: torch.cuda.Event | None = None
    ) -> torch.cuda.Event:
        return self._copy(self._down, pairs, device_side=1, after=after)

    def upload(self, pairs: Sequence[CopyPair]) -> torch.cuda.Event:
        return self._copy(self._up, pairs, device_side=0)

    def wait(self, ticket: torch.cuda.Event) -> None:
        ticket.synchronize()

    def join(self) -> None:
        torch.cuda.current_stream(self._device).wait_stream(self._up)


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
