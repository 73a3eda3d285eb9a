"""What a rule keeps for each param group, and which slots of a step are in which group."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from mp_optim.slots import CachedTensorList, Slot
from mp_optim.slots.tensor_layout import part_of


class Share(NamedTuple):
    """The slots of a step that are in one group: which of the updates, and at which positions."""

    group: int
    members: list[int]
    positions: list[int]


def updates_by_group(slots: Sequence[Slot]) -> list[Share]:
    """The shares of all groups that occur, in the order in which they do."""
    shares: dict[int, Share] = {}
    for index, slot in enumerate(slots):
        share = shares.setdefault(slot.group, Share(slot.group, [], []))
        share.members.append(index)
        share.positions.append(slot.position)
    return list(shares.values())


class GroupState:
    """State of one param group.

    Attributes:
        parts: which part of a parameter each slot is.
        steps: FP32, shape (slots,), on the CPU: how often each slot was stepped. A slot's ``step``
            is a view of it.
        slots: state tensors of each slot; empty until they are read.
        mains, shapes: the tensor each slot's state was last found to fit, and its shape then.
        steady_mains: all of them, if they are this package's own tensors and not a model's
            parameters, whose memory others may move (``param.data = ...``).
    """

    def __init__(self, params: Sequence[Tensor]) -> None:
        count = len(params)
        self.parts = [part_of(param) for param in params]
        self.steps = torch.zeros(count, dtype=torch.float32, device="cpu")
        self.slots: list[dict[str, Tensor]] = [{} for _ in range(count)]
        self.mains: list[Tensor | None] = [None] * count
        self.shapes: list[torch.Size | None] = [None] * count
        self.steady_mains: CachedTensorList | None = None
        self._whole: dict[str, CachedTensorList] = {}
        self._positions = list(range(count))

    def is_whole(self, positions: Sequence[int]) -> bool:
        """Whether these are all positions, in order."""
        return positions == self._positions

    def tensors(self, name: str, positions: Sequence[int]) -> list[Tensor]:
        """State tensors of that name; the same list every time as long as all slots are asked
        for."""
        if not self.is_whole(positions):
            return [self.slots[position][name] for position in positions]
        if name not in self._whole:
            self._whole[name] = CachedTensorList(
                slot[name] for slot in self.slots
            ).hold()
        return self._whole[name]

    def replaced(self) -> None:
        """Forget lists of tensors: one of them is another tensor now."""
        self._whole.clear()
        self.steady_mains = None

    def was_stepped(self, position: int) -> bool:
        """Whether a slot was ever stepped."""
        # unlike item(), tolist() is no question to a device
        return bool(self.steps[position : position + 1].tolist()[0] > 0)

    def count(self, positions: Sequence[int], by: int = 1) -> None:
        """Add a step to the given slots; -1 takes it back."""
        if len(positions) == len(self.slots):
            self.steps += by
        else:
            self.steps[torch.tensor(positions, device="cpu")] += by
