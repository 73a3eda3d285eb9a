"""Updates: what a step does to each slot, as parallel lists."""

from __future__ import annotations

import operator
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from operator import itemgetter
from typing import Any, NamedTuple, TypeVar, cast

from torch import Tensor
from torch.distributed import ProcessGroup

from mp_optim.core.identity import Slot, stream_of
from mp_optim.core.tensor_layout import ParamLayout, first_element, layout_of, shard_groups_of
from mp_optim.core.tensors import CachedTensorList, local_grad

T = TypeVar("T")


@dataclass(frozen=True, eq=False, slots=True)
class DeviceMultiplier:
    """What gradients are multiplied with, while only the device knows; each is equal to itself
    alone.

    Attributes:
        values: FP32, shape (2,), on the device: the multiplier, and a flag that is not 0 if nothing
            is to be written.
        skipped: the flag, for the host; waits for the device.
    """

    values: Tensor
    skipped: Callable[[], bool]


Multiplier = float | DeviceMultiplier


class StepPlan(tuple[Slot, ...]):
    """The slots of a step, in order, and everything that is planned for them once and reused by
    every step that has the same slots.

    The caller of a step hands over the same object for as long as it has the same slots and nothing
    that it knows of them has changed: another object invalidates all parts of the plan at once.
    """

    _parts: dict[str, tuple[tuple[object, ...], Any]]

    def part(self, name: str, sources: tuple[object, ...], make: Callable[[], T]) -> T:
        """Return a part of the plan; make it first if there is none, or if it was made from other
        objects.

        NOTE: a part and its sources must not keep the object alive that asks for it, which may own
        this plan.

        Args:
            name: of the part, one for each place in the code.
            sources: the objects beside the slots that the part depends on.
            make: makes the part.
        """
        parts = self.__dict__.setdefault("_parts", {})
        known = parts.get(name)
        if known is None or not all(map(operator.is_, known[0], sources)):
            known = parts[name] = sources, make()
        made: T = known[1]
        return made


class SlotUpdate(NamedTuple):
    """One slot's share of an optimizer step.

    Attributes:
        slot: which parameter.
        grad: local gradient in any floating dtype, on the device where the slot is stepped (or,
            when handed to a placing optimizer, where the gradient lies).
        multiplier: what the gradient is multiplied with (inverse loss scale times clip
            coefficient), already rounded to FP32; or where the device keeps it, for backends that
            read it there.
        output: the model's parameter, local, which receives the updated value in its own dtype;
            None if the stepped tensor is itself the parameter. Where its value is not the stepped
            tensor, rounded, the step continues from it.
        shard_groups: process groups over which the parameter is split, for rules that need
            whole-parameter norms. Empty if the local tensor is the whole parameter.
        stream: the stream of the parameter's random numbers and, above its 32 bits, the index of
            the first local element (:func:`stream_of`); None: made of the slot's name.
        layout: where the model's own tensor lies and how it is split, for rules that need whole
            matrices. None if the stepped tensor is the whole parameter, on its device.
        changed: a bitmap (``mp_optim/core/weight_delta.py``) of the row-major local elements, in
        whole 64
            bits, on the device where the slot is stepped: bits of weights that get another value
            are set, none is cleared. None if nobody asks.
    """

    slot: Slot
    grad: Tensor
    multiplier: Multiplier = 1.0
    output: Tensor | None = None
    shard_groups: tuple[ProcessGroup, ...] = ()
    stream: int | None = None
    layout: ParamLayout | None = None
    changed: Tensor | None = None


