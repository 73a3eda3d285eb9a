"""Where each slot is stepped, and on which tensor: what sits in ``param_groups`` now, or a copy
kept here.

Tensors in ``param_groups`` may be replaced at any time. The executors of the places are handed what
is there before they step, and before their state is looked at. All of them, and what is above, have
one name for a slot.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from mp_optim.placement.plan import HostSlot, plan_offload
from mp_optim.placement.state_file import StateFile
from mp_optim.process.calls import in_own_modes
from mp_optim.process.host_memory import Block, aligned_bytes
from mp_optim.slots import (
    ParamGroups,
    Slot,
    SlotUpdates,
    all_params,
    all_same,
    follow,
    iter_slots,
    local_tensor,
    param_at,
    same_memory,
    slot_name,
)
from mp_optim.slots.executor import Executor, Place
from mp_optim.slots.param_attributes import shard_info
from mp_optim.slots.seen_params import SeenParams
from mp_optim.slots.tensor_layout import split_dims

Outputs = Sequence[Tensor | None]
"""What receives each stepped value, if that is not what is stepped."""


class MainMemory:
    """Room for the main params of an optimizer.

    Args:
        state_file: takes them, if there is one.
        forms: elements and dtype of each that is expected, for a block of just their size.
        empty_host: makes host memory of so many bytes.
    """

    def __init__(
        self,
        state_file: StateFile | None,
        forms: Iterable[tuple[int, torch.dtype]],
        empty_host: Callable[[int], Tensor],
    ) -> None:
        self._file = state_file
        sizes = [aligned_bytes(numel, dtype) for numel, dtype in forms]
        self._block = Block(0 if state_file else sum(sizes), empty_host)

    @property
    def host_bytes(self) -> int:
        """What was asked for in one piece."""
        return self._block.capacity

    def copy(self, source: Tensor, dtype: torch.dtype) -> Tensor:
        """The values of a tensor, in this memory."""
        if self._file is not None:
            return self._file.take(source.shape, dtype).copy_(source)
        block = self._block.with_room(aligned_bytes(source.numel(), dtype))
        return block.take(source.shape, dtype).copy_(source)


@dataclass(frozen=True)
class MainDtypes:
    """What parameters are stepped in.

    Attributes:
        copies: 16-bit parameters are stepped through FP32 copies.
        remainders: of a bfloat16 parameter that copy is a remainder beside it.
    """

    copies: bool
    remainders: bool

    def main(self, dtype: torch.dtype) -> torch.dtype:
        """Dtype of the main param of a parameter of a dtype."""
        return dtype if self.remainders and dtype == torch.bfloat16 else torch.float32

    def stepped(self, dtype: torch.dtype) -> torch.dtype:
        """Dtype that a parameter of a dtype is stepped in if no wrapper asked for a main param."""
        is_copied = self.copies and dtype in (torch.float16, torch.bfloat16)
        return self.main(dtype) if is_copied else dtype


@dataclass
class PlacedSlot:
    """Where one slot is stepped.

    Attributes:
        place: where it is stepped.
        share: elements a rank holds of it, rounded up: the same number on every rank.
        model_dtype: of the model's parameter; its gradient is expected to have it, too.
        resident: the tensor in ``param_groups`` is itself the one to step.
        main: the copy that is stepped, if it is not the parameter itself.
        bound: the tensor in ``param_groups`` that the copy follows, as it was last seen.
    """

    place: Place
    share: int
    model_dtype: torch.dtype
    resident: bool
    main: Tensor | None = None
    bound: SeenParams | None = None


class PlacedSlots:
    """The slots of an optimizer in their places, and the tensors that are stepped.

    Args:
        param_groups: live groups.
        parts: what steps the slots of each place.
        offloaded: the place of what is not stepped where it lies.
        exposed: called before an offloaded slot's tensors may be written.

    Attributes:
        memory: of copies that are not on the device.
    """

    memory: MainMemory

    def __init__(
        self,
        param_groups: ParamGroups,
        parts: Mapping[Place, Executor],
        offloaded: Place,
        dtypes: MainDtypes,
        exposed: Callable[[Slot], None],
    ) -> None:
        self._param_groups, self._parts = param_groups, parts
        self.offloaded, self.dtypes, self._exposed = offloaded, dtypes, exposed
        self._groups: list[list[PlacedSlot]] = []
        self._bound: list[Tensor] | None = None
        self._outputs: tuple[Sequence[Slot], Outputs, Outputs] | None = None

    def __getitem__(self, slot: Slot) -> PlacedSlot:
        return self._groups[slot.group][slot.position]

    def is_offloaded(self, slot: Slot) -> bool:
        """Whether a slot is not stepped where its parameter lies."""
        return self[slot].place != "device"

    def at(self, place: Place, group: int) -> list[int]:
        """The positions of a group that are at a place."""
        of_group = enumerate(self._groups[group])
        return [position for position, placed in of_group if placed.place == place]

    def assign(self, groups: Sequence[dict[str, Any]], fraction: float) -> None:
        """Plan the places of new groups, together.

        Args:
            fraction: see :func:`~mp_optim.placement.plan.plan_offload`.
        """
        params = [param for group in groups for param in group["params"]]
        hosted = plan_offload([_share(p) if p.requires_grad else 0 for p in params], fraction)
        start = 0
        for group in groups:
            placed = []
            for index, param in enumerate(group["params"], start):
                place: Place = self.offloaded if index in hosted else "device"
                resident = place == "device" and self.dtypes.stepped(param.dtype) == param.dtype
                placed.append(PlacedSlot(place, _share(param), param.dtype, resident))
            start += len(placed)
            self._groups.append(placed)
        self.forget()

    def forget_groups(self, count: int) -> None:
        """Forget the groups after the first ``count``."""
        del self._groups[count:]
        self.forget()

    def forget(self) -> None:
        """Slots or their main params are others now."""
        self._bound = self._outputs = None

    def host_slots(self) -> list[HostSlot]:
        """What is offloaded, in the order in which backward is expected to reach it: the last
        first."""
        slots = []
        for slot, param in iter_slots(self._param_groups):
            if self.is_offloaded(slot):
                placed, numel = self[slot], local_tensor(param).numel()
                slots.append(HostSlot(slot, placed.share, numel, placed.model_dtype))
        return slots[::-1]

    # -- updates ----------------------------------------------------------------------------------

    def with_outputs(self, updates: SlotUpdates) -> SlotUpdates:
        """The updates with what receives each stepped value."""
        known, slots, outputs = self._outputs, updates.slots, updates.outputs
        if known is None or known[0] is not slots or known[1] is not outputs:
            if not all(self[slot].resident for slot in slots):
                outputs = list(map(self.output, slots, outputs))
            known = self._outputs = slots, updates.outputs, outputs
        return updates if known[2] is updates.outputs else replace(updates, outputs=known[2])

    def output(self, slot: Slot, output: Tensor | None) -> Tensor | None:
        """What receives the stepped value: the parameter, if the copy that is stepped was made
        here."""
        if self[slot].resident:
            return output
        return local_tensor(param_at(self._param_groups, slot))

    # -- tensors ----------------------------------------------------------------------------------

    def bind(self) -> bool:
        """Hand the tensors of now to what steps them; whether it is known where their memory
        stays."""
        params = all_params(self._param_groups)
        if self._bound is not None and all_same(params, self._bound):
            return True
        stays, self._outputs = True, None
        for slot, param in iter_slots(self._param_groups):
            part, now = self._parts[self[slot].place], self._stepped(slot)
            before = part.stepped(slot)
            stays_there = _is_own(before) and same_memory(before, now)
            if before is not now and not stays_there:
                part.step_instead(slot, now)
            # Only this package's own tensors are known to stay where they are, and unwritten.
            stays = stays and _is_own(param)
        self._bound = params if stays else None
        return stays

    def written(self) -> None:
        """What is followed was written by a step, and by nothing else."""
        if self._bound is not None:
            return  # this package's own tensors are stepped themselves
        for slot, _ in iter_slots(self._param_groups):
            if (bound := self[slot].bound) is not None:
                bound.written()

    def current(self, slot: Slot) -> Executor:
        """What steps a slot, with its tensor of now. The caller gets at live tensors by it."""
        part = self._parts[self[slot].place]
        part.step_instead(slot, self._stepped(slot))
        if self.is_offloaded(slot):
            self._exposed(slot)
        return part

    def make_resident(self, slot: Slot) -> None:
        """From now on the tensor in ``param_groups`` is the one to step."""
        self.forget()
        self[slot].resident, self[slot].main = True, None

    @in_own_modes
    def copy(self, source: Tensor, place: Place, dtype: torch.dtype) -> Tensor:
        """What is stepped for a tensor at a place."""
        return source.to(dtype) if place == "device" else self.memory.copy(source, dtype)

    def _stepped(self, slot: Slot) -> Tensor:
        """The tensor to step for a slot, following whatever sits in ``param_groups`` now."""
        placed, param = self[slot], param_at(self._param_groups, slot)
        if placed.resident:
            return param if _is_own(param) else local_tensor(param)
        local = local_tensor(param)
        if placed.main is None or placed.bound is None:
            placed.main = self.copy(local, placed.place, self.dtypes.stepped(local.dtype))
        elif placed.bound.is_same(0, param):
            return placed.main
        else:
            if self.is_offloaded(slot):
                self._exposed(slot)
            follow(placed.main, local, slot_name(self._param_groups, slot))
            self._parts[placed.place].written_outside(slot)
        placed.bound = SeenParams([param])
        return placed.main


def _is_own(tensor: Tensor) -> bool:
    """Whether a tensor to step is one of this package's, not a model's parameter."""
    return type(tensor) is Tensor and not tensor.requires_grad


def _share(param: Tensor) -> int:
    """Elements of a parameter per rank that holds a part of it. Unlike the local size, no two ranks
    differ in it."""
    if not isinstance(param, DTensor):
        share = shard_info(param).offload_share
        return param.numel() if share is None else share
    ranks = math.prod(map(param.device_mesh.size, split_dims(param)))
    return math.ceil(param.numel() / ranks)
