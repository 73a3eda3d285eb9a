"""``optimizer.state`` as torch has it, over slots."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, MutableMapping
from typing import Any

from torch import Tensor

from mp_optim.slots.identity import ParamGroups, Slot, iter_slots, param_at


class ShownState(dict[str, Any]):
    """The state of one slot. A tensor that is put under a key is copied into the slot; what could
    only be put into this dict, which is another at each look, is refused.

    Args:
        write: loads a whole state.
    """

    def __init__(
        self, state: Mapping[str, Any], write: Callable[[dict[str, Any]], None]
    ) -> None:
        super().__init__(state)
        self._write = write

    def __setitem__(self, key: str, value: Any) -> None:
        self.update({key: value})

    def update(self, *args: Any, **kwargs: Any) -> None:
        """Raises ValueError if a key is not one of the slot's state, or a value does not fit."""
        changes = dict(*args, **kwargs)
        # += has written already, into the tensor that it puts there
        if any(key not in self or self[key] is not changes[key] for key in changes):
            self._write({**self, **changes})

    def __ior__(self, other: Any) -> Any:  # type: ignore[misc]  # dict's has overloads
        self.update(other)
        return self

    def setdefault(self, key: str, default: Any = None) -> Any:
        """Raises ValueError if the key is none of the slot's state."""
        if key not in self:
            self.update({key: default})
        return self[key]

    def _stays(self, *args: Any) -> Any:
        raise TypeError("a slot's state cannot be deleted; load_state_dict replaces it")

    __delitem__ = pop = popitem = clear = _stays

    def __reduce_ex__(self, protocol: Any) -> Any:
        """A copy is a plain dict."""
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
        write: Callable[[Mapping[Slot, dict[str, Any]]], None],
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
        return ShownState(self._read(slot), lambda state: self._write({slot: state}))

    def __setitem__(self, tensor: Tensor, state: dict[str, Any]) -> None:
        self._write({self._slot(tensor): state})

    def assign(self, states: Mapping[Tensor, dict[str, Any]]) -> None:
        """Copy states into slots, as ``optimizer.state = ...`` does; the others keep theirs.

        Raises:
            ValueError: nothing is given, or a state does not fit.
        """
        if not states:
            raise ValueError(
                "optimizer.state = {}: state is not taken away so. To begin anew, build another "
                "optimizer, or load a state dict from before the first step"
            )
        given = {self._slot(tensor): state for tensor, state in states.items()}
        self._write(given)

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
