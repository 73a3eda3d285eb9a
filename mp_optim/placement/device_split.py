"""DeviceSplitOptimizer: which of two optimizers has which slot; main params and state through both.

Keyed by position. Tensors in ``param_groups`` may be replaced at any time: before each step the
sub-optimizers are handed whatever sits at each slot now.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from mp_optim.placement.buckets import HostSlot
from mp_optim.placement.plan import plan_offload
from mp_optim.placement.transfer import Transfer, transfer_for
from mp_optim.process.host_memory import Block, aligned_bytes
from mp_optim.process.torch_modes import in_own_modes
from mp_optim.slots import Slot, all_same, follow, iter_slots, local_tensor, same_memory
from mp_optim.slots.host_part import Place
from mp_optim.slots.interrupted_step import StepMark
from mp_optim.slots.optimizer import SlotOptimizer
from mp_optim.slots.param_attributes import shard_info
from mp_optim.slots.slot_state import SlotState
from mp_optim.slots.tensor_layout import part_of, split_dims
from mp_optim.update import as_slot_optimizer
from mp_optim.update.foreign import ForeignOptimizer
from mp_optim.update.main_param_state import WithMainParam

__all__ = ["DeviceSplitOptimizer"]

_NOT_PUSHED = ("params", "param_names", "fqns")


@dataclass
class _Assignment:
    """Where one slot is stepped.

    Attributes:
        place: on the device of its parameter, or on the host.
        index: position in the same group of that place's sub-optimizer.
        share: elements a rank holds of it, rounded up: the same number on every rank.
        model_dtype: of the model's parameter; its gradient is expected to have it, too.
        main: the copy that is stepped, if it is not the parameter itself.
        resident: the tensor in ``param_groups`` is itself the one to step.
        bound: the tensor seen in ``param_groups`` at the last step.
    """

    place: Place
    index: int
    share: int
    model_dtype: torch.dtype
    resident: bool
    main: Tensor | None = None
    bound: Tensor | None = None


class DeviceSplitOptimizer(SlotOptimizer):
    """Two optimizers, one for each place, that together are one.

    Args:
        offload_fraction: share of elements stepped on the host (see :func:`plan_offload`).
        classes: of the two.
        in_fp32: step 16-bit parameters through FP32 copies kept here.
        settings: hyperparameters of both. construction: what else their constructors take.
        transfer: how tensors travel; by default what the parameters' device needs.
        pin_params: page-lock host parameters, if an accelerator is used.

    Raises:
        ValueError: for a fraction outside [0, 1], or parameters on several accelerators.
    """

    def __init__(
        self,
        params: Iterable[Any],
        offload_fraction: float,
        classes: Mapping[Place, type[torch.optim.Optimizer]],
        in_fp32: bool,
        settings: dict[str, Any],
        construction: dict[str, Any],
        transfer: Transfer | None,
        pin_params: bool,
    ) -> None:
        self.offload_fraction = offload_fraction
        self._classes, self._fp32 = classes, in_fp32
        self._kwargs = {**settings, **construction}
        self._remainders = bool(self._kwargs.get("store_param_remainders", False))
        self._assignments: list[list[_Assignment]] = []
        self._subs: dict[Place, SlotOptimizer] = {}
        self._assignments_changed()
        super().__init__(params, dict(settings))
        device = self._only_accelerator()
        self._can_pin = device.type not in ("cpu", "meta")
        self._transfer = transfer if transfer is not None else transfer_for(device)
        self._assign_groups(self.param_groups)
        allocate = partial(self._transfer.empty_host, pin=pin_params and self._can_pin)
        self._host_mains = Block(self._host_main_bytes(), allocate)
        self._subs = {place: self._build(place) for place in self._classes}
        self._adopt_defaults()
        self.use_mark(self.step_mark)

    # -- what stepping has to know --------------------------------------------------------------

    def _assignments_changed(self) -> None:
        """Forget what was made for the slots as they were."""
        self._bound: list[Tensor] | None = None

    def _placed(self) -> None:
        """Groups were added."""

    def _state_exposed(self, slot: Slot) -> None:
        """The caller gets live state tensors of a slot of the host's optimizer."""

    # -- placement ------------------------------------------------------------------------------

    def _only_accelerator(self) -> torch.device:
        devices = {str(local_tensor(p).device) for _, p in iter_slots(self.param_groups)}
        found = sorted(devices - {"cpu", "meta"})
        if len(found) > 1:
            raise ValueError(
                f"parameters lie on several accelerators {found}; build one optimizer per device"
            )
        return torch.device(found[0] if found else "meta" if devices == {"meta"} else "cpu")

    def _assign_groups(self, groups: Sequence[dict[str, Any]]) -> None:
        """Plan the places of new groups, together, and say where each slot is stepped."""
        shares = [_share(p) for group in groups for p in group["params"]]
        trainable = [p.requires_grad for group in groups for p in group["params"]]
        hosted = plan_offload(
            [size if trains else 0 for size, trains in zip(shares, trainable, strict=True)],
            self.offload_fraction,
        )
        running = 0
        for group in groups:
            counts: dict[Place, int] = {"device": 0, "host": 0}
            assignments = []
            for param in group["params"]:
                place: Place = "host" if running in hosted else "device"
                resident = place == "device" and self._stepped_dtype(param.dtype) == param.dtype
                assignments.append(
                    _Assignment(place, counts[place], shares[running], param.dtype, resident)
                )
                counts[place] += 1
                running += 1
            self._assignments.append(assignments)

    def _host_main_bytes(self) -> int:
        return sum(
            aligned_bytes(local_tensor(p).numel(), self.main_dtype(p.dtype))
            for slot, p in iter_slots(self.param_groups)
            if self._assigned(slot).place == "host"
        )

    def _assigned(self, slot: Slot) -> _Assignment:
        return self._assignments[slot.group][slot.position]

    def place(self, slot: Slot) -> Place:
        return self._assigned(slot).place

    def _host_slots(self) -> list[HostSlot]:
        """Slots of the host's optimizer, in the order in which backward is expected to reach them:
        the last first."""
        slots = []
        for slot, param in iter_slots(self.param_groups):
            assigned = self._assigned(slot)
            if assigned.place == "host":
                numel, there = local_tensor(param).numel(), Slot(slot.group, assigned.index)
                slots.append(HostSlot(there, assigned.share, numel, assigned.model_dtype))
        return slots[::-1]

    # -- sub-optimizers -------------------------------------------------------------------------

    @property
    def sub_optimizers(self) -> list[torch.optim.Optimizer]:
        """The device's optimizer, then the host's, as their classes built them."""
        return [
            sub.optimizer if isinstance(sub, ForeignOptimizer) else sub
            for sub in self._subs.values()
        ]

    def sub_optimizer(self, place: Place) -> SlotOptimizer:
        return self._subs[place]

    def _sub_group(self, index: int, place: Place) -> dict[str, Any]:
        group = self.param_groups[index]
        here = [self._assignments[index][i].place == place for i in range(len(group["params"]))]
        names = group.get("param_names")
        sub = {key: value for key, value in group.items() if key not in _NOT_PUSHED}
        sub["params"] = [
            local_tensor(p) for p, mine in zip(group["params"], here, strict=True) if mine
        ]
        if names:
            sub["fqns"] = [name for name, mine in zip(names, here, strict=True) if mine]
        return sub

    def _build(self, place: Place) -> SlotOptimizer:
        groups = [self._sub_group(index, place) for index in range(len(self.param_groups))]
        sub = as_slot_optimizer(self._classes[place](groups, **self._kwargs))
        for index in range(len(self.param_groups)):
            self._set_parts(sub, index, place)
        return sub

    def _set_parts(self, sub: SlotOptimizer, index: int, place: Place) -> None:
        """Tell a sub-optimizer, which has local tensors, what they are parts of."""
        for assigned, param in zip(
            self._assignments[index], self.param_groups[index]["params"], strict=True
        ):
            if assigned.place == place:
                sub.set_part(Slot(index, assigned.index), part_of(param))

    def _adopt_defaults(self) -> None:
        """Show the hyperparameters the sub-optimizers filled in, so that they can be changed here.

        Raises:
            ValueError: the two classes' defaults differ, so that a parameter's rule would depend on
                its place.
        """
        filled = [
            {
                k: v
                for k, v in sub.param_groups[-1].items()
                if k not in (*_NOT_PUSHED, *self.param_groups[-1])
            }
            for sub in self._subs.values()
        ]
        for key in filled[0].keys() & filled[1].keys():
            if filled[0][key] != filled[1][key]:
                raise ValueError(
                    f"{key} is {filled[0][key]!r} by default on the device and {filled[1][key]!r} "
                    "on the "
                    f"host; pass {key}="
                )
        for sub in self._subs.values():
            for mine, theirs in zip(self.param_groups, sub.param_groups, strict=True):
                for key, value in theirs.items():
                    if key not in _NOT_PUSHED:
                        mine.setdefault(key, value)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group; its parameters are placed on their own, by the same fraction and policy."""
        super().add_param_group(param_group)
        if (
            not self._subs
        ):  # torch's constructor is adding the first groups; they are planned together
            return
        index = len(self.param_groups) - 1
        self._assign_groups([self.param_groups[index]])
        for place, sub in self._subs.items():
            sub.add_param_group(self._sub_group(index, place))
            self._set_parts(sub, index, place)
        self._adopt_defaults()
        self._assignments_changed()
        self._placed()

    def use_mark(self, mark: StepMark) -> None:
        super().use_mark(mark)
        for sub in self._subs.values():
            sub.use_mark(mark)

    def recover(self) -> None:
        for sub in self._subs.values():
            sub.recover()

    def check_groups(self) -> None:
        self._push_settings()
        for sub in self._subs.values():
            sub.check_groups()

    def _push_settings(self) -> None:
        """Hand current hyperparameters to the sub-optimizers."""
        for index, group in enumerate(self.param_groups):
            settings = {key: value for key, value in group.items() if key not in _NOT_PUSHED}
            for sub in self._subs.values():
                sub.param_groups[index].update(settings)

    # -- main params ----------------------------------------------------------------------------

    def main_dtype(self, dtype: torch.dtype) -> torch.dtype:
        return dtype if self._remainders and dtype == torch.bfloat16 else torch.float32

    def _stepped_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """Dtype that a parameter of a dtype is stepped in if no wrapper asked for a main param."""
        return (
            self.main_dtype(dtype)
            if self._fp32 and dtype in (torch.float16, torch.bfloat16)
            else dtype
        )

    def main_param(self, slot: Slot) -> Tensor:
        sub, sub_slot = self._in_sub(slot)
        return sub.main_param(sub_slot)

    def set_main_param(self, slot: Slot, value: Tensor) -> None:
        sub, sub_slot = self._in_sub(slot)
        sub.set_main_param(sub_slot, value)

    def written_outside(self, slot: Slot) -> None:
        sub, sub_slot = self._in_sub(slot)
        sub.written_outside(sub_slot)

    def reserve_main_params(self, coming: Sequence[tuple[Slot, Tensor]]) -> None:
        super().reserve_main_params(
            [(slot, source) for slot, source in coming if self._assigned(slot).place == "device"]
        )

    def new_main_param(self, slot: Slot, source: Tensor) -> Tensor:
        """Main param, born where it is stepped: on the host it never exists in FP32 on the
        device."""
        assigned = self._assigned(slot)
        assigned.resident, assigned.main = True, None
        self._assignments_changed()
        if assigned.place == "device":
            return super().new_main_param(slot, source)
        main = self._on_host(source, self.main_dtype(source.dtype))
        self.param_groups[slot.group]["params"][slot.position] = main
        return main

    def _on_host(self, source: Tensor, dtype: torch.dtype) -> Tensor:
        block = self._host_mains.with_room(aligned_bytes(source.numel(), dtype))
        return block.take(source.shape, dtype).copy_(source)

    @in_own_modes
    def _new_copy(self, assigned: _Assignment, param: Tensor) -> Tensor:
        dtype = self._stepped_dtype(param.dtype)
        return self._on_host(param, dtype) if assigned.place == "host" else param.to(dtype)

    def _stepped(self, slot: Slot) -> Tensor:
        """The tensor to step for a slot, following whatever sits in ``param_groups`` now."""
        assigned = self._assigned(slot)
        param: Tensor = self.param_groups[slot.group]["params"][slot.position]
        if assigned.resident:
            return param if _is_own(param) else local_tensor(param)
        local = local_tensor(param)
        if assigned.main is None:
            assigned.main = self._new_copy(assigned, local)
        elif param is not assigned.bound:
            follow(assigned.main, local, self.slot_name(slot))
            self._subs[assigned.place].written_outside(Slot(slot.group, assigned.index))
        assigned.bound = param
        return assigned.main

    def bind_tensors(self) -> None:
        """Hand current tensors and hyperparameters to the sub-optimizers."""
        self._push_settings()
        params = [param for group in self.param_groups for param in group["params"]]
        if self._bound is not None and all_same(params, self._bound):
            return
        for index in range(len(self.param_groups)):
            for position, assigned in enumerate(self._assignments[index]):
                sub_params = self._subs[assigned.place].param_groups[index]["params"]
                before, stepped = sub_params[assigned.index], self._stepped(Slot(index, position))
                if before is not stepped and not same_memory(before, stepped):
                    sub_params[assigned.index] = stepped
        # Only of this package's own tensors is the memory known to stay where it is.
        residents = [
            p for slot, p in iter_slots(self.param_groups) if self._assigned(slot).resident
        ]
        self._bound = params if all(map(_is_own, residents)) else None

    def reload_model_params(self) -> None:
        """Take the parameters' present values into the copies kept here."""
        for slot, param in iter_slots(self.param_groups):
            if self._assigned(slot).main is not None or param.dtype != torch.float32:
                self.set_main_param(slot, local_tensor(param))

    # -- state ----------------------------------------------------------------------------------

    def _param(self, slot: Slot) -> Tensor:
        """What is in the param groups."""
        param: Tensor = self.param_groups[slot.group]["params"][slot.position]
        return param

    def _in_sub(self, slot: Slot) -> tuple[SlotOptimizer, Slot]:
        assigned = self._assigned(slot)
        sub = self._subs[assigned.place]
        sub.param_groups[slot.group]["params"][assigned.index] = self._stepped(slot)
        sub_slot = Slot(slot.group, assigned.index)
        if assigned.place == "host":
            self._state_exposed(sub_slot)
        return sub, sub_slot

    def _own_master(self, slot: Slot) -> Tensor | None:
        """The copy, if it says more than the parameter does."""
        main = self._assigned(slot).main
        param = self.param_groups[slot.group]["params"][slot.position]
        return main if main is not None and main.dtype != param.dtype else None

    def allocate_state(self, slots: Sequence[Slot]) -> None:
        for place, sub in self._subs.items():
            mine = [slot for slot in slots if self._assigned(slot).place == place]
            sub.allocate_state([self._in_sub(slot)[1] for slot in mine])

    def state_of(self, slot: Slot) -> SlotState:
        sub, sub_slot = self._in_sub(slot)
        state, main, name = sub.state_of(sub_slot), self._own_master(slot), self.slot_name(slot)
        if main is None:
            return state
        missing = f"state of {name}: master_param ({main.dtype}) is missing"
        return WithMainParam(state, name, main, missing)

    def check_settings(self, group: dict[str, Any]) -> None:
        self._subs["device"].check_settings(group)


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
