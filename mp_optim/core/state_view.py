"""``optimizer.state`` as torch expects it, and what is done to it by hand.

``optimizer.state[param]`` is one object for as long as somebody holds it, and shows what is there
whenever it is asked. What is put under a key of it is taken, or refused aloud:

- A tensor of the shape that is shown is taken. On the same device its values are copied into the
  slot. On the host, where the slot is stepped on an accelerator, the state *moves*: the slot uses
  the given memory from then on, and the accelerator's is free. It comes home when a tensor of the
  accelerator is put there, or by ``restore_from_cpu()``; a step before that raises RuntimeError.
- State that is stepped on the host, from its memory or from a disk, stays there, and so do counts
  of steps: of a tensor on an accelerator the values are taken, and a warning says so once.
- Moments that are stored in blocks are shown as FP32 copies (:mod:`~mp_optim.core.shown_copies`),
  and FP32 values are taken for them, rounded.
- Another shape, values that would lose bits, another accelerator and a key that is not there or
  that is deleted are refused, and nothing has changed.

State that is taken away begins again, as torch's does: ``state.clear()``, ``state = {}``,
``del state[param]``, ``state.pop(param)``, ``state[param] = {}``, ``state[param].clear()``. Moments
are zero and no step is counted; main params keep their values. A dict of the state before that
keeps a copy of it.
"""

from __future__ import annotations

import weakref
from collections.abc import (
    Callable,
    ItemsView,
    Iterator,
    KeysView,
    Mapping,
    MutableMapping,
    Sequence,
    ValuesView,
)
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from mp_optim.core.identity import ParamGroups, Slot, iter_slots, param_at
from mp_optim.core.interrupted_step import HOST, ParkedTensors, wait_for
from mp_optim.core.slot_state import (
    STEP,
    SlotState,
    State,
    check_fits,
    is_scale,
    scale_key,
    without_keys,
)
from mp_optim.core.tensors import same_memory
from mp_optim.host.host_memory import same_values


class ShownState(dict[str, Any]):
    """The state of one slot, as it is whenever it is asked.

    Args:
        read: the state of now. write: takes what is put under some keys. reset: begins again.
    """

    def __init__(
        self, read: Callable[[], State], write: Callable[[State], None], reset: Callable[[], None]
    ) -> None:
        super().__init__(read())
        self._read, self._write, self._reset = read, write, reset

    def part(self) -> None:
        """Keep a copy of the state of now, and follow the slot no longer."""
        kept = deepcopy(dict(self.items()))
        self._read, self._write, self._reset = lambda: kept, kept.update, kept.clear

    def look(self) -> ShownState:
        """Show what is there now."""
        state = self._read()
        for key in list(super().keys()):
            if key not in state:
                super().__delitem__(key)
        super().update(state)
        return self

    def __getitem__(self, key: str) -> Any:
        self.look()
        return super().__getitem__(key)

    def get(self, key: str, default: Any = None) -> Any:
        self.look()
        return super().get(key, default)

    def items(self) -> ItemsView[str, Any]:  # type: ignore[override]
        self.look()
        return super().items()

    def values(self) -> ValuesView[Any]:  # type: ignore[override]
        self.look()
        return super().values()

    def keys(self) -> KeysView[str]:  # type: ignore[override]
        self.look()
        return super().keys()

    def __iter__(self) -> Iterator[str]:
        return iter(self.keys())

    def __setitem__(self, key: str, value: Any) -> None:
        self.update({key: value})

    def update(self, *args: Any, **kwargs: Any) -> None:
        """Raises ValueError if a key is not one of the slot's state, or a value does not fit."""
        self._write(dict(*args, **kwargs))
        self.look()

    def __ior__(self, other: Any) -> Any:  # type: ignore[misc]  # dict's has overloads
        self.update(other)
        return self

    def setdefault(self, key: str, default: Any = None) -> Any:
        """Raises ValueError if the key is none of the slot's state."""
        if key not in self:
            self.update({key: default})
        return self[key]

    def _stays(self, *args: Any) -> Any:
        raise TypeError(
            "optimizer.state[param]: single keys cannot be deleted; clear() resets all of them"
        )

    __delitem__ = pop = popitem = _stays

    def clear(self) -> None:
        """Begin again, as before the first step."""
        self._reset()
        self.look()

    def __reduce_ex__(self, protocol: Any) -> Any:
        """A copy is a plain dict."""
        return dict, (dict(self.items()),)


