"""Which tensor is stepped at each slot: what sits in ``param_groups`` now, or a copy kept here.

Tensors in ``param_groups`` may be replaced at any time. The sub-optimizers, one for each place, are
handed what is there before they step, and before their state is looked at.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from mp_optim.placement.assignments import Assignment, Assignments
from mp_optim.placement.state_file import StateFile
from mp_optim.process.calls import in_own_modes
from mp_optim.process.host_memory import Block, aligned_bytes
from mp_optim.slots import (
    ParamGroups,
    Slot,
    all_same,
    follow,
    iter_slots,
    local_tensor,
    param_at,
    same_memory,
    slot_name,
)
from mp_optim.slots.executor import Executor
from mp_optim.slots.host_part import Place
from mp_optim.slots.seen_params import SeenParams


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


class SteppedTensors:
    """Keeps the sub-optimizers' tensors those of now.

    Args:
        param_groups: live groups. subs: the optimizer of each place.
        memory: of copies that are not on the device.
        exposed: called before an offloaded slot's tensors may be written.
    """

    def __init__(
        self,
        param_groups: ParamGroups,
        assignments: Assignments,
        subs: Mapping[Place, Executor],
        memory: MainMemory,
        dtypes: MainDtypes,
        exposed: Callable[[Slot], None],
    ) -> None:
        self._param_groups, self._assignments = param_groups, assignments
        self._subs, self._memory, self._dtypes = subs, memory, dtypes
        self._exposed = exposed
        self._bound: list[Tensor] | None = None

    @property
    def are_bound(self) -> bool:
        """Whether tensors were handed over of which it is known where their memory stays."""
        return self._bound is not None

    def forget(self) -> None:
        """Slots or their main params are others now."""
        self._bound = None

    def bind(self) -> None:
        """Hand the tensors of now to the sub-optimizers."""
        params = [param for group in self._param_groups for param in group["params"]]
        if self._bound is not None and all_same(params, self._bound):
            return
        stays = True
        for slot, param in iter_slots(self._param_groups):
            assigned = self._assignments[slot]
            sub_params, position = self._params(assigned), assigned.sub_slot.position
            before, stepped = sub_params[position], self._stepped(slot)
            if before is not stepped and not same_memory(before, stepped):
                sub_params[position] = stepped
            # Only this package's own tensors are known to stay where they are, and unwritten.
            stays = stays and _is_own(param)
        self._bound = params if stays else None

    def written(self) -> None:
        """What is followed was written by a step, and by nothing else."""
        if self._bound is not None:
            return  # this package's own tensors are stepped themselves
        for slot, _ in iter_slots(self._param_groups):
            if (bound := self._assignments[slot].bound) is not None:
                bound.written()

    def in_sub(self, slot: Slot) -> tuple[Executor, Slot]:
        """The optimizer that has a slot, made current, and what it calls the slot. The caller gets
        at live tensors by it."""
        assigned = self._assignments[slot]
        self._params(assigned)[assigned.sub_slot.position] = self._stepped(slot)
        if assigned.place != "device":
            self._exposed(assigned.sub_slot)
        return self._subs[assigned.place], assigned.sub_slot

    @in_own_modes
    def copy(self, source: Tensor, place: Place, dtype: torch.dtype) -> Tensor:
        """What is stepped for a tensor at a place."""
        if place == "device":
            return source.to(dtype)
        return self._memory.copy(source, dtype)

    def _params(self, assigned: Assignment) -> list[Tensor]:
        """The list that has the tensor to step in the sub-optimizer."""
        group = self._subs[assigned.place].param_groups[assigned.sub_slot.group]
        params: list[Tensor] = group["params"]
        return params

    def _stepped(self, slot: Slot) -> Tensor:
        """The tensor to step for a slot, following whatever sits in ``param_groups`` now."""
        assigned = self._assignments[slot]
        param = param_at(self._param_groups, slot)
        if assigned.resident:
            return param if _is_own(param) else local_tensor(param)
        local = local_tensor(param)
        if assigned.main is None or assigned.bound is None:
            dtype = self._dtypes.stepped(local.dtype)
            assigned.main = self.copy(local, assigned.place, dtype)
        elif assigned.bound.is_same(0, param):
            return assigned.main
        else:
            if assigned.place != "device":
                self._exposed(assigned.sub_slot)
            follow(assigned.main, local, slot_name(self._param_groups, slot))
            self._subs[assigned.place].written_outside(assigned.sub_slot)
        assigned.bound = SeenParams([param])
        return assigned.main


def _is_own(tensor: Tensor) -> bool:
    """Whether a tensor to step is one of this package's, not a model's parameter."""
    return type(tensor) is Tensor and not tensor.requires_grad
