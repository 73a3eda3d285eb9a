"""Which slot is stepped where, and what it is called there."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from mp_optim.placement.plan import HostSlot, plan_offload
from mp_optim.slots import (
    ParamGroups,
    Slot,
    SlotUpdate,
    SlotUpdates,
    UpdateSelection,
    group_settings,
    iter_slots,
    local_tensor,
)
from mp_optim.slots.host_part import Place
from mp_optim.slots.param_attributes import set_shard_info, shard_info
from mp_optim.slots.seen_params import SeenParams
from mp_optim.slots.tensor_layout import split_dims

PLACES: tuple[Place, ...] = ("device", "host", "streamed")


@dataclass
class Assignment:
    """Where one slot is stepped.

    Attributes:
        place: where it is stepped.
        sub_slot: what it is called by the optimizer of that place: the same group, a position
            among the slots that are there.
        share: elements a rank holds of it, rounded up: the same number on every rank.
        model_dtype: of the model's parameter; its gradient is expected to have it, too.
        resident: the tensor in ``param_groups`` is itself the one to step.
        main: the copy that is stepped, if it is not the parameter itself.
        bound: the tensor in ``param_groups`` that the copy follows, as it was last seen.
    """

    place: Place
    sub_slot: Slot
    share: int
    model_dtype: torch.dtype
    resident: bool
    main: Tensor | None = None
    bound: SeenParams | None = None


class _Routes(NamedTuple):
    """What the slots of a step come to; kept as long as they are the same.

    Attributes:
        by_place: the slots of each sub-optimizer.
        have_outputs: every update says itself what receives the stepped value.
    """

    slots: Sequence[Slot]
    by_place: dict[Place, UpdateSelection]
    have_outputs: bool


class Assignments:
    """Where each slot of an optimizer is stepped."""

    def __init__(self) -> None:
        self._groups: list[list[Assignment]] = []
        self._routes: _Routes | None = None

    def __getitem__(self, slot: Slot) -> Assignment:
        return self._groups[slot.group][slot.position]

    def of_group(self, index: int) -> Sequence[Assignment]:
        """Those of a group, by position."""
        return self._groups[index]

    def assign(
        self,
        groups: Sequence[dict[str, Any]],
        fraction: float,
        offloaded: Place,
        stepped_dtype: Callable[[torch.dtype], torch.dtype],
    ) -> None:
        """Plan the places of new groups, together.

        Args:
            fraction: see :func:`~mp_optim.placement.plan.plan_offload`.
            offloaded: the place of what that chooses.
            stepped_dtype: dtype that a parameter of a dtype is stepped in.
        """
        params = [param for group in groups for param in group["params"]]
        shares = [_share(param) if param.requires_grad else 0 for param in params]
        hosted = plan_offload(shares, fraction)
        start = 0
        for group in groups:
            assigned: list[Assignment] = []
            counts: dict[Place, int] = dict.fromkeys(PLACES, 0)
            for index, param in enumerate(group["params"], start):
                place: Place = offloaded if index in hosted else "device"
                resident = place == "device" and stepped_dtype(param.dtype) == param.dtype
                sub_slot = Slot(len(self._groups), counts[place])
                assigned.append(Assignment(place, sub_slot, _share(param), param.dtype, resident))
                counts[place] += 1
            start += len(assigned)
            self._groups.append(assigned)
        self._routes = None

    def forget_groups(self, count: int) -> None:
        """Forget the groups after the first ``count``."""
        del self._groups[count:]
        self._routes = None

    def make_resident(self, slot: Slot) -> Assignment:
        """From now on the tensor in ``param_groups`` is the one to step."""
        assigned, self._routes = self[slot], None
        assigned.resident, assigned.main = True, None
        return assigned

    def offloaded_slots(self, param_groups: ParamGroups) -> list[HostSlot]:
        """Slots of the optimizer whose state is in host memory, in the order in which backward is
        expected to reach them: the last first."""
        slots = []
        for slot, param in iter_slots(param_groups):
            assigned = self[slot]
            if assigned.place != "device":
                sizes = assigned.share, local_tensor(param).numel()
                slots.append(HostSlot(assigned.sub_slot, *sizes, assigned.model_dtype))
        return slots[::-1]

    # -- updates ----------------------------------------------------------------------------------

    def by_place(self, updates: SlotUpdates, param_groups: ParamGroups) -> dict[Place, SlotUpdates]:
        """The updates of each sub-optimizer, in terms of its slots."""
        slots = updates.slots
        if self._routes is None or self._routes.slots is not slots:
            chosen = {place: self._selection(place, slots) for place in PLACES}
            have_outputs = all(self[slot].resident for slot in slots)
            self._routes = _Routes(slots, chosen, have_outputs)
        if not self._routes.have_outputs:
            slots_and_outputs = zip(slots, updates.outputs, strict=True)
            outputs = [self._output(*pair, param_groups) for pair in slots_and_outputs]
            updates = replace(updates, outputs=outputs)
        return {place: part.take(updates) for place, part in self._routes.by_place.items()}

    def on_host(self, update: SlotUpdate, param_groups: ParamGroups) -> SlotUpdate | None:
        """An update in terms of the host's optimizer; None if the slot is not stepped there."""
        assigned = self[update.slot]
        if assigned.place == "device":
            return None
        output = self._output(update.slot, update.output, param_groups)
        return update._replace(slot=assigned.sub_slot, output=output)

    def _selection(self, place: Place, slots: Sequence[Slot]) -> UpdateSelection:
        indices = [index for index, slot in enumerate(slots) if self[slot].place == place]
        sub_slots = [self[slots[index]].sub_slot for index in indices]
        return UpdateSelection(indices, sub_slots, len(slots))

    def _output(
        self, slot: Slot, output: Tensor | None, param_groups: ParamGroups
    ) -> Tensor | None:
        """What receives the stepped value: the parameter, if the copy that is stepped was made
        here."""
        if self[slot].resident:
            return output
        return local_tensor(param_groups[slot.group]["params"][slot.position])


