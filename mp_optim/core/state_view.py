"""``optimizer.state`` as torch expects it, and assignments to it.

``optimizer.state[param]`` returns the same object while the caller holds it, and every lookup reads
the present state. Values that a caller assigns to its keys are stored or refused:

- A tensor of the exported shape is stored. Values of a tensor on the slot's device are copied.
- A host tensor for state that is stored on an accelerator *moves* the state: the slot uses the
  given memory, and the accelerator memory is freed. Assigning an accelerator tensor or calling
  ``restore_from_cpu()`` moves the state back. A step raises RuntimeError until then.
- Offloaded state stays in host memory or in its file, and step counts stay on the host. The values
  of an assigned accelerator tensor are copied, with one warning.
- Moments in float16, 8 or 4 bits are exported as read-only FP32 copies. Assigned FP32 values are
  rounded and stored.
- A tensor with another shape, with values that would lose bits, or on another accelerator is
  refused. Unknown keys and deletions of keys are refused, too. A refused assignment changes
  nothing.

Removed state is reset, as in torch: ``state.clear()``, ``state = {}``, ``del state[param]``,
``state.pop(param)``, ``state[param] = {}``, ``state[param].clear()``. Moments and step counts
become zero; main params keep their values. A dict that ``state[param]`` returned earlier keeps a
copy of the old state.
"""

from __future__ import annotations

from collections.abc import (
    Callable,
    ItemsView,
    Iterator,
    Mapping,
    MutableMapping,
    Sequence,
    ValuesView,
)
from contextlib import suppress
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor

from mp_optim.core.identity import Slot, iter_slots, param_at
from mp_optim.core.interrupted_step import HOST, ParkedTensors, wait_for
from mp_optim.core.slot_state import STEP, SlotState, State, check_fits, scale_key, without_keys
from mp_optim.core.tensors import same_memory
from mp_optim.host.host_memory import same_values

_dict: Any = dict
"""The class dict as a base class that mypy does not compare with MutableMapping."""


