"""The executor of HybridDeviceOptimizer, which stores the place of each slot, the tensor that is
stepped, and the executor that steps this tensor.

Tensors in ``param_groups`` may be replaced at any time. Before a step, and before state is read,
the executors of the places get the present tensors: tensors of ``param_groups``, or copies that
this executor keeps. All layers use the same slots. A rule of this package steps the slots of all
places; other optimizers have one instance for each place.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from mp_optim.core import (
    ParamGroups,
    Slot,
    SlotUpdates,
    all_params,
    all_same,
    check_shape,
    follow,
    group_settings,
    iter_slots,
    local_tensor,
    param_at,
    same_memory,
    slot_name,
    update_of,
    with_names,
)
from mp_optim.core.executor import Executor, Place
from mp_optim.core.interrupted_step import StepMark
from mp_optim.core.param_attributes import shard_info
from mp_optim.core.slot_state import SlotState
from mp_optim.core.tensor_layout import split_dims
from mp_optim.host.calls import in_own_modes, weak_method
from mp_optim.host.host_memory import Block, aligned_bytes
from mp_optim.host.torch_types import is_dtensor
from mp_optim.kernels.checksums import WrittenWeights
from mp_optim.offload.backward_grads import GradSource
from mp_optim.offload.backward_scheduler import BackwardScheduler
from mp_optim.offload.buckets import HostSlot, plan_offload
from mp_optim.offload.settings import HostStepSettings, SlotStepper
from mp_optim.offload.state_storage import StateFile
from mp_optim.offload.stepper import Stepper
from mp_optim.rules.rule import Rule
from mp_optim.rules.rule_optimizer import RuleOptimizer, SlotOptimizer, executor_of


@dataclass
class PlacedSlot:
    """The place of one slot.

    Attributes:
        place: the place where the slot is stepped.
        share: number of elements with which plans count the parameter. Unlike the local size, this
            number is equal on all ranks.
        model_dtype: dtype of the model's parameter, and of its expected gradient.
        is_stepped_itself: True if the tensor in ``param_groups`` is stepped.
        main: the copy that is stepped instead of the parameter; None if no copy exists.
    """

    place: Place
    share: int
    model_dtype: torch.dtype
    is_stepped_itself: bool
    main: Tensor | None = None


def _is_own(tensor: Tensor) -> bool:
    """True if a tensor to step belongs to this package. A model's parameter does not."""
    return type(tensor) is Tensor and not tensor.requires_grad


def _share(param: Tensor) -> int:
    """Return the number of elements with which plans count a parameter. Unlike the local size, this
    number is equal on all ranks."""
    if not is_dtensor(param):
        share = shard_info(param).offload_share
        return param.numel() if share is None else share
    ranks = math.prod(map(param.device_mesh.size, split_dims(param)))
    return math.ceil(param.numel() / ranks)


def is_of_rule(stepper: SlotStepper) -> bool:
    """True if a rule of this package steps the slots."""
    return isinstance(stepper, Rule) or issubclass(stepper, SlotOptimizer)


