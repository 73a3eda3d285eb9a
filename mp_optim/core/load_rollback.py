"""What undoes a load: copies of settings and state from before it."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor

from mp_optim.core import Slot, iter_slots
from mp_optim.core.keyed_optimizer import SlotKeyedOptimizer
from mp_optim.core.slot_state import State


def kept_settings(optimizer: SlotKeyedOptimizer) -> Callable[[], None]:
    """Remember the settings of all param groups; returns what puts them back, tensors in place."""
    kept = [
        {key: (value, deepcopy(value)) for key, value in _settings_of(group).items()}
        for group in optimizer.param_groups
    ]

    @torch.no_grad()
    def put_back() -> None:
        for group, settings in zip(optimizer.param_groups, kept, strict=True):
            for key in _settings_of(group).keys() - settings.keys():
                del group[key]
            for key, (value, copied) in settings.items():
                group[key] = copied
                if isinstance(value, Tensor):
                    group[key] = value.copy_(copied)

    return put_back


def kept_state(optimizer: SlotKeyedOptimizer) -> Callable[[], None]:
    """Copy the state of all slots, and what is loaded beside it; returns what puts it back, where
    the model's parameters have their values again."""
    states: dict[Slot, State] = {}
    for slot, _ in iter_slots(optimizer.param_groups):
        state = optimizer.slot_state(slot)
        states[slot] = {key: deepcopy(value) for key, value in state.items()}
    beside = deepcopy(optimizer.saved_beside())

    def put_back() -> None:
        for slot, state in states.items():
            live = optimizer.state_of(slot)
            if state or not live.is_required():  # else frozen, and the load gave it state
                optimizer.load_slot_state(slot, live.fit(state, convert=False))
        optimizer.load_beside(beside)

    return put_back


def _settings_of(group: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in group.items() if key != "params"}
