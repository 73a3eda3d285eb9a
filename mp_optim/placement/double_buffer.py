"""The other half of main params and moments: a step is written there while the present values stay.

Tensors stay the same objects. Publishing a step gives them the memory of the other half, and the memory they had
becomes the other half; taking a step back is doing nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from torch import Tensor

from mp_optim.placement.arena import HostArena, aligned_bytes
from mp_optim.placement.transfer import Transfer

__all__ = ["DoubleBuffer"]

Key = tuple[int, int, str]
"""Group, position, and which of the slot's tensors."""


@dataclass(slots=True)
class _Twin:
    """A tensor in use, the memory it has, and as much again."""

    live: Tensor
    mine: Tensor
    other: Tensor

    def fits(self, live: Tensor) -> bool:
        return live is self.live and live.data_ptr() == self.mine.data_ptr() and live.shape == self.mine.shape

    def flip(self) -> None:
        self.mine, self.other = self.other, self.mine
        self.live.data = self.mine


class DoubleBuffer:
    """Other halves of some slots' tensors, in one allocation.

    Args:
        pin: page-lock it, as main params are.
    """

    def __init__(self, transfer: Transfer, pin: bool) -> None:
        self._transfer = transfer
        self._pin = pin
        self._twins: dict[Key, _Twin] = {}
        self._arena: HostArena | None = None

    @property
    def bytes(self) -> int:
        """What it holds."""
        return sum(twin.other.nbytes for twin in self._twins.values())

    def reserve(self, tensors: Iterable[Tensor]) -> None:
        """Make room for the other halves of these, if there is none yet. Nothing is written before it is used."""
        if self._arena is None:
            self._arena = HostArena(self._transfer, sum(aligned_bytes(t.numel(), t.dtype) for t in tensors), self._pin)

    def others(self, keys: Sequence[Key], live: Sequence[Tensor]) -> list[Tensor]:
        """The other half of each tensor; its values are of no meaning."""
        return [self._twin(key, tensor).other for key, tensor in zip(keys, live, strict=True)]

    def _twin(self, key: Key, live: Tensor) -> _Twin:
        twin = self._twins.get(key)
        if twin is not None and twin.fits(live):
            return twin
        if twin is not None and twin.other.shape == live.shape and twin.other.dtype == live.dtype:
            other = twin.other  # the tensor was replaced: the room for it stays
        else:
            assert self._arena is not None
            other = self._arena.take(live.shape, live.dtype)
        self._twins[key] = _Twin(live, live.data, other)
        return self._twins[key]

    def flip(self, keys: Iterable[Key]) -> None:
        """Exchange the halves of these tensors."""
        for key in keys:
            self._twins[key].flip()