class PlacedExecutor(Executor):
    """Steps a fraction of its slots from host memory, and the other slots on their device.

    Args:
        param_groups: live groups; the optimizer adds the first groups before :meth:`build`.
        fraction: share of elements to offload (see :func:`~mp_optim.offload.buckets.plan_offload`).
        copies: True if 16-bit parameters are stepped through FP32 copies.
        remainders: True if the copy of a bfloat16 parameter is a remainder next to the parameter.

    Attributes:
        optimizers: optimizers by place. If both places have one class of this package, only the
            device has an entry, whose optimizer steps all slots.
        executors: executors by place.
        stepper: the stepper of the offloaded slots.
        main_memory: host memory of main params, unless a file stores them. The main params of the
            first groups are one piece.
    """

    main_memory: Block
    _file: StateFile | None
    _offload_place: Place

    def __init__(
        self, param_groups: ParamGroups, fraction: float, copies: bool, remainders: bool
    ) -> None:
        super().__init__(param_groups)
        self.fraction = fraction
        self.optimizers: dict[Place, torch.optim.Optimizer] = {}
        self.executors: dict[Place, Executor] = {}
        # The values of ``executors`` without duplicates, because two places may have one executor.
        self._distinct: list[Executor] = []
        self._copies, self._remainders = copies, remainders
        self._placed: list[list[PlacedSlot]] = []
        self._written = WrittenWeights()
        self._bound_from: tuple[object, ...] = ()

    def build(
        self,
        classes: Mapping[Place, SlotStepper],
        arguments: dict[str, Any],
        settings: HostStepSettings,
        share_settings: Callable[[], None],
    ) -> None:
        """Place the slots of the first groups, and build the executors that step them.

        Args:
            classes: optimizer classes or rules of both places.
            arguments: constructor arguments of the optimizer of each place.
            settings: memory, copies and threads of the offloaded slots.
            share_settings: function that copies settings between these groups and the groups of
                each place, while no wrapper does so. It must not keep the optimizer alive.
        """
        self._offload_place = settings.place
        self._assign(self.param_groups, self.fraction)
        self._file, size = settings.state_file, 0
        for slot, param in iter_slots(self.param_groups):
            if self._file is None and self._is_away(slot, param.dtype):
                size += aligned_bytes(local_tensor(param).numel(), self.main_dtype(param.dtype))
        empty_host = partial(settings.transfer.empty_host, pin=settings.pin_mains)
        self.main_memory = Block(size, empty_host)
        indices = range(len(self.param_groups))
        for place, build in classes.items():
            is_ours = is_of_rule(build)
            if is_ours and build is classes["device"] and self.executors:
                self.executors[place] = self.executors["device"]
                continue
            groups = [self._group_of(index, place, is_ours) for index in indices]
            make = partial(RuleOptimizer, build) if isinstance(build, Rule) else build
            self.optimizers[place] = make(groups, **arguments)
            self.executors[place] = executor_of(self.optimizers[place])
            self._distinct.append(self.executors[place])
        self.writes_settings = any(executor.writes_settings for executor in self._distinct)
        self.clips = any(executor.clips for executor in self._distinct)
        self._groups_are_known(indices)
        part = self.executors[settings.place]
        named = [(s, self.slot_name(s), p) for s, p in iter_slots(self.param_groups)]
        settings.check(part, named, self._is_offloaded)
        updates = weak_method(self._updates_in_backward)
        source = GradSource(self.param_groups, share_settings, updates, "auto")
        bind = weak_method(self._bind)
        self.stepper = Stepper(part, self._slots_of_stepper(), bind, settings, source)

    # -- places and groups ------------------------------------------------------------------------

    def _placed_at(self, slot: Slot) -> PlacedSlot:
        return self._placed[slot.group][slot.position]

    def _is_offloaded(self, slot: Slot) -> bool:
        """True if a slot is not stepped on its parameter's device."""
        return self._placed_at(slot).place != "device"

    def _positions(self, place: Place, group: int) -> list[int]:
        of_group = enumerate(self._placed[group])
        return [position for position, placed in of_group if placed.place == place]

    def _assign(self, groups: Sequence[dict[str, Any]], fraction: float) -> None:
        """Plan the places of new groups together.

        Args:
            groups: the new groups.
            fraction: see :func:`~mp_optim.offload.buckets.plan_offload`.
        """
        params = [param for group in groups for param in group["params"]]
        hosted = plan_offload([_share(p) if p.requires_grad else 0 for p in params], fraction)
        start = 0
        for group in groups:
            placed = []
            for index, param in enumerate(group["params"], start):
                place: Place = self._offload_place if index in hosted else "device"
                is_stepped_itself = place != "host" and param.dtype == self._stepped_dtype(
                    param.dtype
                )
                placed.append(PlacedSlot(place, _share(param), param.dtype, is_stepped_itself))
            start += len(placed)
            self._placed.append(placed)

    def _slots_of_stepper(self) -> list[HostSlot]:
        """Return the offloaded slots in reverse order, because backward is expected to reach the
        last slot first."""
        slots = []
        for slot, param in iter_slots(self.param_groups):
            if self._is_offloaded(slot):
                placed, numel = self._placed_at(slot), local_tensor(param).numel()
                dtype = placed.model_dtype
                in_place = not self._is_away(slot, dtype)
                slots.append(HostSlot(slot, placed.share, numel, dtype, in_place))
        return slots[::-1]

    def place(self, slot: Slot) -> Place:
        return self._placed_at(slot).place

    def host_slots(self) -> Sequence[Slot]:
        stepper = self.stepper
        is_in_place = stepper.pipeline is None and stepper.buckets is None
        is_copied = stepper.settings.place == "host" and not is_in_place
        return [each.slot for each in stepper.slots] if is_copied else ()

    def marks_changes(self, slot: Slot) -> bool:
        place, stepper = self.place(slot), self.stepper
        # Return False for slots in windows and for speculative slots. Kernels record no changes of
        # slots in windows, nor of steps into a back buffer, which may be discarded.
        is_whole = place == "device" or (stepper.pipeline is None and stepper.speculation is None)
        executor = self.executors[place]
        executor.step_instead(slot, self._stepped(slot))
        return is_whole and executor.marks_changes(slot)

    def backend_and_reason(self, group: int, place: Place, device: torch.device) -> tuple[str, str]:
        return self.executors[place].backend_and_reason(group, place, device)

    def _group_of(self, index: int, place: Place, is_ours: bool) -> dict[str, Any]:
        """Return a group for the optimizer of a place. An optimizer of this package gets all
        slots of the group; any other optimizer gets the slots of its place."""
        group = self.param_groups[index]
        if is_ours:
            return with_names(group)
        positions = self._positions(place, index)
        part = group_settings(group)
        part["params"] = [local_tensor(group["params"][position]) for position in positions]
        if names := group.get("param_names"):
            part["fqns"] = [names[position] for position in positions]
        return part

    def _groups_are_known(self, indices: Sequence[int]) -> None:
        """Register the slots of new groups with the executors of the places, and copy the defaults
        of the optimizers into the groups, so that callers can change them.

        Raises:
            ValueError: the two classes' defaults differ, so that a parameter's hyperparameters
                would depend on its place.
        """
        for index in indices:
            for place, executor in self.executors.items():
                if positions := self._positions(place, index):
                    executor.has_only(index, positions)
                    executor.step_together(index, [positions])
                optimizer = self.optimizers.get(place)
                if len(self.optimizers) == 1 or not isinstance(optimizer, SlotOptimizer):
                    continue
                # An optimizer of this package has all slots of a group, and would keep replaced
                # tensors of other places alive. So replace these tensors by tensors without memory.
                params = optimizer.param_groups[index]["params"]
                for position in set(range(len(params))).difference(positions):
                    with torch.no_grad():
                        params[position] = torch.empty_like(params[position], device="meta")
        parts = [executor.param_groups for executor in self._distinct]
        device, host = group_settings(parts[0][-1]), group_settings(parts[-1][-1])
        for key in (device.keys() & host.keys()) - self.param_groups[-1].keys():
            if device[key] != host[key]:
                raise ValueError(
                    f"{key}={device[key]!r}: this default of the optimizer class of the device "
                    f"differs from the default {host[key]!r} of the optimizer class of the host; "
                    f"pass {key} to both classes"
                )
        for part in parts:
            for group, of_part in zip(self.param_groups, part, strict=True):
                for key, value in group_settings(of_part).items():
                    group.setdefault(key, value)
        self.use_mark(self.step_mark)

    def group_added(self) -> None:
        """Place the parameters of an added group, by the fraction and policy of the first
        groups."""
        super().group_added()
        if not self.executors:
            return  # build() places the first groups together.
        index = len(self.param_groups) - 1
        self._assign([self.param_groups[index]], self.fraction)
        for place, optimizer in self.optimizers.items():
            is_ours = isinstance(optimizer, SlotOptimizer)
            if is_ours and "param_names" in self.param_groups[0]:
                # An empty first group needs names, because torch requires names in all groups or in
                # none.
                optimizer.param_groups[0].setdefault("param_names", [])
            optimizer.add_param_group(self._group_of(index, place, is_ours))
        self._groups_are_known([index])
        self._cut_buckets()

    def forget_groups(self, count: int) -> None:
        super().forget_groups(count)
        if not self.executors:
            return  # The executor is under construction, so only the base class has groups.
        del self._placed[count:]
        for executor in self._distinct:
            executor.forget_groups(count)
        self._cut_buckets()

    def _cut_buckets(self) -> None:
        self.stepper.cut_buckets(self._slots_of_stepper())

    def all_groups(self) -> list[ParamGroups]:
        below = (groups for executor in self._distinct for groups in executor.all_groups())
        return [self.param_groups, *below]

    def use_mark(self, mark: StepMark) -> None:
        super().use_mark(mark)
        for optimizer in self.optimizers.values():
            if isinstance(optimizer, SlotOptimizer):
                optimizer.use_mark(mark)
        for executor in self._distinct:
            executor.use_mark(mark)

    def recover(self) -> None:
        for executor in self._distinct:
            executor.recover()
        # Allocate other back buffers, because an interrupted swap may have left two tensors in the
        # same memory.
        self._cut_buckets()

    def memory_moved(self, slot: Slot | None = None) -> None:
        for executor in self._distinct:
            executor.memory_moved(slot)

    def follow_memory(self) -> None:
        for executor in self._distinct:
            executor.follow_memory()

    def check_groups(self) -> None:
        for executor in self._distinct:
            executor.check_groups()

    def check_settings(self, group: dict[str, Any]) -> None:
        self.executors["device"].check_settings(group)

    def metrics(self) -> dict[str, float]:
        totals: Counter[str] = Counter()
        for executor in self._distinct:
            totals.update(executor.metrics())
        return dict(totals)

    # -- main params ------------------------------------------------------------------------------

    def main_dtype(self, dtype: torch.dtype) -> torch.dtype:
        return dtype if self._remainders and dtype == torch.bfloat16 else torch.float32

    def _stepped_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """Return the dtype in which a parameter is stepped without a wrapper."""
        is_copied = self._copies and dtype in (torch.float16, torch.bfloat16)
        return self.main_dtype(dtype) if is_copied else dtype

    def _bind(self) -> None:
        """Give the present tensors to the executors that step them."""
        sources = self.step_mark.plan_key, *all_params(self.param_groups)
        if all_same(sources, self._bound_from):
            return
        stays = True
        self._refresh_copies(self._summed())
        for slot, param in iter_slots(self.param_groups):
            executor, now = self.executors[self._placed_at(slot).place], self._stepped(slot)
            before = executor.stepped(slot)
            stays_there = _is_own(before) and same_memory(before, now)
            if before is not now and not stays_there:
                executor.step_instead(slot, now)
            # Other code may write a model's parameter or replace its memory. So the next call binds
            # again unless all tensors belong to this package.
            stays = stays and _is_own(param)
        self._bound_from = sources if stays else ()

    def _summed(self) -> list[Slot]:
        """Return the slots whose FP32 copies are compared with their parameters by checksums."""
        return [slot for slot in self.host_slots() if self._placed_at(slot).main is not None]

    def _local(self, slot: Slot) -> Tensor:
        return local_tensor(param_at(self.param_groups, slot))

    def _refresh_copies(self, slots: Sequence[Slot]) -> None:
        """Copy parameters that other code wrote into the FP32 copies of their slots."""
        for index in self._written.changed(slots, list(map(self._local, slots))):
            slot = slots[index]
            main, name = self._placed_at(slot).main, self.slot_name(slot)
            assert main is not None
            if follow(main, self._local(slot), name) and self._is_offloaded(slot):
                self.stepper.schedule.distrust(slot)

    def _current(self, slot: Slot) -> Executor:
        """Give the present tensor of a slot to the slot's executor, and return the executor. The
        caller may write live tensors of the executor, so the slot's checksum and results of
        backward are no longer trusted."""
        executor = self.executors[self._placed_at(slot).place]
        executor.step_instead(slot, self._stepped(slot))
        if self._placed_at(slot).main is not None:
            self._refresh_copies([slot])
            # Forget the checksum, because the caller may write to the copy.
            self._written.forget(slot)
        if self._is_offloaded(slot):
            self.stepper.schedule.distrust(slot)
        return executor

    @in_own_modes
    def _copy(self, source: Tensor, place: Place, dtype: torch.dtype) -> Tensor:
        """Return a new copy of a tensor, in the memory of the place where the copy is stepped."""
        if place == "device":
            return source.to(dtype)
        if self._file is not None:
            return self._file.take(source.shape, dtype).copy_(source)
        block = self.main_memory.with_room(aligned_bytes(source.numel(), dtype))
        return block.take(source.shape, dtype).copy_(source)

    def _stepped(self, slot: Slot) -> Tensor:
        """Return the tensor to step for a slot, from the current ``param_groups``."""
        placed, param = self._placed_at(slot), param_at(self.param_groups, slot)
        if placed.is_stepped_itself:
            return param if _is_own(param) else local_tensor(param)
        local = local_tensor(param)
        if placed.main is None:
            placed.main = self._copy(local, placed.place, self._stepped_dtype(local.dtype))
        check_shape(placed.main, local, self.slot_name(slot))
        return placed.main

    def main_param(self, slot: Slot) -> Tensor:
        return self._current(slot).main_param(slot)

    def set_main_param(self, slot: Slot, value: Tensor) -> None:
        self._current(slot).set_main_param(slot, value)

    def main_written(self, slot: Slot) -> None:
        self._current(slot)

    def reserve_main_params(self, coming: Sequence[tuple[Slot, Tensor]]) -> None:
        here = [(slot, each) for slot, each in coming if not self._is_away(slot, each.dtype)]
        super().reserve_main_params(here)

    def _is_away(self, slot: Slot, dtype: torch.dtype) -> bool:
        """True if a slot, with a parameter of this dtype, needs a main param outside of the
        parameter's memory. A streamed slot needs none if the parameter is the whole main param or
        its upper half."""
        place = self._placed_at(slot).place
        return place == "host" or (place == "streamed" and dtype != self.main_dtype(dtype))

    def new_main_param(self, slot: Slot, source: Tensor) -> Tensor:
        self.step_mark.invalidate_plans()
        # From now on the tensor in ``param_groups`` is stepped itself.
        self._placed_at(slot).is_stepped_itself, self._placed_at(slot).main = True, None
        if not self._is_away(slot, source.dtype):
            return super().new_main_param(slot, source)
        # Allocate the main param where it is stored, so that the device never holds it in FP32.
        main = self._copy(source, self._placed_at(slot).place, self.main_dtype(source.dtype))
        self.step_instead(slot, main)
        return main

    def reload(self) -> None:
        """Copy the parameters' present values into the copies that this executor keeps."""
        self.step_mark.open_state()
        for slot, param in iter_slots(self.param_groups):
            if self._placed_at(slot).main is not None or param.dtype != torch.float32:
                self.set_main_param(slot, local_tensor(param))

    # -- state ------------------------------------------------------------------------------------

    def allocate_state(self, slots: Sequence[Slot]) -> None:
        for place, executor in self.executors.items():
            here = [slot for slot in slots if self._placed_at(slot).place == place]
            for slot in here:
                self._current(slot)
            executor.allocate_state(here)

    def state_of(self, slot: Slot) -> SlotState:
        state, main = self._current(slot).state_of(slot), self._placed_at(slot).main
        if main is None or main.dtype == param_at(self.param_groups, slot).dtype:
            # The parameter has all bits of the copy, so the state needs no main param.
            return state
        missing = f"state of {state.name}: master_param ({main.dtype}) is missing"
        return replace(state, main=main, missing=missing)

    # -- stepping ---------------------------------------------------------------------------------

    def _outputs_of(self, updates: SlotUpdates) -> Sequence[Tensor | None]:
        """Return the tensor that receives each stepped value, or None for a value that is stepped
        in place. A wrapper sets these tensors itself."""
        if all(self._placed_at(slot).is_stepped_itself for slot in updates.slots):
            return updates.outputs
        return [
            output if self._placed_at(slot).is_stepped_itself else self._local(slot)
            for slot, output in zip(updates.slots, updates.outputs, strict=True)
        ]

    def clipped(self, updates: SlotUpdates, grad_norm: float) -> SlotUpdates:
        found = {
            place: executor.clipped(updates, grad_norm)
            for place, executor in self.executors.items()
        }
        places = (self._placed_at(slot).place for slot in updates.slots)
        multipliers = [found[place].multipliers[index] for index, place in enumerate(places)]
        return replace(updates, multipliers=multipliers)

    def step_slots(self, updates: SlotUpdates) -> None:
        self._bind()
        make = partial(self._outputs_of, updates)
        outputs = updates.slots.part("outputs", (updates.outputs,), make)
        if outputs is not updates.outputs:
            updates = replace(updates, outputs=outputs)
        self.stepper.step_slots(updates, self.executors["device"])
        # If all tensors are bound, the optimizer's own tensors are stepped, and no copy is
        # compared. Otherwise checksums show the next step which parameters other code wrote.
        if not self._bound_from:
            slots = self._summed()
            self._written.note(slots, list(map(self._local, slots)))

    def finish_step(self) -> None:
        for executor in self._distinct:
            executor.finish_step()

    def verdict_device(self) -> torch.device | None:
        has_slots = bool(self.stepper.slots)
        return None if has_slots else self.executors["device"].verdict_device()

    def _updates_in_backward(self, grads: Mapping[Slot, Tensor], multiplier: float) -> SlotUpdates:
        """Return the updates of gradients that arrived while nothing wraps the optimizer."""
        groups, updates = self.param_groups, []
        for slot, grad in grads.items():
            param = param_at(groups, slot)
            if local_tensor(param).shape == grad.shape:
                update = update_of(slot, slot_name(groups, slot), param, grad)
                updates.append(update._replace(multiplier=multiplier))
        found = SlotUpdates.of(updates)
        return replace(found, outputs=self._outputs_of(found))


