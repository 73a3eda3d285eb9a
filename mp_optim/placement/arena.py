"""One host allocation, carved into tensors: page-locked memory is rounded up per allocation, so ask
once."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from mp_optim.placement.transfer import Transfer
from mp_optim.process.host_memory import cut

__all__ = ["ALIGNMENT", "HostArena", "aligned_bytes"]

ALIGNMENT = 64
"""Bytes: a cache line, and what wide vector loads like."""


def aligned_bytes(numel: int, dtype: torch.dtype) -> int:
    """Bytes that ``numel`` elements take in an arena."""
    return math.ceil(numel * dtype.itemsize / ALIGNMENT) * ALIGNMENT


class HostArena:
    """A bump allocator over one host buffer that is created at first use.

    Args:
        num_bytes: capacity; :meth:`take` beyond it gets an allocation of its own.
        pin: ask for page-locked memory.
    """

    def __init__(self, transfer: Transfer, num_bytes: int, pin: bool) -> None:
        self._transfer = transfer
        self._pin = pin
        self._buffer: Tensor | None = None
        self.capacity = num_bytes
        self._used = 0

    def take(self, shape: torch.Size, dtype: torch.dtype) -> Tensor:
        """An uninitialised contiguous host tensor that nobody else got since the last
        :meth:`reset`."""
        size = aligned_bytes(shape.numel(), dtype)
        if self._used + size > self.capacity:
            return cut(self._transfer.empty_host(size, self._pin), 0, shape, dtype)
        if self._buffer is None:
            self._buffer = self._transfer.empty_host(self.capacity, self._pin)
        tensor = cut(self._buffer, self._used, shape, dtype)
        self._used += size
        return tensor

    def reset(self) -> None:
        """Hand everything out again. The caller makes sure nobody uses what was taken before."""
        self._used = 0
