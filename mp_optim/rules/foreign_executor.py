"""Executor over a torch optimizer of another package, which gets FP32 gradients in ``.grad``.

The other optimizer stores state by tensor. This module converts the state to tensors by slot and
key, and back.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from mp_optim.config.setting_checks import check_schedule
from mp_optim.core import DeviceMultiplier, Slot, SlotUpdates, all_params, iter_slots
from mp_optim.core.executor import Executor, Place
from mp_optim.core.slot_state import STEP, SlotState, State, StateStore, check_state, check_step
from mp_optim.core.tensors import continue_from
from mp_optim.host.calls import in_own_modes
from mp_optim.host.host_memory import as_tensor


class ForeignExecutor(Executor, StateStore):
    """Executor over an optimizer of another package.

    The other optimizer stores state by tensor, in ``optimizer.state[tensor]``. If a tensor in
    ``param_groups`` is replaced, the executor moves the old tensor's state to the new tensor.

    Args:
        optimizer: the optimizer. The executor uses its live param groups.

    Raises:
        TypeError: the optimizer has the methods ``train`` and ``eval``, so it keeps separate
            weights for evaluation, which the model would not get.
    """

    writes_settings = True

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        super().__init__(optimizer.param_groups)
        self.optimizer, self.label = optimizer, type(optimizer).__name__
        if all(callable(getattr(optimizer, mode, None)) for mode in ("train", "eval")):
            raise TypeError(
                f"optimizer={self.label}: the optimizer has separate weights for evaluation "
                "(train(), eval()), which the model would not get; step the optimizer without a "
                "wrapper of mp_optim"
            )
        self.sizes = [len(group["params"]) for group in self.param_groups]
        self._state_keys = [list(group["params"]) for group in self.param_groups]
        self._own_positions: dict[int, dict[int, int]] = {}

    def has_only(self, group: int, positions: Sequence[int]) -> None:
        self._own_positions[group] = {given: own for own, given in enumerate(positions)}

    def _own(self, slot: Slot) -> Slot:
        """Return the slot of a parameter in the other optimizer's groups, which may have fewer
        parameters than the caller's groups."""
        positions = self._own_positions.get(slot.group)
        return slot if positions is None else Slot(slot.group, positions[slot.position])

    def slot_name(self, slot: Slot) -> str:
        return super().slot_name(self._own(slot))

    def stepped(self, slot: Slot) -> Tensor:
        return super().stepped(self._own(slot))

    def step_instead(self, slot: Slot, tensor: Tensor) -> None:
        super().step_instead(self._own(slot), tensor)

    def _move_state(self) -> None:
        """Key the state of replaced tensors by the new tensors.

        All state of replaced tensors is removed before any is stored, because two tensors may have
        swapped slots.
        """
        state, keys = self.optimizer.state, chain.from_iterable(self._state_keys)
        # A group that was added since the last call has no keys yet, so ``keys`` may be shorter
        # than the list of parameters.
        pairs = zip(keys, all_params(self.param_groups), strict=False)
        replaced = [(new, state.pop(key)) for key, new in pairs if key is not new and key in state]
        state.update(replaced)
        self._state_keys = [list(group["params"]) for group in self.param_groups]

    def _param(self, slot: Slot) -> Tensor:
        """Return the tensor at a slot, after moving the state of replaced tensors."""
        param, own = self.stepped(slot), self._own(slot)
        keys = self._state_keys
        if len(keys) <= own.group or keys[own.group][own.position] is not param:
            self._move_state()
        return param

    def forget_groups(self, count: int) -> None:
        super().forget_groups(count)
        del self._state_keys[count:]

    def check_settings(self, group: dict[str, Any]) -> None:
        check_schedule(group)

    def backend_and_reason(self, group: int, place: Place, device: torch.device) -> tuple[str, str]:
        return self.label, "given by the caller; gets FP32 gradients"

    def state_of(self, slot: Slot) -> SlotState:
        return SlotState(self, slot, self.slot_name(slot))

    def live_state(self, slot: Slot) -> State:
        """Return the tensors of the optimizer's state, and its numbers as tensors. Empty before the
        first step.

        An item of a list has a key such as ``key[0]``. An empty list becomes a uint8 tensor, shape
        (0,).
        """
        tensors: State = {}
        for key, value in _leaves(self.optimizer.state.get(self._param(slot), {})):
            if isinstance(value, Tensor):
                tensors[key] = value
            elif isinstance(value, list):
                tensors[key] = torch.empty(0, dtype=torch.uint8, device="cpu")
            else:
                tensors[key] = torch.tensor(value, dtype=torch.float64, device="cpu")
        return tensors

    def check_fitted(self, slot: Slot, state: State) -> None:
        live = self.live_state(slot)
        if state and live:
            check_state(self.slot_name(slot), live, state)
        # Before the first step there is no state to compare with, so check only the step count.
        elif STEP in state:
            check_step(self.slot_name(slot), state[STEP])

    def check_values(self, slot: Slot, key: str, values: Tensor) -> None:
        if key == STEP:
            check_step(self.slot_name(slot), values)

    def load_state(self, slot: Slot, state: State) -> None:
        if not state:
            self.reset_state(slot)
            return
        param, group = self._param(slot), self.param_groups[slot.group]
        live = self.optimizer.state.get(param, {})
        leaves = dict(_leaves(live))
        step_on_device = bool(group.get("fused") or group.get("capturable"))
        loaded: dict[str, Any] = {}
        for key, value in state.items():
            present = leaves.get(key, _present_form(key, value))
            is_on_host = key == STEP and not step_on_device
            loaded[key] = _in_form_of(present, value, None if is_on_host else param.device)
        self.optimizer.state[param] = {**live, **_nested(loaded)}

    def reset_state(self, slot: Slot) -> None:
        self.optimizer.state.pop(self._param(slot), None)

    def allocate_state(self, slots: Sequence[Slot]) -> None:
        """Check that the optimizer's state can be saved. The optimizer allocates state at its first
        step.

        Raises:
            TypeError: the optimizer keeps data that no state dict can store. The message names the
                data.
        """
        # Move the state of replaced tensors first, because torch's state_dict() raises KeyError for
        # the state of a tensor that is in no param group.
        self._move_state()
        kept: list[Any] = [*self.optimizer.state_dict().keys() - {"state", "param_groups"}]
        kept += [key for key in self.optimizer.state if not isinstance(key, Tensor)]
        if slots and kept:
            raise TypeError(
                f"optimizer={self.label} keeps {sorted(map(str, kept))} outside the state of its "
                "parameters, which cannot be saved; train without saving, or choose another "
                "optimizer"
            )
        for slot in slots:
            for key, value in self.optimizer.state.get(self._param(slot), {}).items():
                if (other := _other_than_tensors(value)) is not None:
                    raise TypeError(
                        f"optimizer={self.label} keeps a {type(other).__name__} under {key!r} in "
                        f"the state of {self.slot_name(slot)}, but only tensors, numbers and lists "
                        "of tensors and numbers can be saved; train without saving, or choose "
                        "another optimizer"
                    )

    @in_own_modes
    def step_slots(self, updates: SlotUpdates) -> None:
        self._move_state()
        for _, param in iter_slots(self.param_groups):
            param.grad = None
        updates = SlotUpdates.of(updates)
        mains = [self.stepped(update.slot) for update in updates]
        if not updates.is_staged:
            continue_from(mains, updates.outputs)
        for update, main in zip(updates, mains, strict=True):
            # The verdict_device() of this executor returns None, so multipliers are always numbers.
            assert not isinstance(update.multiplier, DeviceMultiplier)
            wide = torch.promote_types(main.dtype, torch.float32)
            main.grad = update.grad.to(wide, copy=True).mul_(update.multiplier).to(main.dtype)
        self.step_mark.touch()
        self.step_mark.open_state()
        self.optimizer.step()
        for update, main in zip(updates, mains, strict=True):
            main.grad = None
            if update.output is not None:
                update.output.copy_(main)