def _share(param: Tensor) -> int:
    """Elements of a parameter per rank that holds a part of it. Unlike the local size, no two ranks
    differ in it."""
    if not isinstance(param, DTensor):
        share = shard_info(param).offload_share
        return param.numel() if share is None else share
    ranks = math.prod(map(param.device_mesh.size, split_dims(param)))
    return math.ceil(param.numel() / ranks)


def sub_group(group: dict[str, Any], positions: Sequence[int]) -> dict[str, Any]:
    """A group as the optimizer that steps the parameters at some positions is given it."""
    sub = _settings(group)
    sub["params"] = [_local_part(group["params"][position]) for position in positions]
    if names := group.get("param_names"):
        sub["fqns"] = [names[position] for position in positions]
    return sub


def adopt_defaults(groups: ParamGroups, subs: Sequence[ParamGroups]) -> None:
    """Show the hyperparameters that the two sub-optimizers filled in, so that they can be changed.

    Raises:
        ValueError: the two classes' defaults differ, so that a parameter's rule would depend on its
            place.
    """
    device, host = (_settings(sub[-1]) for sub in subs)
    for key in (device.keys() & host.keys()) - groups[-1].keys():
        if device[key] != host[key]:
            raise ValueError(
                f"{key} is {device[key]!r} by default on the device and {host[key]!r} on the "
                f"host; pass {key}="
            )
    for sub in subs:
        for group, of_sub in zip(groups, sub, strict=True):
            for key, value in _settings(of_sub).items():
                group.setdefault(key, value)


def _settings(group: dict[str, Any]) -> dict[str, Any]:
    """Hyperparameters; the names of a sub-optimizer's parameters are its own."""
    return {key: value for key, value in group_settings(group).items() if key != "fqns"}


def _local_part(param: Tensor) -> Tensor:
    """What a rank has of a parameter, which still says what part of it that is."""
    local = local_tensor(param)
    if not isinstance(param, DTensor):
        set_shard_info(local, shard_info(param))
    return local
