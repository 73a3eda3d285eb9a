"""Updates: the gradients, multipliers and outputs of a step as parallel lists, with one entry for
each slot."""

from __future__ import annotations

import operator
from array import array
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
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
    """The multiplier of gradients while only the device knows its value. Two instances are equal
    only if they are the same object.

    Attributes:
        values: FP32, shape (2,), on the device: the multiplier, and a flag that is not 0 if the
            step is skipped.
        skipped: returns the flag to the host; waits for the device.
    """

    values: Tensor
    skipped: Callable[[], bool]


Multiplier = float | DeviceMultiplier


class StepPlan(tuple[Slot, ...]):
    """The slots of a step in order, properties of these slots that stay the same from step to step,
    and data that was computed from slots and properties.

    While the slots and their properties do not change, each step passes the same plan. A new plan
    has no cached data.

    Args:
        slots: the slots.
        shard_groups: one entry for each slot, as in :class:`SlotUpdate`.
        streams: one entry for each slot, as in :class:`SlotUpdate`.
        layouts: one entry for each slot, as in :class:`SlotUpdate`.
    """

    shard_groups: Sequence[tuple[ProcessGroup, ...]]
    streams: Sequence[int | None]
    layouts: Sequence[ParamLayout | None]
    _parts: dict[str, tuple[tuple[object, ...], Any]]

    def __new__(
        cls,
        slots: Iterable[Slot],
        shard_groups: Sequence[tuple[ProcessGroup, ...]],
        streams: Sequence[int | None],
        layouts: Sequence[ParamLayout | None],
    ) -> StepPlan:
        plan = super().__new__(cls, slots)
        plan.shard_groups, plan.streams, plan.layouts = shard_groups, streams, layouts
        plan._parts = {}
        return plan

    def at(self, indices: Sequence[int]) -> StepPlan:
        """Return a new plan of the slots at some indices."""
        return StepPlan(
            [self[index] for index in indices],
            [self.shard_groups[index] for index in indices],
            [self.streams[index] for index in indices],
            [self.layouts[index] for index in indices],
        )

    def part(self, name: str, sources: tuple[object, ...], make: Callable[[], T]) -> T:
        """Return a cached part of the plan. Create the part if it is missing, or was made from
        other sources.

        NOTE: a part and its sources must not refer to the caller. The caller may own this plan, and
        a reference cycle would keep caller and plan alive.

        Args:
            name: name of the part, unique in the code.
            sources: objects other than the slots that the part depends on; compared by identity.
            make: creates the part.
        """
        known = self._parts.get(name)
        if known is None or not all(map(operator.is_, known[0], sources)):
            known = self._parts[name] = sources, make()
        made: T = known[1]
        return made


