"""The door by which state leaves and enters a stack: whoever comes through it meets the model as it
is now."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator
from typing import Any

from torch import Tensor

from mp_optim.slots import Slot
from mp_optim.slots.optimizer import SlotOptimizer

__all__ = ["StateDoor"]


class StateDoor(SlotOptimizer):
    """A stack over a model that others write to and whose tensors they replace.

    State is read by :meth:`slot_state`, :meth:`full_slot_state` and :meth:`named_main_params`, and
    written by :meth:`load_slot_state`; ``state``, ``state_dict``, checkpoints and exports are made
    of these. They are defined here and nowhere else, and first let main params follow the model.
    Stacks provide what lies behind the door.
    """

    # -- what lies behind -------------------------------------------------------------------------

    @abstractmethod
    def follow_model(self, slot: Slot | None = None) -> None:
        """Follow model tensors that were replaced or written from outside since they were last
        seen.

        Args:
            slot: one that has to be followed; by default all. Asking for one costs nothing if it
                has not changed.

        Raises:
            ValueError: a tensor's shape changed, naming the parameter.
        """

    @abstractmethod
    def read_state(self, slot: Slot, *, full: bool) -> dict[str, Any]:
        """A slot's state; with ``full`` everything in FP32."""

    @abstractmethod
    def write_state(self, slot: Slot, state: dict[str, Any]) -> None:
        """Copy ``state`` into a slot."""

    @abstractmethod
    def read_main_param(self, slot: Slot) -> Tensor:
        """See :meth:`named_main_params`."""

    @abstractmethod
    def check_remainders(self, slot: Slot | None = None) -> None:
        """Raise ValueError if a loaded remainder, of one slot or of all, lies beside a parameter
        that it was not saved with, naming the parameters."""

    # -- the door ---------------------------------------------------------------------------------

    def _ready(self, slot: Slot | None = None) -> None:
        self.follow_model(slot)
        self.check_remainders(slot)

    def slot_state(self, slot: Slot) -> dict[str, Any]:
        self._ready(slot)
        return self.read_state(slot, full=False)

    def full_slot_state(self, slot: Slot) -> dict[str, Any]:
        self._ready(slot)
        return self.read_state(slot, full=True)

    def load_slot_state(self, slot: Slot, state: dict[str, Any]) -> None:
        self.follow_model(slot)
        self.write_state(slot, state)

    def named_main_params(self) -> Iterator[tuple[str, Tensor]]:
        """(FQN, FP32 tensor of the parameter's shape), in slot order.

        A DTensor if the parameter is one; of a parameter that a
        :class:`~mp_optim.DistributedOptimizer` splits, what this rank owns, as a flat shard of the
        parameter's shape. The tensor is the live one, or a copy if the main param is stored as a
        remainder.

        Raises:
            BrokenOffError: the last step or load was broken off half-way.
        """
        self.step_mark.check("named_main_params")
        self._ready()
        return ((self.slot_name(slot), self.read_main_param(slot)) for slot in self.slots())

    def main_param(self, slot: Slot) -> Tensor:
        """A slot's main param, as :meth:`named_main_params` has it."""
        self.step_mark.check("main_param")
        self._ready(slot)
        return self.read_main_param(slot)
