"""DeviceSplitOptimizer: two optimizers, one for each place; main params and state through both.

Keyed by position. Tensors in ``param_groups`` may be replaced at any time: before each step the
sub-optimizers are handed whatever sits at each slot now.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from mp_optim.placement.assignments import Assignment, Assignments
from mp_optim.placement.transfer import Transfer, transfer_for
from mp_optim.process.host_memory import Block, aligned_bytes
from mp_optim.process.torch_modes import in_own_modes
from mp_optim.slots import (
    ParamGroups,
    Slot,
    all_same,
    follow,
    iter_slots,
    local_tensor,
    same_memory,
)
from mp_optim.slots.host_part import Place
from mp_optim.slots.interrupted_step import StepMark
from mp_optim.slots.optimizer import SlotOptimizer
from mp_optim.slots.slot_state import SlotState
from mp_optim.slots.tensor_layout import part_of
from mp_optim.update import as_slot_optimizer
from mp_optim.update.foreign import ForeignOptimizer
from mp_optim.update.main_param_state import WithMainParam

_NOT_PUSHED = ("params", "param_names", "fqns")


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
        self._fp32 = in_fp32
        self._remainders = bool(
            {**settings, **construction}.get("store_param_remainders", False)
        )
        self._assignments = Assignments()
        self._subs: dict[Place, SlotOptimizer] = {}
        self._bound: list[Tensor] | None = None
        super().__init__(params, dict(settings))
        device = _only_accelerator(self.param_groups)
        self._can_pin = device.type not in ("cpu", "meta")
        self._transfer = transfer if transfer is not None else transfer_for(device)
        self._assignments.assign(
            self.param_groups, offload_fraction, self._stepped_dtype
        )
        allocate = partial(self._transfer.empty_host, pin=pin_params and self._can_pin)
        host_bytes = sum(
            aligned_bytes(local_tensor(p).numel(), self.main_dtype(p.dtype))
            for slot, p in iter_slots(self.param_groups)
            if self.place(slot) == "host"
        )
        self._host_mains = Block(host_bytes, allocate)
        for place, kind in classes.items():
            groups = [
                self._sub_group(index, place) for index in range(len(self.param_groups))
            ]
            self._subs[place] = as_slot_optimizer(
                kind(groups, **settings, **construction)
            )
        self._tell_subs(range(len(self.param_groups)))
        self.use_mark(self.step_mark)

    # -- places and sub-optimizers ----------------------------------------------------------------

    def place(self, slot: Slot) -> Place:
        return self._assignments[slot].place

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
        """A group as the optimizer of a place is given it."""
        group, sub = self.param_groups[index], _settings(self.param_groups[index])
        of_group = enumerate(self._assignments.of_group(index))
        here = [position for position, assigned in of_group if assigned.place == place]
        sub["params"] = [local_tensor(group["params"][position]) for position in here]
        if names := group.get("param_names"):
            sub["fqns"] = [names[position] for position in here]
        return sub

    def _tell_subs(self, indices: Collection[int]) -> None:
        """After new groups: tell sub-optimizers, which have local tensors, what those are parts of;
        show the hyperparameters that they filled in, so that they can be changed here.

        Raises:
            ValueError: the two classes' defaults differ, so that a parameter's rule would depend on
                its place.
        """
        for index in indices:
            params = self.param_groups[index]["params"]
            for assigned, param in zip(
                self._assignments.of_group(index), params, strict=True
            ):
                self._subs[assigned.place].set_part(assigned.sub_slot, part_of(param))
        _adopt_defaults(self.param_groups, list(self._subs.values()))
        self._bound = None

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group; its parameters are placed on their own, by the same fraction and policy."""
        super().add_param_group(param_group)
        if not self._subs:
            # torch's constructor is adding the first groups; they are planned together
            return
        index = len(self.param_groups) - 1
        groups = [self.param_groups[index]]
        self._assignments.assign(groups, self.offload_fraction, self._stepped_dtype)
        for place, sub in self._subs.items():
            sub.add_param_group(self._sub_group(index, place))
        self._tell_subs([index])

    def use_mark(self, mark: StepMark) -> None:
        super().use_mark(mark)
        for sub in self._subs.values():
            sub.use_mark(mark)

    def recover(self) -> None:
        for sub in self._subs.values():
            sub.recover()

    def memory_moved(self) -> None:
        for sub in self._subs.values():
            sub.memory_moved()

    def check_groups(self) -> None:
        _push_settings(self.param_groups, self._subs.values())
        for sub in self._subs.values():
            sub.check_groups()

    def check_settings(self, group: dict[str, Any]) -> None:
        self._subs["device"].check_settings(group)

    # -- main params ----------------------------------------------------------------------------

    def main_dtype(self, dtype: torch.dtype) -> torch.dtype:
        return dtype if self._remainders and dtype == torch.bfloat16 else torch.float32

    def _stepped_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """Dtype that a parameter of a dtype is stepped in if no wrapper asked for a main param."""
        is_copied = self._fp32 and dtype in (torch.float16, torch.bfloat16)
        return self.main_dtype(dtype) if is_copied else dtype

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
            [pair for pair in coming if self.place(pair[0]) == "device"]
        )

    def new_main_param(self, slot: Slot, source: Tensor) -> Tensor:
        """Main param, born where it is stepped: on the host it never exists in FP32 on the
        device."""
        self._bound = None
        if self._assignments.make_resident(slot).place == "device":
            return super().new_main_param(slot, source)
        main = self._copy(source, "host", self.main_dtype(source.dtype))
        self.param_groups[slot.group]["params"][slot.position] = main
        return main

    @in_own_modes
    def _copy(self, source: Tensor, place: Place, dtype: torch.dtype) -> Tensor:
        """What is stepped for a tensor at a place."""
        if place == "device":
            return source.to(dtype)
        block = self._host_mains.with_room(aligned_bytes(source.numel(), dtype))
        return block.take(source.shape, dtype).copy_(source)

    def _stepped(self, slot: Slot) -> Tensor:
        """The tensor to step for a slot, following whatever sits in ``param_groups`` now."""
        assigned = self._assignments[slot]
        param: Tensor = self.param_groups[slot.group]["params"][slot.position]
        if assigned.resident:
            return param if _is_own(param) else local_tensor(param)
        local = local_tensor(param)
        if assigned.main is None:
            assigned.main = self._copy(
                local, assigned.place, self._stepped_dtype(local.dtype)
            )
        elif param is not assigned.bound:
            follow(assigned.main, local, self.slot_name(slot))
            self._subs[assigned.place].written_outside(assigned.sub_slot)
        assigned.bound = param
        return assigned.main

    def bind_tensors(self) -> None:
        """Hand current tensors and hyperparameters to the sub-optimizers."""
        _push_settings(self.param_groups, self._subs.values())
        params = [param for group in self.param_groups for param in group["params"]]
        if self._bound is not None and all_same(params, self._bound):
            return
        stays = True
        for slot, param in iter_slots(self.param_groups):
            assigned = self._assignments[slot]
            sub_params, position = (
                self._sub_params(assigned),
                assigned.sub_slot.position,
            )
            before, stepped = sub_params[position], self._stepped(slot)
            if before is not stepped and not same_memory(before, stepped):
                sub_params[position] = stepped
            # Only of this package's own tensors is the memory known to stay where it is.
            stays = stays and (_is_own(param) or not assigned.resident)
        self._bound = params if stays else None

    def reload_model_params(self) -> None:
        """Take the parameters' present values into the copies kept here."""
        for slot, param in iter_slots(self.param_groups):
            if self._assignments[slot].main is not None or param.dtype != torch.float32:
                self.set_main_param(slot, local_tensor(param))

    # -- state ----------------------------------------------------------------------------------

    def _sub_params(self, assigned: Assignment) -> list[Tensor]:
        """The list that has the tensor to step in the sub-optimizer."""
        group = self._subs[assigned.place].param_groups[assigned.sub_slot.group]
        params: list[Tensor] = group["params"]
        return params

    def _in_sub(self, slot: Slot) -> tuple[SlotOptimizer, Slot]:
        """The optimizer that has a slot, made current, and what it calls the slot. The caller gets
        at live tensors by it."""
        assigned = self._assignments[slot]
        self._sub_params(assigned)[assigned.sub_slot.position] = self._stepped(slot)
        return self._subs[assigned.place], assigned.sub_slot

    def allocate_state(self, slots: Sequence[Slot]) -> None:
        for place, sub in self._subs.items():
            sub.allocate_state(
                [self._in_sub(slot)[1] for slot in slots if self.place(slot) == place]
            )

    def state_of(self, slot: Slot) -> SlotState:
        sub, sub_slot = self._in_sub(slot)
        state, main, name = (
            sub.state_of(sub_slot),
            self._assignments[slot].main,
            self.slot_name(slot),
        )
        if (
            main is None
            or main.dtype
            == self.param_groups[slot.group]["params"][slot.position].dtype
        ):
            return state  # the parameter says as much as the copy
        missing = f"state of {name}: master_param ({main.dtype}) is missing"
        return WithMainParam(state, name, main, missing)