def stepper_of(executor: Executor) -> Stepper | None:
    """Return the stepper of an executor's offloaded slots; None if the executor has no places."""
    return executor.stepper if isinstance(executor, PlacedExecutor) else None


def work_in_backward(
    executor: Executor, source: GradSource, releases: bool
) -> BackwardScheduler | None:
    """Begin jobs during backward on the gradients of a wrapper from now on. Return None if the mode
    is ``sync``.

    Args:
        executor: executor inside the wrapper.
        source: the wrapper, whose parameters get the hooks.
        releases: True if gradients leave the device during backward.

    Raises:
        ValueError: gradients cannot be released.
    """
    stepper = stepper_of(executor)
    if stepper is None or not stepper.settings.runs_in_backward:
        if releases:
            raise ValueError(
                "release_gradients=True: the inner optimizer copies no gradients during backward; "
                "pass offload_mode='overlap' or 'speculative' to HybridDeviceOptimizer, or set "
                "release_gradients=False"
            )
        return None
    if releases:
        for slot, param in iter_slots(source.param_groups):
            if getattr(param, "main_grad", None) is not None:
                raise ValueError(
                    f"release_gradients=True: the parameter at {slot} has a main_grad, which "
                    "belongs to Megatron's DistributedDataParallel and cannot be released; set "
                    "release_gradients=False"
                )
        stepper.release_gradients()
    stepper.schedule.grads.source = source
    stepper.schedule.grads.update_hooks()
    return stepper.schedule