@dataclass(eq=False)
class Lookups:
    """The lookups of all views of one optimizer. They keep no tensor and no optimizer alive.

    Attributes:
        index: slot of each tensor, by the tensor's id. It is checked against ``param_groups`` at
            every lookup, so a replaced tensor is found under its new identity at once.
        shown: the state that callers hold, by slot.
    """

    index: dict[int, Slot] = field(default_factory=dict)
    shown: weakref.WeakValueDictionary[Slot, ShownState] = field(
        default_factory=weakref.WeakValueDictionary
    )


class SlotStateView(MutableMapping[Tensor, dict[str, Any]]):
    """``optimizer.state`` as torch expects it: current tensors as keys, slots underneath.

    A view keeps its optimizer alive; the optimizer keeps no view, so that neither needs the garbage
    collector to be freed. The optimizer keeps the view's lookups.

    Args:
        param_groups: the groups of now.
        has: whether a slot has any state. read: a slot's. write: takes what was put into some
            slots' state; all of it is given with ``whole``. reset: has some slots begin again.
        lookups: found by earlier views of the same optimizer.
    """

    def __init__(
        self,
        param_groups: Callable[[], ParamGroups],
        has: Callable[[Slot], bool],
        read: Callable[[Slot], State],
        write: Callable[..., None],
        reset: Callable[[Sequence[Slot]], None],
        lookups: Lookups,
    ) -> None:
        self._param_groups, self._has, self._read, self._write = param_groups, has, read, write
        self._reset, self._lookups = reset, lookups

    def _slot(self, tensor: Tensor) -> Slot:
        slot = self._lookups.index.get(id(tensor))
        if slot is None or not self._holds(slot, tensor):
            index = {id(p): s for s, p in iter_slots(self._param_groups())}
            self._lookups.index = index
            slot = index.get(id(tensor))
        if slot is None:
            raise KeyError("this tensor is not a parameter of the optimizer (was it replaced?)")
        return slot

    def _holds(self, slot: Slot, tensor: Tensor) -> bool:
        try:
            return param_at(self._param_groups(), slot) is tensor
        except IndexError:
            return False

    def __getitem__(self, tensor: Tensor) -> dict[str, Any]:
        slot, read, write, reset = self._slot(tensor), self._read, self._write, self._reset
        if (shown := self._lookups.shown.get(slot)) is not None:
            return shown.look()
        shown = ShownState(
            lambda: read(slot),
            lambda given: write({slot: given}, whole=False),
            lambda: reset([slot]),
        )
        self._lookups.shown[slot] = shown
        return shown

    def __setitem__(self, tensor: Tensor, state: dict[str, Any]) -> None:
        if state:
            self._write({self._slot(tensor): dict(state)}, whole=True)
        else:
            self._take_away([self._slot(tensor)])

    def assign(self, states: Mapping[Tensor, dict[str, Any]]) -> None:
        """Copy states into slots, as ``optimizer.state = ...`` does; the others begin again.

        Raises:
            ValueError: a state does not fit.
        """
        given = {self._slot(tensor): dict(state) for tensor, state in states.items() if state}
        self._write(given, whole=True)
        slots = [slot for slot, _ in iter_slots(self._param_groups())]
        self._take_away([slot for slot in slots if slot not in given])

    def __delitem__(self, tensor: Tensor) -> None:
        self._take_away([self._slot(tensor)])

    def clear(self) -> None:
        """Have all slots begin again, as before the first step."""
        self._take_away([slot for slot, _ in iter_slots(self._param_groups())])

    def popitem(self) -> Any:
        """Raises TypeError: there would always be another one."""
        raise TypeError("optimizer.state.popitem(): is not supported; call clear() or pop(param)")

    def _take_away(self, slots: Sequence[Slot]) -> None:
        for slot in slots:
            if (shown := self._lookups.shown.pop(slot, None)) is not None:
                shown.part()
        self._reset(slots)

    def __iter__(self) -> Iterator[Tensor]:
        slots = iter_slots(self._param_groups())
        return (param for slot, param in slots if self._has(slot))

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def __bool__(self) -> bool:
        return next(iter(self), None) is not None

    def __contains__(self, tensor: object) -> bool:
        try:
            return isinstance(tensor, Tensor) and self._has(self._slot(tensor))
        except KeyError:
            return False


# -- what is put there ----------------------------------------------------------------------------