class ShownState(MutableMapping[str, Any], _dict):  # type: ignore[misc]
    """The state of one slot as a dict; every access reads the present state.

    Args:
        read: returns the present state.
        write: stores values under some keys.
        reset: resets the slot's state.
    """

    def __init__(
        self, read: Callable[[], State], write: Callable[[State], None], reset: Callable[[], None]
    ) -> None:
        super().__init__()
        # Read the state here, although the result is unused. Then optimizer.state[param] raises at
        # the lookup if a step was interrupted, and step counts no longer have skipped steps.
        read()
        self._read, self._write, self._reset = read, write, reset

    def part(self) -> None:
        """Detach this dict from the slot: keep a copy of the present state, and no longer read or
        write the slot."""
        kept = deepcopy(self._read())
        self._read, self._write, self._reset = lambda: kept, kept.update, kept.clear

    def __getitem__(self, key: str) -> Any:
        return self._read()[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._read())

    def __len__(self) -> int:
        return len(self._read())

    def __reversed__(self) -> Iterator[str]:
        return reversed(list(self._read()))

    def items(self) -> ItemsView[str, Any]:
        return self._read().items()

    def values(self) -> ValuesView[Any]:
        return self._read().values()

    def copy(self) -> dict[str, Any]:
        """Return the present state as a plain dict."""
        return dict(self._read())

    def __or__(self, other: Any) -> Any:
        return self.copy() | other

    def __ror__(self, other: Any) -> Any:
        return other | self.copy()

    def __setitem__(self, key: str, value: Any) -> None:
        self._write({key: value})

    def update(self, *args: Any, **kwargs: Any) -> None:
        """Store values under some keys. If one value is refused, no value is stored.

        Raises:
            ValueError: a key is unknown, or a value does not fit.
        """
        self._write(dict(*args, **kwargs))

    def __ior__(self, other: Any) -> Any:
        self.update(other)
        return self

    def __delitem__(self, key: str) -> None:
        raise TypeError(
            "optimizer.state[param]: single keys cannot be deleted; call clear() to reset all keys"
        )

    def clear(self) -> None:
        """Reset the slot's state to its values before the first step."""
        self._reset()

    def __repr__(self) -> str:
        return repr(self._read())

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Copy and pickle as a plain dict."""
        return dict, (dict(self._read()),)


class SlotStateView(MutableMapping[Tensor, Any]):
    """``optimizer.state`` as torch expects it: a mapping from the current parameters to their
    state.

    A view keeps its optimizer alive. The optimizer keeps the view's caches but not the view, so
    there is no reference cycle.

    Args:
        optimizer: a :class:`~mp_optim.core.keyed_optimizer.SlotKeyedOptimizer`.
    """

    def __init__(self, optimizer: Any) -> None:
        self._optimizer = optimizer

    def _slot(self, tensor: Tensor) -> Slot:
        optimizer = self._optimizer
        optimizer.check_lists()
        slot: Slot | None = optimizer.state_index.get(id(tensor))
        with suppress(IndexError):
            if slot is not None and param_at(optimizer.param_groups, slot) is tensor:
                return slot
        optimizer.state_index = {id(p): slot for slot, p in iter_slots(optimizer.param_groups)}
        slot = optimizer.state_index.get(id(tensor))
        if slot is None:
            raise KeyError(
                "this tensor is not a parameter of the optimizer; if the parameter was replaced, "
                "use the present tensor of param_groups"
            )
        return slot

    def __getitem__(self, tensor: Tensor) -> Any:
        slot, optimizer = self._slot(tensor), self._optimizer
        if (shown := optimizer.shown_states.get(slot)) is not None:
            return shown
        shown = ShownState(
            lambda: optimizer.shown_state(slot),
            lambda given: optimizer.assign_states({slot: given}, whole=False),
            lambda: optimizer.reset_states([slot]),
        )
        optimizer.shown_states[slot] = shown
        return shown

    def __setitem__(self, tensor: Tensor, state: dict[str, Any]) -> None:
        if state:
            self._optimizer.assign_states({self._slot(tensor): dict(state)}, whole=True)
        else:
            self._take_away([self._slot(tensor)])

    def assign(self, states: Mapping[Tensor, dict[str, Any]]) -> None:
        """Store states in slots, as ``optimizer.state = ...`` does. The state of all other slots is
        reset.

        Args:
            states: the state of each parameter.

        Raises:
            ValueError: a state does not fit its slot.
        """
        given = {self._slot(tensor): dict(state) for tensor, state in states.items() if state}
        self._optimizer.assign_states(given, whole=True)
        self._take_away([slot for slot in self._optimizer.slots() if slot not in given])

    def __delitem__(self, tensor: Tensor) -> None:
        self._take_away([self._slot(tensor)])

    def clear(self) -> None:
        """Reset the state of all slots to its values before the first step."""
        self._take_away(self._optimizer.slots())

    def popitem(self) -> Any:
        """Raise TypeError, because a reset slot still has state, so ``while state:
        state.popitem()`` would not end."""
        raise TypeError("optimizer.state.popitem() is not supported; call clear() or pop(param)")

    def _take_away(self, slots: Sequence[Slot]) -> None:
        for slot in slots:
            if (shown := self._optimizer.shown_states.pop(slot, None)) is not None:
                shown.part()
        self._optimizer.reset_states(slots)

    def __iter__(self) -> Iterator[Tensor]:
        optimizer = self._optimizer
        slots = filter(optimizer.has_slot_state, optimizer.slots())
        return (param_at(optimizer.param_groups, slot) for slot in slots)

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def __bool__(self) -> bool:
        return next(iter(self), None) is not None

    def __contains__(self, tensor: object) -> bool:
        try:
            return isinstance(tensor, Tensor) and bool(
                self._optimizer.has_slot_state(self._slot(tensor))
            )
        except KeyError:
            return False


# -- assignments ----------------------------------------------------------------------------------


class Assignment:
    """Values that a caller assigns to one slot's state, checked before the first write.

    Args:
        name: FQN of the slot.
        state: the slot's state.
        home: device that stores the slot's state between steps.
        given: the assigned values by key.
        parked: tensors that are moved to the host.
        whole: True if ``given`` is the complete state.

    Attributes:
        stays: keys whose value was given on an accelerator, while their state stays on the host.

    Raises:
        ValueError: a key is unknown, or a value does not fit or is on another device; the message
            has slot and key.
    """

    def __init__(
        self,
        name: str,
        state: SlotState,
        home: torch.device,
        given: State,
        parked: ParkedTensors,
        *,
        whole: bool,
    ) -> None:
        self._name, self._state, self._home, self._parked = name, state, home, parked
        self._kept, self._coded = state.live(), state.coded()
        self._values: State = {}
        self._memory: dict[str, Tensor] = {}
        self._devices: dict[str, torch.device] = {}
        self._fitted: State = {}
        self.stays: list[str] = []
        complete = given
        self._exported = exported = state.exported()
        # Recognize a saved state: it has other keys than the exported state, or codes in place of
        # FP32 values.
        pairs = ((given.get(key), moment.stored.dtype) for key, moment in self._coded.items())
        has_codes = any(getattr(value, "dtype", None) == dtype for value, dtype in pairs)
        if whole and (has_codes or given.keys() != exported.keys()):
            self._values = given  # fit() below converts the saved form, or raises.
        elif unknown := given.keys() - exported.keys():
            raise ValueError(
                f"optimizer.state: {self._name} has no {min(unknown)!r}; its keys are "
                f"{sorted(exported)}. Keep other data in a dict of your own"
            )
        else:
            for key, value in state.layout.take(given).items():
                self._take(key, value, given[key])
            scales = set(map(scale_key, self._coded.keys() & self._values.keys()))
            self._values = without_keys(self._values, scales)
            complete = {**without_keys(exported, scales), **self._values}
        if self._values:
            self._fitted = state.fit(complete)

    def _take(self, key: str, value: Any, given: Any) -> None:
        """Decide how to store one value: copy the value, use the value's memory, or move the state
        to the value's device.

        Args:
            key: the state key.
            value: the value in the stored layout.
            given: the value in the callers' layout.
        """
        mine, coded = self._kept.get(key), self._coded.get(key)
        if coded is not None and not isinstance(value, Tensor):
            check_fits(f"{self._name}.{key}", coded.values(), value)
        if key == STEP or not isinstance(value, Tensor) or mine is None or value.is_meta:
            self._values[key] = given
            return
        if same_memory(value, mine):
            return
        moves = self._moves(key, value, mine)
        form = mine.dtype, mine.shape, mine.stride()
        if coded is None and moves and (value.dtype, value.shape, value.stride()) == form:
            wait_for(mine.device)
            self._state.check_values(key, value)
            self._memory[key] = value
            return
        if moves:
            self._devices[key] = value.device
        if coded is None:
            present = self._state.layout.take({key: self._exported[key]})[key]
        else:
            present = coded.values()
            check_fits(f"{self._name}.{key}", present, value)
        if value.device == HOST:
            wait_for(present.device)
        value = value.to(present.device, value.dtype if coded is None else torch.float32)
        alike = (value.dtype, value.shape) == (present.dtype, present.shape)
        if not alike or not same_values(value, present):
            self._values[key] = given if coded is None else coded.rounded(value)

    def _moves(self, key: str, value: Tensor, mine: Tensor) -> bool:
        """Return True to move the state to the value's device, and False to copy the value to the
        state's device.

        Raises:
            ValueError: the state cannot move to the value's device; the message has the key and the
                devices.
        """
        if value.device == mine.device:
            return False
        _, home = self._parked.homes.get(id(mine), (None, mine.device))
        if value.device in (home, self._home) or (value.device == HOST != self._home):
            return True
        if self._home == HOST:
            self.stays.append(key)
            return False
        raise ValueError(
            f"optimizer.state: {self._name}.{key} is stepped on {self._home}, but the value is on "
            f"{value.device}; assign a tensor on {self._home} or on the host, or move the "
            "parameter to move its state"
        )

    def write(self) -> None:
        """Write the checked values, and move state to the memory or device of the given tensors."""
        if self._fitted:
            self._state.load(self._fitted)
            self._kept = self._state.live()
        for key, memory in self._memory.items():
            self._parked.give(self._kept[key], memory)
        for key, device in self._devices.items():
            for part in (key, scale_key(key)):
                if part in self._kept and self._kept[part].device != device:
                    self._parked.give(self._kept[part], self._kept[part].to(device))
