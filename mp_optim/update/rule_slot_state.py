"""A slot's state in the rule that steps it: saved state in its form, checked and loaded."""

from __future__ import annotations

from functools import cached_property
from typing import Any, Protocol

import torch
from torch import Tensor

from mp_optim.process.host_memory import as_tensor
from mp_optim.process.leases import before_writing
from mp_optim.slots import ParamGroups, Slot
from mp_optim.slots.slot_state import (
    SlotState,
    State,
    check_fits,
    check_state,
    check_step,
)
from mp_optim.slots.state_keys import MASTER, REMAINDER, SECOND, STEP, scale_key
from mp_optim.update.codecs import is_packed
from mp_optim.update.state_format import fitted, full_precision, unpacked
from mp_optim.update.unread_moments import without_unread


class Keeper(Protocol):
    """What is asked of the rule."""

    param_groups: ParamGroups

    def slot_name(self, slot: Slot) -> str: ...
    def live_state(self, slot: Slot) -> State: ...
    def stepped(self, slot: Slot) -> Tensor: ...
    def main_param(self, slot: Slot) -> Tensor: ...
    def set_main_param(self, slot: Slot, value: Tensor) -> None: ...
    def reads_steps(self, group: dict[str, Any]) -> bool: ...
    def unread_moments(self, group: dict[str, Any]) -> tuple[str, ...]: ...
    def deciding_setting(self, group: dict[str, Any]) -> str: ...


class RuleSlotState(SlotState):
    """A slot's state in the rule that steps it."""

    def __init__(self, rule: Keeper, slot: Slot) -> None:
        self._rule, self._slot = rule, slot
        self._name = rule.slot_name(slot)

    @cached_property
    def _live(self) -> State:
        return self._rule.live_state(self._slot)

    def tensors(self) -> State:
        return dict(self._live)

    def shown(self) -> State:
        return unpacked(self._live, self._rule.stepped(self._slot))

    def full_precision(self) -> State:
        return full_precision(self._live, self._rule.stepped(self._slot))

    def in_blocks(self) -> set[str]:
        tensors = self._live
        return {key for key in tensors if scale_key(key) in tensors}

    def fit(self, saved: State, convert: bool) -> State:
        stepped = self._rule.stepped(self._slot)
        live, group = self._live, self._rule.param_groups[self._slot.group]
        if saved and STEP not in saved and not self._rule.reads_steps(group):
            # torch counts none; there is state, so it was stepped
            saved = {key: value for key, value in saved.items() if value is not None}
            saved[STEP] = 1.0
        for moment in self._rule.unread_moments(group):
            decided = self._rule.deciding_setting(group)
            shape = stepped.shape
            saved = without_unread(
                self._name, moment, decided, live, shape, saved, convert
            )
        return fitted(self._name, live, stepped, saved, convert)

    def check(self, state: State) -> None:
        rest, main = self._without_main(self._packed(state))
        if main is not None:
            check_fits(
                f"{self._name}.{MASTER}", self._rule.main_param(self._slot), main
            )
        check_state(self._name, self._live, rest)
        if SECOND in rest:
            self.check_values(SECOND, rest[SECOND])

    def check_values(self, key: str, values: Tensor) -> None:
        if key == STEP:
            check_step(self._name, values)
        if key == SECOND and values.is_floating_point() and bool((values < 0).any()):
            raise ValueError(
                f"{self._name}.{SECOND}: has negative elements; it is a mean of squares"
            )

    def load(self, state: State) -> None:
        state = self._packed(state)
        self.check(state)
        rest, main = self._without_main(state)
        before_writing(self._live.values())
        for key, tensor in self._live.items():
            tensor.copy_(as_tensor(rest[key]))
        if main is not None:
            self._rule.set_main_param(self._slot, main)

    def _packed(self, state: State) -> State:
        """A state to load with 4-bit codes as codes, where it has the FP32 values they stand for,
        and remainders in their own width."""
        for key, tensor in self._live.items():
            value = state.get(key)
            is_unpacked = value is not None and scale_key(key) not in state
            if is_packed(key, tensor.dtype) and is_unpacked:
                return self.fit(state, convert=False)
            if (
                key == REMAINDER
                and isinstance(value, Tensor)
                and value.dtype == torch.int32
            ):
                return self.fit(state, convert=False)
        return state

    def _without_main(self, state: State) -> tuple[State, Tensor | None]:
        """A state to load, and the FP32 main param in it that stands for a remainder."""
        live = self._live
        if MASTER not in state or REMAINDER not in live:
            return state, None
        rest = {key: value for key, value in state.items() if key != MASTER}
        return {**rest, REMAINDER: live[REMAINDER]}, state[MASTER]
