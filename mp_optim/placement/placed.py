"""PlacedExecutor: hands each slot to the executor of its place, and that one what to step.

Keyed by position. Tensors in ``param_groups`` may be replaced at any time: before each step the
executors are handed whatever sits at each slot now. A rule of this package steps the slots of all
places; of other optimizers each place has its own.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from mp_optim.placement.grad_hooks import OwnGrads
from mp_optim.placement.placed_slots import MainDtypes, MainMemory, PlacedSlots
from mp_optim.placement.settings import HostStepSettings, OffloadedStep
from mp_optim.placement.stepper import Stepper
from mp_optim.slots import (
    ParamGroups,
    Slot,
    SlotUpdates,
    group_settings,
    iter_slots,
    local_tensor,
    param_at,
    with_names,
)
from mp_optim.slots.executor import Executor, Mode, Place
from mp_optim.slots.interrupted_step import StepMark
from mp_optim.slots.slot_state import SlotState, WithMainParam
from mp_optim.update import executor_of
from mp_optim.update.optimizer import SlotOptimizer


class PlacedExecutor(Executor):
    """Steps a fraction of its slots from host memory, by whatever steps them there, and the rest
    where they lie.

    Args:
        param_groups: live groups, to which a face adds the first ones before :meth:`build`.
        fraction: see :func:`~mp_optim.placement.plan.plan_offload`.
        how: where and when offloaded slots are stepped.
        dtypes: what parameters are stepped in.

    Attributes:
        optimizers: by place. Where both have one class of this package it is the device's alone,
            and steps the slots of both.
        parts: what steps the slots of each place.
        stepper: steps what is offloaded.
    """

    def __init__(
        self, param_groups: ParamGroups, fraction: float, how: OffloadedStep, dtypes: MainDtypes
    ) -> None:
        super().__init__(param_groups)
        self.fraction, self._how = fraction, how
        self.optimizers: dict[Place, torch.optim.Optimizer] = {}
        self.parts: dict[Place, Executor] = {}
        self._placed = PlacedSlots(
            param_groups, self.parts, how.offloaded_place, dtypes, self._exposed
        )

    def build(
        self,
        classes: Mapping[Place, type[torch.optim.Optimizer]],
        arguments: dict[str, Any],
        settings: HostStepSettings,
        share_settings: Callable[[], None],
    ) -> None:
        """Place the slots of the first groups, and build what steps them.

        Args:
            classes: of the optimizers of both places. arguments: for each of them.
            share_settings: makes the groups here and in the parts alike, as long as nothing wraps
                the optimizer.
        """
        placed, offloaded = self._placed, self._how.offloaded_place
        placed.assign(self.param_groups, self.fraction)
        empty_host = partial(settings.transfer.empty_host, pin=settings.pin_mains)
        placed.memory = MainMemory(settings.state_file, self._offloaded_forms(), empty_host)
        indices = range(len(self.param_groups))
        for place, build in classes.items():
            is_ours = issubclass(build, SlotOptimizer)
            if is_ours and build is classes["device"] and self.parts:
                self.parts[place] = self.parts["device"]
                continue
            groups = [self._group_of(index, place, is_ours) for index in indices]
            self.optimizers[place] = build(groups, **arguments)
            self.parts[place] = executor_of(self.optimizers[place])
        self._groups_are_known(indices)
        part = self.parts[offloaded]
        named = [(s, self.slot_name(s), p) for s, p in iter_slots(self.param_groups)]
        self._how.check(part, named, placed.is_offloaded, settings)
        self.stepper = Stepper(self._how, part, placed.host_slots(), placed.bind, settings)
        report = self.stepper.schedule.on_grad_ready
        self.stepper.schedule.source = OwnGrads(self, report, placed.output, share_settings)
        self._watch()

    def _offloaded_forms(self) -> Iterator[tuple[int, torch.dtype]]:
        """Elements and dtype of the main param of each offloaded slot, if it has one."""
        for slot, param in iter_slots(self.param_groups):
            if self._placed.is_offloaded(slot):
                yield local_tensor(param).numel(), self.main_dtype(param.dtype)

    # -- places and groups ------------------------------------------------------------------------

    @property
    def main_memory(self) -> MainMemory:
        """What main params that are not on the device are in."""
        return self._placed.memory

    def place(self, slot: Slot) -> Place:
        return self.stepper.host_part.place_of(slot)

    def part_at(self, place: Place) -> Executor:
        """What steps the slots of a place."""
        return self.parts["device" if place == "device" else self._how.offloaded_place]

    @property
    def _executors(self) -> list[Executor]:
        """All that steps, each once."""
        return [self.parts[place] for place in self.optimizers]

    def carried_out_by(self, group: int, place: Place, device: torch.device) -> tuple[str, str]:
        return self.part_at(place).carried_out_by(group, place, device)

    def _group_of(self, index: int, place: Place, is_ours: bool) -> dict[str, Any]:
        """A group as the optimizer of a place is given it: one of this package has all slots, as
        they are here, any other has those of its place."""
        group = self.param_groups[index]
        if is_ours:
            return with_names(group)
        positions = self._placed.at(place, index)
        part = _settings(group)
        part["params"] = [local_tensor(group["params"][position]) for position in positions]
        if names := group.get("param_names"):
            part["fqns"] = [names[position] for position in positions]
        return part

    def _groups_are_known(self, indices: Sequence[int]) -> None:
        """After new groups: say which slots are where; show the hyperparameters that were filled
        in, so that they can be changed here.

        Raises:
            ValueError: the two classes' defaults differ, so that a parameter's rule would depend on
                its place.
        """
        for index in indices:
            for place, part in self.parts.items():
                if positions := self._placed.at(place, index):
                    part.has_only(index, positions)
                    part.step_together(index, [positions])
            self._release_others(index)
        _adopt_defaults(self.param_groups, [part.param_groups for part in self._executors])
        self.use_mark(self.step_mark)

    def _release_others(self, index: int) -> None:
        """An optimizer of this package has all slots of a group: those of the other place are
        tensors without memory there, so that nothing keeps what is replaced."""
        for place, optimizer in self.optimizers.items():
            if len(self.optimizers) == 1 or not isinstance(optimizer, SlotOptimizer):
                continue
            params, here = optimizer.param_groups[index]["params"], self._placed.at(place, index)
            for position in set(range(len(params))).difference(here):
                with torch.no_grad():
                    params[position] = torch.empty_like(params[position], device="meta")

    def group_added(self) -> None:
        """Its parameters are placed on their own, by the same fraction and policy."""
        super().group_added()
        if not self.parts:
            return  # the first groups are planned together
        index = len(self.param_groups) - 1
        self._placed.assign([self.param_groups[index]], self.fraction)
        for place, optimizer in self.optimizers.items():
            is_ours = isinstance(optimizer, SlotOptimizer)
            if is_ours and "param_names" in self.param_groups[0]:
                # of an empty first group: torch wants names in all groups or none
                optimizer.param_groups[0].setdefault("param_names", [])
            optimizer.add_param_group(self._group_of(index, place, is_ours))
        self._groups_are_known([index])
        self._cut_buckets()

    def forget_groups(self, count: int) -> None:
        super().forget_groups(count)
        if not self.parts:
            return  # it is being built
        self._placed.forget_groups(count)
        for part in self._executors:
            part.forget_groups(count)
        self._cut_buckets()

    def _cut_buckets(self) -> None:
        self.stepper.cut_buckets(self._placed.host_slots())
        self._watch()

    def all_groups(self) -> list[ParamGroups]:
        below = (groups for part in self._executors for groups in part.all_groups())
        return [self.param_groups, *below]

    def use_mark(self, mark: StepMark) -> None:
        super().use_mark(mark)
        for optimizer in self.optimizers.values():
            if isinstance(optimizer, SlotOptimizer):
                optimizer.use_mark(mark)
        for part in self._executors:
            part.use_mark(mark)

    def recover(self) -> None:
        for part in self._executors:
            part.recover()
        # With other back buffers: half a swap may have left two tensors with one memory.
        self._cut_buckets()

    def memory_moved(self) -> None:
        for part in self._executors:
            part.memory_moved()

    @property
    def writes_settings(self) -> bool:  # type: ignore[override]  # of its parts
        return any(part.writes_settings for part in self._executors)

    def check_groups(self) -> None:
        for part in self._executors:
            part.check_groups()

    def check_settings(self, group: dict[str, Any]) -> None:
        self.parts["device"].check_settings(group)

    def metrics(self) -> dict[str, float]:
        totals: Counter[str] = Counter()
        for part in self._executors:
            totals.update(part.metrics())
        return dict(totals)

    @property
    def has_modes(self) -> bool:
        return any(part.has_modes for part in self._executors)

    def switch_mode(self, mode: Mode) -> None:
        self._placed.bind()
        for part in self._executors:
            part.switch_mode(mode)
        for slot, param in iter_slots(self.param_groups):
            if (main := self._placed[slot].main) is not None:
                local_tensor(param).copy_(main)

    # -- main params ------------------------------------------------------------------------------

    def main_dtype(self, dtype: torch.dtype) -> torch.dtype:
        return self._placed.dtypes.main(dtype)

    def main_param(self, slot: Slot) -> Tensor:
        return self._placed.current(slot).main_param(slot)

    def set_main_param(self, slot: Slot, value: Tensor) -> None:
        self._placed.current(slot).set_main_param(slot, value)

    def written_outside(self, slot: Slot) -> None:
        self._placed.current(slot).written_outside(slot)

    def reserve_main_params(self, coming: Sequence[tuple[Slot, Tensor]]) -> None:
        resident = [pair for pair in coming if not self._placed.is_offloaded(pair[0])]
        super().reserve_main_params(resident)

    def new_main_param(self, slot: Slot, source: Tensor) -> Tensor:
        self._placed.make_resident(slot)
        if not self._placed.is_offloaded(slot):
            return super().new_main_param(slot, source)
        # born where it is kept: it never exists in FP32 on the device
        main = self._placed.copy(source, self._placed[slot].place, self.main_dtype(source.dtype))
        self.step_instead(slot, main)
        return main

    def reload(self) -> None:
        """Take the parameters' present values into the copies kept here."""
        for slot, param in iter_slots(self.param_groups):
            if self._placed[slot].main is not None or param.dtype != torch.float32:
                self.set_main_param(slot, local_tensor(param))

    # -- state ------------------------------------------------------------------------------------

    def _exposed(self, slot: Slot) -> None:
        """The stepper of now hears of it."""
        self.stepper.schedule.distrust(slot)

    def allocate_state(self, slots: Sequence[Slot]) -> None:
        for place, part in self.parts.items():
            here = [slot for slot in slots if self._placed[slot].place == place]
            for slot in here:
                self._placed.current(slot)
            part.allocate_state(here)

    def state_of(self, slot: Slot) -> SlotState:
        state, main = self._placed.current(slot).state_of(slot), self._placed[slot].main
        if main is None or main.dtype == param_at(self.param_groups, slot).dtype:
            return state  # the parameter says as much as the copy
        name = self.slot_name(slot)
        missing = f"state of {name}: master_param ({main.dtype}) is missing"
        return WithMainParam(state, name, main, missing)

    # -- stepping ---------------------------------------------------------------------------------

    def step_slots(self, updates: SlotUpdates, *, grad_norm: float | None = None) -> None:
        if not self._placed.bind():
            self._watch()
        updates = self._placed.with_outputs(updates)
        self.stepper.step_slots(updates, grad_norm, self.parts["device"])
        self._placed.written()

    def verdict_device(self) -> torch.device | None:
        return None if self.stepper.has_slots else self.parts["device"].verdict_device()

    def _watch(self) -> None:
        """Notice gradients of the parameters of now, as long as nothing above reports them."""
        source = self.stepper.schedule.source
        if self.stepper.schedule.is_early and isinstance(source, OwnGrads):
            source.follow()


def stepper_of(executor: Executor) -> Stepper | None:
    """What steps the offloaded slots of an executor, if it places any."""
    return executor.stepper if isinstance(executor, PlacedExecutor) else None


def _settings(group: dict[str, Any]) -> dict[str, Any]:
    """Hyperparameters; the names of a foreign optimizer's parameters are its own."""
    return {key: value for key, value in group_settings(group).items() if key != "fqns"}


def _adopt_defaults(groups: ParamGroups, parts: Sequence[ParamGroups]) -> None:
    """Show the hyperparameters that the parts filled in, so that they can be changed.

    Raises:
        ValueError: the two classes' defaults differ, so that a parameter's rule would depend on its
            place.
    """
    device, host = _settings(parts[0][-1]), _settings(parts[-1][-1])
    for key in (device.keys() & host.keys()) - groups[-1].keys():
        if device[key] != host[key]:
            raise ValueError(
                f"{key} is {device[key]!r} by default on the device and {host[key]!r} on the "
                f"host; pass {key}="
            )
    for part in parts:
        for group, of_part in zip(groups, part, strict=True):
            for key, value in _settings(of_part).items():
                group.setdefault(key, value)