class SlotUpdate(NamedTuple):
    """The update of one slot in a step.

    Attributes:
        slot: the parameter's slot.
        grad: local gradient in any floating dtype, on the device where the slot is stepped. An
            executor that places slots also accepts a gradient on the model's device.
        multiplier: factor of the gradient, rounded to FP32: inverse loss scale times clip
            coefficient. A :class:`DeviceMultiplier` for backends that read the factor from device
            memory.
        output: the model's local parameter, which gets the new value in its own dtype; None if the
            stepped tensor is the parameter itself. If the parameter is not the rounded main param,
            the step starts from the parameter's value.
        shard_groups: process groups over which the parameter is split, for rules that need norms of
            whole parameters. Empty if the local tensor is the whole parameter.
        stream: random stream of the parameter in the lower 32 bits, and the index of the first
            local element in the upper 32 bits (:func:`stream_of`). None derives the stream from the
            slot's name.
        layout: device and split of the model's own tensor, for rules that need whole matrices. None
            if the stepped tensor is the whole parameter, on its device.
        changed: bitmap of the row-major local elements (``mp_optim/core/weight_delta.py``), padded
            to whole 64-bit words, on the device where the slot is stepped. The step sets the bits
            of changed weights and clears no bit. None if changes are not tracked.
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
    """The updates of a step as parallel lists with one entry for each slot, because with thousands
    of slots an object per slot is slow.

    The fields are those of :class:`SlotUpdate`, in the plural. The plan in ``slots`` has
    ``shard_groups``, ``streams`` and ``layouts``. While the contents of a list do not change, each
    step may pass the same list object.

    Attributes:
        changed: bitmaps; may be empty.
        is_staged: True if the outputs are staging memory, which does not contain the model's
            weights.
    """

    slots: StepPlan
    grads: Sequence[Tensor]
    multipliers: Sequence[Multiplier]
    outputs: Sequence[Tensor | None]
    changed: Sequence[Tensor | None] = ()
    is_staged: bool = False

    @property
    def bitmaps(self) -> Sequence[Tensor] | None:
        """The bitmaps of changed weights, one for each slot; None if changes are not tracked."""
        if not self.changed or self.changed[0] is None:
            return None
        return cast("Sequence[Tensor]", self.changed)

    @classmethod
    def of(cls, updates: Sequence[SlotUpdate]) -> SlotUpdates:
        """Return a list of updates as SlotUpdates; SlotUpdates are returned unchanged."""
        if isinstance(updates, SlotUpdates):
            return updates
        places = range(len(SlotUpdate._fields))
        columns: list[Any] = [list(map(itemgetter(place), updates)) for place in places]
        slots, grads, multipliers, outputs, *stays, changed = columns
        return cls(StepPlan(slots, *stays), grads, multipliers, outputs, changed)

    def take(self, indices: Sequence[int]) -> SlotUpdates:
        """Return the updates at some indices."""
        return UpdateSelection(indices, self.slots).take(self)

    def __len__(self) -> int:
        return len(self.slots)

    def __getitem__(self, index: int) -> SlotUpdate:  # type: ignore[override]
        """Return the update at an index. For several updates use :meth:`take`."""
        return SlotUpdate(
            self.slots[index],
            self.grads[index],
            self.multipliers[index],
            self.outputs[index],
            self.slots.shard_groups[index],
            self.slots.streams[index],
            self.slots.layouts[index],
            self.changed[index] if self.changed else None,
        )


class UpdateSelection:
    """A selection of a step's updates. Every step with the same slots reuses the selection.

    Args:
        indices: indices of the selected updates.
        plan: slots of the whole step.
    """

    def __init__(self, indices: Sequence[int], plan: StepPlan) -> None:
        self.slots, self.indices = plan.at(indices), indices
        self._is_whole = list(indices) == list(range(len(plan)))

    def take(self, updates: SlotUpdates) -> SlotUpdates:
        """Return the selected updates."""
        if self._is_whole:
            return updates if updates.slots is self.slots else replace(updates, slots=self.slots)
        grads = CachedTensorList.of(self._pick(updates.grads))
        if isinstance(updates.grads, CachedTensorList):
            grads.__dict__.update(sizes=self._keep("sizes", updates.grads.sizes))
        return SlotUpdates(
            self.slots,
            grads,
            self._pick(updates.multipliers),
            self._keep("outputs", updates.outputs),
            self._keep("changed", updates.changed),
            updates.is_staged,
        )

    def _pick(self, column: Sequence[Any]) -> Sequence[Any]:
        """Return the selected entries of a list, in the same class; empty for an empty list."""
        part: Sequence[Any] = ()
        if column and len(self.indices) < 2:
            part = [column[index] for index in self.indices]
        elif column:
            part = itemgetter(*self.indices)(column)
        if isinstance(column, CachedTensorList):
            return CachedTensorList(part)
        return array(column.typecode, part) if isinstance(column, array) else part

    def _keep(self, name: str, column: Sequence[Any]) -> Sequence[Any]:
        """Return the selected entries of a list. The result is cached while steps pass the same
        list object."""
        return self.slots.part(f"selected {name}", (column,), partial(self._pick, column))


def update_of(slot: Slot, name: str, param: Tensor, grad: Tensor) -> SlotUpdate:
    """Return the update of a slot from its own parameter and gradient, with the parameter's split
    and random stream.

    Args:
        slot: the parameter's slot.
        name: FQN of the parameter.
        param: the parameter.
        grad: the gradient of the parameter.

    Raises:
        ValueError: the parameter is a DTensor with an unsupported placement.
    """
    return SlotUpdate(
        slot,
        local_grad(param, grad),
        shard_groups=shard_groups_of(name, param),
        stream=stream_of(name, first_element(param)),
        layout=layout_of(param),
    )
