"""The other half of main params and moments: a step is written there while the present values stay.

Tensors stay the same objects. Publishing a step gives them the memory of the other half, and the
memory they had becomes the other half; taking a step back is doing nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from torch import Tensor

from mp_optim.placement.arena import HostArena, aligned_bytes
from mp_optim.placement.transfer import Transfer

__all__ = ["DoubleBuffer"]

Key = tuple[int, int, str]
"""Group, position, and which of the slot's tensors: a key of its state, or empty for the main
param."""


@dataclass(slots=True)
class _Twin:
    """A tensor in use, the memory it has, and as much again."""

    live: Tensor
    mine: Tensor
    other: Tensor

    def fits(self, live: Tensor) -> bool:
        return (
            live is self.live
            and live.data_ptr() == self.mine.data_ptr()
            and live.shape == self.mine.shape
        )

    def flip(self) -> None:
        self.mine, self.other = self.other, self.mine
        self.live.data = self.mine


class DoubleBuffer:
    """Other halves of some slots' tensors, in one allocation for main params and one for the rest.

    Args:
        pin: page-lock those of main params.
    """

    def __init__(self, transfer: Transfer, pin: bool) -> None:
        self._transfer = transfer
        self._pin = pin
        self._twins: dict[Key, _Twin] = {}
        self._arenas: dict[bool, HostArena] = {}

    @property
    def bytes(self) -> int:
        """What it holds."""
        return sum(twin.other.nbytes for twin in self._twins.values())

    def reserve(self, keys: Sequence[Key], live: Sequence[Tensor]) -> None:
        """Make room for the other halves of these, if there is none yet."""
        if self._arenas:
            return
        sizes = {True: 0, False: 0}
        for key, tensor in zip(keys, live, strict=True):
            sizes[_is_main(key)] += aligned_bytes(tensor.numel(), tensor.dtype)
        self._arenas = {
            main: HostArena(self._transfer, size, self._pin and main)
            for main, size in sizes.items()
        }

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
            other = self._arenas[_is_main(key)].take(live.shape, live.dtype)
        self._twins[key] = _Twin(live, live.data, other)
        return self._twins[key]

    def flip(self, keys: Iterable[Key]) -> None:
        """Exchange the halves of these tensors."""
        for key in keys:
            self._twins[key].flip()


def _is_main(key: Key) -> bool:
    return not key[2]