_ITEM = re.compile(r"(?P<list>.+)\[(?P<index>\d+)\]")


def _other_than_tensors(value: Any) -> Any:
    """Return a value, or an item in nested lists, that is neither a tensor nor a number; None if
    there is none."""
    if isinstance(value, list | tuple):
        others = (_other_than_tensors(item) for item in value)
        return next((other for other in others if other is not None), None)
    return None if value is None or isinstance(value, Tensor | int | float) else value


def _leaves(state: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield keys with tensors, numbers, empty lists, and items of lists."""
    for key, value in state.items():
        if isinstance(value, list | tuple) and value:
            yield from _leaves({f"{key}[{index}]": item for index, item in enumerate(value)})
        elif isinstance(value, Tensor | int | float | list):
            yield key, value


def _present_form(key: str, saved: Any) -> Any:
    """Return the value that an optimizer without state would keep for a saved tensor: the inverse
    of :meth:`ForeignExecutor.live_state`.

    torch's ``step`` stays a tensor: float64 if torch's default dtype is float64, else float32.
    """
    is_torchs = key == "step" and torch.get_default_dtype() == torch.float64
    if not isinstance(saved, Tensor) or is_torchs:
        return saved
    if saved.dtype == torch.uint8 and saved.shape == (0,):
        return []
    if saved.dtype == torch.float64 and saved.dim() == 0:
        return int(saved) if saved == saved.round() else float(saved)
    return saved


def _in_form_of(live: Any, saved: Any, device: torch.device | None) -> Any:
    """Return a copy of a saved value in the type of the optimizer's value: a number, an empty list
    or a tensor.

    Args:
        live: the optimizer's value.
        saved: the saved value.
        device: device of the copy; None for the saved tensor's device.
    """
    if isinstance(live, list):
        return []
    tensor = as_tensor(saved).detach()
    is_moved = isinstance(saved, Tensor) and device is not None
    copy = tensor.to(device if is_moved else tensor.device, copy=True)
    return copy if isinstance(live, Tensor) else type(live)(copy.item())


def _nested(leaves: Mapping[str, Any]) -> dict[str, Any]:
    """Build the lists of a state from items with keys such as ``key[0]``, and return the state."""
    nested: dict[str, Any] = {}
    lists: dict[str, dict[int, Any]] = {}
    for key, value in leaves.items():
        if item := _ITEM.fullmatch(key):
            lists.setdefault(item["list"], {})[int(item["index"])] = value
        else:
            nested[key] = value
    if lists:
        in_order = {key: sorted(items.items()) for key, items in lists.items()}
        nested |= _nested({key: [item for _, item in items] for key, items in in_order.items()})
    return nested
