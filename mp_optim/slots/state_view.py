"""``optimizer.state`` as torch has it, over slots."""

from __future__ import annotations

from collections.abc import Callable, Iterator, MutableMapping
from functools import partial
from typing import Any

from torch import Tensor

from mp_optim.slots.identity import ParamGroups, Slot, iter_slots, param_at


class ShownState(dict[str, Any]):
    """A slot's state as ``optimizer.state[param]`` shows it. What is assigned to a key is copied
    into the slot; a copy or pickle of it is a plain dict.

    Raises:
        ValueError: the optimizer keeps nothing under the key that is assigned, or something of
            another form.
        TypeError: a key is deleted.
    """

    def __init__(self, state: dict[str, Any], write: Callable[[Any], None]) -> None:
        super().__init__(state)
        self._write = write

    def __setitem__(self, key: str, value: Any) -> None:
        if key not in self or self[key] is not value:  # += has written already
            self._write({**self, key: value})

    def update(self, *changes: Any, **more: Any) -> None:
        for key, value in dict(*changes, **more).items():
            self[key] = value

    def setdefault(self, key: str, default: Any = None) -> Any:
        if key not in self:
            self[key] = default
        return self[key]

    def _refuse(self, *_: Any) -> Any:
        raise TypeError("a slot's state cannot be deleted; load_state_dict replaces it")

    __delitem__ = pop = popitem = clear = _refuse

    def __reduce__(self) -> Any:
        return dict, (dict(self),)


class SlotStateView(MutableMapping[Tensor, dict[str, Any]]):
    """``optimizer.state`` as torch expects it: current tensors as keys, slots underneath.

    The tensor-to-slot index is a cache that is checked against ``param_groups`` at every lookup, so
    a replaced tensor is found under its new identity at once and under its old one no more.
    """

    def __init__(
        self,
        param_groups: Callable[[], ParamGroups],
        read: Callable[[Slot], dict[str, Any]],
        write: Callable[[Slot, dict[str, Any]], None],
    ) -> None:
        self._param_groups = param_groups
        self._read = read
        self._write = write
        self._index: dict[int, Slot] = {}

    def _slot(self, tensor: Tensor) -> Slot:
        slot = self._index.get(id(tensor))
        if slot is None or not self._holds(slot, tensor):
            self._index = {id(p): s for s, p in iter_slots(self._param_groups())}
            slot = self._index.get(id(tensor))
        if slot is None:
            raise KeyError(
                "this tensor is not a parameter of the optimizer (was it replaced?)"
            )
        return slot

    def _holds(self, slot: Slot, tensor: Tensor) -> bool:
        try:
            return param_at(self._param_groups(), slot) is tensor
        except IndexError:
            return False

    def __getitem__(self, tensor: Tensor) -> dict[str, Any]:
        slot = self._slot(tensor)
        return ShownState(self._read(slot), partial(self._write, slot))

    def __setitem__(self, tensor: Tensor, state: dict[str, Any]) -> None:
        self._write(self._slot(tensor), state)

    def __delitem__(self, tensor: Tensor) -> None:
        raise TypeError("a slot's state cannot be deleted; load_state_dict replaces it")

    def __iter__(self) -> Iterator[Tensor]:
        slots = iter_slots(self._param_groups())
        return (param for slot, param in slots if self._read(slot))

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def __contains__(self, tensor: object) -> bool:
        try:
            return isinstance(tensor, Tensor) and bool(self[tensor])
        except KeyError:
            return False