class Assignment:
    """What is put into one slot's state, checked before anything is written.

    Args:
        name: of the slot. state: the slot's.
        home: where it is stepped.
        given: what is put there; of the whole state if ``whole``.
        parked: what waits on the host.

    Attributes:
        stays: keys of what was given on an accelerator, and stays on the host.

    Raises:
        ValueError: a key is not there, or a value does not fit or lies on another device, naming
            slot and key.
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
        if whole and self._is_saved_form(given):
            self._values = given  # in a form that can be converted; or the check tells what is not
        else:
            for key, value in state.layout.take(given).items():
                self._take(key, value, given[key])
            scales = set(map(scale_key, self._coded.keys() & self._values.keys()))
            self._values = without_keys(self._values, scales)
            complete = {**without_keys(state.exported(), scales), **self._values}
        if self._values:
            self._fitted = state.fit(complete)

    def _take(self, key: str, value: Any, given: Any) -> None:
        """Decide what becomes of one value, in the form that is kept and as it was given."""
        self._check_key(key)
        mine = self._kept.get(key)
        if key in self._coded:
            self._take_values(key, value)
            return
        if key == STEP or not isinstance(value, Tensor) or mine is None or value.is_meta:
            self._values[key] = given
            return
        if same_memory(value, mine):
            return
        leaves = self._target(key, value, mine)
        alike = (value.dtype, value.shape) == (mine.dtype, mine.shape)
        if alike and leaves and value.stride() == mine.stride():
            wait_for(mine.device)
            self._state.check_values(key, value)
            self._memory[key] = value
            return
        if leaves:
            self._devices[key] = value.device
        if is_scale(key) and alike and same_values(value.to(mine.device), mine):
            return
        if alike or not self._has_values(key, value):
            self._values[key] = given

    def _take_values(self, key: str, value: Any) -> None:
        """Decide what becomes of FP32 values of a key that is stored in blocks."""
        coded = self._coded[key]
        present = coded.values()
        check_fits(f"{self._name}.{key}", present, value)
        if self._target(key, value, coded.stored):
            self._devices[key] = value.device
        if value.device == HOST:
            wait_for(present.device)
        value = value.to(present.device, torch.float32)
        if not same_values(value, present):
            self._values[key] = coded.rounded(value)

    def _is_saved_form(self, given: State) -> bool:
        """Return whether a state has other keys than it is shown with, or codes for values."""
        stored = {key: coded.stored.dtype for key, coded in self._coded.items()}
        has_codes = any(getattr(given.get(key), "dtype", None) == stored[key] for key in stored)
        return has_codes or given.keys() != self._state.exported().keys()

    def _check_key(self, key: str) -> None:
        shown = self._state.exported()
        if key not in shown:
            raise ValueError(
                f"optimizer.state: {self._name} has no {key!r}, and keeps nothing else than "
                f"{sorted(shown)}; put what belongs to the program into a dict of its own"
            )

    def _target(self, key: str, value: Tensor, mine: Tensor) -> bool:
        """Whether state goes to where this value lies, and not the value to where the state is.

        Raises:
            ValueError: it cannot, naming the key and where it can.
        """
        if value.device == mine.device:
            return False
        home = self._parked.home_of(mine)
        if value.device in (home, self._home) or (value.device == HOST != self._home):
            return True
        if self._home == HOST:
            self.stays.append(key)
            return False
        raise ValueError(
            f"optimizer.state: {self._name}.{key} is stepped on {self._home}, and was given on "
            f"{value.device}; it can be moved to the host and back, and else goes with its "
            "parameter"
        )

    def _has_values(self, key: str, value: Tensor) -> bool:
        """Whether state that is shown in another form than it is kept has these values already."""
        shown = self._state.layout.take({key: self._state.exported()[key]})[key]
        if value.device == HOST:
            wait_for(shown.device)
        if value.shape != shown.shape or value.dtype != shown.dtype:
            return False
        return same_values(value.to(shown.device), shown)

    def write(self) -> None:
        """Do it."""
        if self._fitted:
            self._state.load(self._fitted)
            self._kept = self._state.live()
        for key, memory in self._memory.items():
            self._parked.give(self._kept[key], memory)
        for key, device in self._devices.items():
            for part in (key, scale_key(key)):
                if part in self._kept and self._kept[part].device != device:
                    self._parked.give(self._kept[part], self._kept[part].to(device))