@dataclass(frozen=True, slots=True)
class SlotUpdates(Sequence[SlotUpdate]):
    """The updates of a step as parallel lists: with thousands of slots, one pass over a list is
    cheap and an object for each is not. The fields are those of :class:`SlotUpdate`, in the plural;
    ``layouts`` and ``changed`` may be empty for none. The same list objects may be handed over in
    every step, as long as what is in them is the same.

    Attributes:
        is_staged: the outputs are staging memory, which does not hold the model's weights.
    """

    slots: StepPlan
    grads: Sequence[Tensor]
    multipliers: Sequence[Multiplier]
    outputs: Sequence[Tensor | None]
    shard_groups: Sequence[tuple[ProcessGroup, ...]]
    streams: Sequence[int | None]
    layouts: Sequence[ParamLayout | None] = ()
    changed: Sequence[Tensor | None] = ()
    is_staged: bool = False

    @property
    def bitmaps(self) -> Sequence[Tensor] | None:
        """The bitmaps of slots that are stepped together: all of them have one, or none."""
        if not self.changed or self.changed[0] is None:
            return None
        return cast("Sequence[Tensor]", self.changed)

    @classmethod
    def of(cls, updates: Sequence[SlotUpdate]) -> SlotUpdates:
        """The same updates in this form."""
        if isinstance(updates, SlotUpdates):
            return updates
        places = range(len(SlotUpdate._fields))
        columns: list[Any] = [list(map(itemgetter(place), updates)) for place in places]
        return cls(StepPlan(columns[0]), *columns[1:])

    def take(self, indices: Sequence[int]) -> SlotUpdates:
        """Some of the updates."""
        columns = (spec.name for spec in fields(self) if spec.name != "is_staged")
        chosen: dict[str, Any] = {name: _at(indices, getattr(self, name)) for name in columns}
        chosen["slots"] = StepPlan(chosen["slots"])
        return replace(self, **chosen)

    def __len__(self) -> int:
        return len(self.slots)

    def __getitem__(self, index: int) -> SlotUpdate:  # type: ignore[override]
        """One of them; some are taken by :meth:`take`."""
        return SlotUpdate(
            self.slots[index],
            self.grads[index],
            self.multipliers[index],
            self.outputs[index],
            self.shard_groups[index],
            self.streams[index],
            self.layouts[index] if self.layouts else None,
            self.changed[index] if self.changed else None,
        )


def _at(indices: Sequence[int], column: Sequence[Any]) -> Sequence[Any]:
    return [column[index] for index in indices] if column else ()


class UpdateSelection:
    """Some of a step's updates: chosen once, taken in every step that has the same slots.

    Args:
        indices: which updates.
        slots: their slots, as the receiver calls them.
        count: how many updates the step has.
    """

    def __init__(self, indices: Sequence[int], slots: Sequence[Slot], count: int) -> None:
        self.slots = StepPlan(slots)
        self._is_whole = list(indices) == list(range(count))
        self.indices = indices

    def take(self, updates: SlotUpdates) -> SlotUpdates:
        """These of the updates."""
        if self._is_whole:
            return updates if updates.slots is self.slots else replace(updates, slots=self.slots)
        grads = CachedTensorList(self._pick(updates.grads))
        if isinstance(updates.grads, CachedTensorList):
            grads.__dict__.update(sizes=self._keep("sizes", updates.grads.sizes))
        return SlotUpdates(
            self.slots,
            grads,
            self._pick(updates.multipliers),
            self._keep("outputs", updates.outputs),
            self._keep("shard_groups", updates.shard_groups),
            self._keep("streams", updates.streams),
            self._keep("layouts", updates.layouts),
            self._keep("changed", updates.changed),
            updates.is_staged,
        )

    def _pick(self, column: Sequence[Any]) -> Sequence[Any]:
        if len(self.indices) < 2:
            return [column[index] for index in self.indices]
        picked: Sequence[Any] = itemgetter(*self.indices)(column)
        return picked

    def _keep(self, name: str, column: Sequence[Any]) -> Sequence[Any]:
        """Part of a column that is mostly the same list in every step."""
        return self.slots.part(f"selected {name}", (column,), partial(self._picked, column))

    def _picked(self, column: Sequence[Any]) -> Sequence[Any]:
        part = self._pick(column) if column else ()
        if isinstance(column, CachedTensorList):
            return CachedTensorList(part)
        return array(column.typecode, part) if isinstance(column, array) else part


def update_of(slot: Slot, name: str, param: Tensor, grad: Tensor) -> SlotUpdate:
    """A parameter's own gradient as an update, with all that a rule may ask about where the
    parameter lies.

    Raises:
        ValueError: the parameter is a DTensor in a layout that cannot be stepped.
    """
    return SlotUpdate(
        slot,
        local_grad(param, grad),
        shard_groups=shard_groups_of(name, param),
        stream=stream_of(name, first_element(param)),
        layout=layout_of(param),
    )
