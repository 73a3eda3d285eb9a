"""Memory that main params of offloaded slots are born in: one block on the host, or a file."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from mp_optim.placement.state_file import StateFile
from mp_optim.process.host_memory import Block, aligned_bytes


class MainMemory:
    """Room for the main params of an optimizer.

    Args:
        state_file: takes them, if there is one.
        forms: elements and dtype of each that is expected, for a block of just their size.
        empty_host: makes host memory of so many bytes.
    """

    def __init__(
        self,
        state_file: StateFile | None,
        forms: Iterable[tuple[int, torch.dtype]],
        empty_host: Callable[[int], Tensor],
    ) -> None:
        self._file = state_file
        sizes = [aligned_bytes(numel, dtype) for numel, dtype in forms]
        self._block = Block(0 if state_file else sum(sizes), empty_host)

    @property
    def host_bytes(self) -> int:
        """What was asked for in one piece."""
        return self._block.capacity

    def copy(self, source: Tensor, dtype: torch.dtype) -> Tensor:
        """The values of a tensor, in this memory."""
        if self._file is not None:
            return self._file.take(source.shape, dtype).copy_(source)
        block = self._block.with_room(aligned_bytes(source.numel(), dtype))
        return block.take(source.shape, dtype).copy_(source)
