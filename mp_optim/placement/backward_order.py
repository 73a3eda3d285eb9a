"""In which order gradients get ready, learnt from the first backward."""

from __future__ import annotations

from collections.abc import Iterable

from mp_optim.slots import Slot, SlotUpdates


class BackwardOrder:
    """The order of an optimizer's slots.

    Attributes:
        is_known: a backward was seen, and a step after it.
    """

    def __init__(self) -> None:
        self.is_known = False
        self._seen: dict[Slot, None] = {}

    def note(self, slot: Slot) -> None:
        """A slot's complete gradient got ready."""
        self._seen.setdefault(slot)

    def forget(self) -> None:
        """There are other slots."""
        self.is_known, self._seen = False, {}

    def learn(self, slots: Iterable[Slot], updates: SlotUpdates) -> list[Slot] | None:
        """After a step: all slots in the order of the first backward, if that was not known, is
        another than theirs, and may be followed.

        Args:
            updates: of the step.
        """
        if self.is_known or not self._seen:
            return None
        self.is_known = True
        before = list(slots)
        order = list({**self._seen, **dict.fromkeys(before)})
        return None if order == before or _are_split(updates) else order


def _are_split(updates: SlotUpdates) -> bool:
    """Whether other ranks, which may see gradients in another order, hold the rest of a
    parameter."""
    layouts = (layout for layout in updates.layouts if layout is not None)
    return any(updates.shard_groups) or any(
        layout.splits_matrices for layout in layouts
    )