def _settings(group: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in group.items() if key not in _NOT_PUSHED}


def _push_settings(groups: ParamGroups, subs: Iterable[SlotOptimizer]) -> None:
    """Hand current hyperparameters to the sub-optimizers."""
    for index, group in enumerate(groups):
        settings = _settings(group)
        for sub in subs:
            sub.param_groups[index].update(settings)


def _adopt_defaults(groups: ParamGroups, subs: Sequence[SlotOptimizer]) -> None:
    """Show the hyperparameters that the two sub-optimizers filled in."""
    device, host = (_settings(sub.param_groups[-1]) for sub in subs)
    for key in (device.keys() & host.keys()) - groups[-1].keys():
        if device[key] != host[key]:
            raise ValueError(
                f"{key} is {device[key]!r} by default on the device and {host[key]!r} on the "
                f"host; pass {key}="
            )
    for sub in subs:
        for group, of_sub in zip(groups, sub.param_groups, strict=True):
            for key, value in _settings(of_sub).items():
                group.setdefault(key, value)


def _only_accelerator(groups: ParamGroups) -> torch.device:
    devices = {str(local_tensor(param).device) for _, param in iter_slots(groups)}
    found = sorted(devices - {"cpu", "meta"})
    if len(found) > 1:
        raise ValueError(
            f"parameters lie on several accelerators {found}; build one optimizer per device"
        )
    return torch.device(found[0] if found else "meta" if devices == {"meta"} else "cpu")


def _is_own(tensor: Tensor) -> bool:
    """Whether a tensor to step is one of this package's, not a model's parameter."""
    return type(tensor) is Tensor and not tensor.requires_grad
