"""PlacedExecutor: hands each slot to the executor of its place, and that one what to step.

Keyed by position. Tensors in ``param_groups`` may be replaced at any time: before each step the
executors, one for each place, are handed whatever sits at each slot now.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from mp_optim.placement.assignments import Assignments, adopt_defaults, sub_group
from mp_optim.placement.grad_hooks import OwnGrads
from mp_optim.placement.settings import HostStepSettings, OffloadedStep
from mp_optim.placement.stepped_tensors import MainDtypes, MainMemory, SteppedTensors
from mp_optim.placement.stepper import Stepper
from mp_optim.slots import (
    ParamGroups,
    Slot,
    SlotUpdate,
    SlotUpdates,
    iter_slots,
    local_tensor,
    param_at,
)
from mp_optim.slots.executor import Executor, Mode
from mp_optim.slots.host_part import Place
from mp_optim.slots.interrupted_step import StepMark
from mp_optim.slots.slot_state import SlotState
from mp_optim.slots.tensor_layout import part_of
from mp_optim.update import executor_of
from mp_optim.update.optimizer import SlotOptimizer
from mp_optim.update.state_format import WithMainParam


class PlacedExecutor(Executor):
    """Steps a fraction of its slots from host memory, by whatever steps them there, and the rest
    where they lie.

    Args:
        param_groups: live groups, to which a face adds the first ones before :meth:`build`.
        fraction: see :func:`~mp_optim.placement.plan.plan_offload`.
        how: where and when offloaded slots are stepped.
        dtypes: what parameters are stepped in.

    Attributes:
        optimizers: of each place, as their classes built them. parts: what steps for them.
        stepper: steps what is offloaded.
        push_settings: makes the groups here and in the parts alike, as long as nothing wraps the
            optimizer.
    """

    def __init__(
        self, param_groups: ParamGroups, fraction: float, how: OffloadedStep, dtypes: MainDtypes
    ) -> None:
        super().__init__(param_groups)
        self.fraction, self._how, self._dtypes = fraction, how, dtypes
        self._offloaded = how.sub_place
        self._assignments = Assignments()
        self.optimizers: dict[Place, torch.optim.Optimizer] = {}
        self.parts: dict[Place, Executor] = {}
        self.push_settings: Callable[[], object] = _nothing
        self._own_grads: OwnGrads | None = None

    def build(
        self,
        builders: Mapping[Place, Callable[[Any], torch.optim.Optimizer]],
        settings: HostStepSettings,
    ) -> None:
        """Place the slots of the first groups, and build what steps them.

        Args:
            builders: make the optimizer of a place, from its groups.
        """
        offloaded = self._offloaded
        self._assignments.assign(self.param_groups, self.fraction, offloaded, self._dtypes.stepped)
        empty_host = partial(settings.transfer.empty_host, pin=settings.pin_mains)
        self.main_memory = MainMemory(settings.state_file, self._offloaded_forms(), empty_host)
        self._tensors = SteppedTensors(
            self.param_groups,
            self._assignments,
            self.parts,
            self.main_memory,
            self._dtypes,
            self._exposed,
        )
        indices = range(len(self.param_groups))
        for place, build in builders.items():
            optimizer = build([self._sub_group(index, place) for index in indices])
            self.optimizers[place] = optimizer
            self.parts[place] = executor_of(optimizer)
        self._tell_parts(indices)
        named = [(s, self.slot_name(s), p) for s, p in iter_slots(self.param_groups)]
        self._how.check(self.parts[offloaded], named, self._is_offloaded, settings)
        slots = self._assignments.offloaded_slots(self.param_groups)
        self.stepper: Stepper = Stepper(self._how, self.parts[offloaded], slots, self, settings)
        self._own_grads = OwnGrads(self) if self.stepper.works_in_backward else None

    def _offloaded_forms(self) -> Iterator[tuple[int, torch.dtype]]:
        """Elements and dtype of the main param of each offloaded slot, if it has one."""
        for slot, param in iter_slots(self.param_groups):
            if self._is_offloaded(slot):
                yield local_tensor(param).numel(), self.main_dtype(param.dtype)

    # -- places and groups ------------------------------------------------------------------------

    @property
    def host(self) -> Stepper:
        return self.stepper

    def place(self, slot: Slot) -> Place:
        assigned = self._assignments[slot]
        if assigned.place == "device":
            return "device"
        return self.stepper.place_of(assigned.sub_slot)

    def _is_offloaded(self, slot: Slot) -> bool:
        return self._assignments[slot].place != "device"

    def part_at(self, place: Place) -> Executor:
        """What steps the slots of a place."""
        return self.parts["device" if place == "device" else self._offloaded]

    def stepper_of(self, group: int, place: Place, device: torch.device) -> tuple[str, str]:
        return self.part_at(place).stepper_of(group, place, device)

    def _sub_group(self, index: int, place: Place) -> dict[str, Any]:
        """A group as the optimizer of a place is given it."""
        of_group = enumerate(self._assignments.of_group(index))
        here = [position for position, assigned in of_group if assigned.place == place]
        return sub_group(self.param_groups[index], here)

    def _tell_parts(self, indices: Sequence[int]) -> None:
        """After new groups: tell executors, which have local tensors, what those are parts of; show
        the hyperparameters that were filled in, so that they can be changed here.

        Raises:
            ValueError: the two classes' defaults differ, so that a parameter's rule would depend on
                its place.
        """
        for index in indices:
            for position, param in enumerate(self.param_groups[index]["params"]):
                assigned = self._assignments[Slot(index, position)]
                self.parts[assigned.place].set_part(assigned.sub_slot, part_of(param))
        adopt_defaults(self.param_groups, [part.param_groups for part in self.parts.values()])
        self.use_mark(self.step_mark)
        self._tensors.forget()

    def group_added(self) -> None:
        """Its parameters are placed on their own, by the same fraction and policy."""
        super().group_added()
        if not self.parts:
            return  # the first groups are planned together
        index = len(self.param_groups) - 1
        groups = [self.param_groups[index]]
        self._assignments.assign(groups, self.fraction, self._offloaded, self._dtypes.stepped)
        for place, optimizer in self.optimizers.items():
            optimizer.add_param_group(self._sub_group(index, place))
        self._tell_parts([index])
        self._cut_buckets()
        self._watch()

    def forget_groups(self, count: int) -> None:
        super().forget_groups(count)
        if not self.parts:
            return  # it is being built
        self._assignments.forget_groups(count)
        for part in self.parts.values():
            part.forget_groups(count)
        self._tensors.forget()
        self._cut_buckets()
        self._watch()

    def all_groups(self) -> list[ParamGroups]:
        return [
            self.param_groups,
            *(groups for part in self.parts.values() for groups in part.all_groups()),
        ]

    def use_mark(self, mark: StepMark) -> None:
        super().use_mark(mark)
        for optimizer in self.optimizers.values():
            if isinstance(optimizer, SlotOptimizer):
                optimizer.use_mark(mark)
        for part in self.parts.values():
            part.use_mark(mark)

    def recover(self) -> None:
        for part in self.parts.values():
            part.recover()
        # With other back buffers: half a swap may have left two tensors with one memory.
        self._cut_buckets()

    def _cut_buckets(self) -> None:
        self.stepper.cut_buckets(self._assignments.offloaded_slots(self.param_groups))

    def memory_moved(self) -> None:
        for part in self.parts.values():
            part.memory_moved()

    @property
    def writes_settings(self) -> bool:  # type: ignore[override]  # of its parts
        return any(part.writes_settings for part in self.parts.values())

    def check_groups(self) -> None:
        self.push_settings()
        for part in self.parts.values():
            part.check_groups()

    def check_settings(self, group: dict[str, Any]) -> None:
        self.parts["device"].check_settings(group)

    def metrics(self) -> dict[str, float]:
        totals: Counter[str] = Counter()
        for part in self.parts.values():
            totals.update(part.metrics())
        return dict(totals)

    @property
    def has_modes(self) -> bool:
        return any(part.has_modes for part in self.parts.values())

    def switch_mode(self, mode: Mode) -> None:
        self.bind_tensors()
        for part in self.parts.values():
            part.switch_mode(mode)
        for slot, param in iter_slots(self.param_groups):
            if (main := self._assignments[slot].main) is not None:
                local_tensor(param).copy_(main)

    # -- main params ------------------------------------------------------------------------------

    def main_dtype(self, dtype: torch.dtype) -> torch.dtype:
        return self._dtypes.main(dtype)

    def main_param(self, slot: Slot) -> Tensor:
        part, sub_slot = self._tensors.in_sub(slot)
        return part.main_param(sub_slot)

    def set_main_param(self, slot: Slot, value: Tensor) -> None:
        part, sub_slot = self._tensors.in_sub(slot)
        part.set_main_param(sub_slot, value)

    def written_outside(self, slot: Slot) -> None:
        part, sub_slot = self._tensors.in_sub(slot)
        part.written_outside(sub_slot)

    def reserve_main_params(self, coming: Sequence[tuple[Slot, Tensor]]) -> None:
        super().reserve_main_params([pair for pair in coming if not self._is_offloaded(pair[0])])

    def new_main_param(self, slot: Slot, source: Tensor) -> Tensor:
        """Main param, born where it is kept: one on the host never exists in FP32 on the
        device."""
        self._tensors.forget()
        place = self._assignments.make_resident(slot).place
        if place == "device":
            return super().new_main_param(slot, source)
        main = self._tensors.copy(source, place, self.main_dtype(source.dtype))
        self.param_groups[slot.group]["params"][slot.position] = main
        return main

    def reload(self) -> None:
        """Take the parameters' present values into the copies kept here."""
        for slot, param in iter_slots(self.param_groups):
            if self._assignments[slot].main is not None or param.dtype != torch.float32:
                self.set_main_param(slot, local_tensor(param))

    # -- state ------------------------------------------------------------------------------------

    def _exposed(self, sub_slot: Slot) -> None:
        """The stepper of now hears of it."""
        self.stepper.state_exposed(sub_slot)

    def allocate_state(self, slots: Sequence[Slot]) -> None:
        for place, part in self.parts.items():
            part.allocate_state(
                [
                    self._tensors.in_sub(slot)[1]
                    for slot in slots
                    if self._assignments[slot].place == place
                ]
            )

    def state_of(self, slot: Slot) -> SlotState:
        part, sub_slot = self._tensors.in_sub(slot)
        state, main = part.state_of(sub_slot), self._assignments[slot].main
        if main is None or main.dtype == param_at(self.param_groups, slot).dtype:
            return state  # the parameter says as much as the copy
        name = self.slot_name(slot)
        missing = f"state of {name}: master_param ({main.dtype}) is missing"
        return WithMainParam(state, name, main, missing)

    # -- stepping ---------------------------------------------------------------------------------

    def bind_tensors(self) -> None:
        """Hand current tensors to the parts."""
        self._tensors.bind()

    def step_slots(self, updates: Sequence[SlotUpdate], *, grad_norm: float | None = None) -> None:
        if not self._tensors.are_bound:
            self._watch()
        self.bind_tensors()
        by_place = self._assignments.by_place(SlotUpdates.of(updates), self.param_groups)

        def step_device() -> None:
            if by_place["device"]:
                self.parts["device"].step_slots(by_place["device"], grad_norm=grad_norm)

        self.stepper.step_buckets(by_place[self._offloaded], grad_norm, step_device)
        self._tensors.written()

    def verdict_device(self) -> torch.device | None:
        return None if self.stepper.has_slots else self.parts["device"].verdict_device()

    # -- gradients that get ready during backward -------------------------------------------------

    def _watch(self) -> None:
        if self._own_grads is not None:
            self._own_grads.follow()

    def stop_watching(self) -> None:
        """See :class:`~mp_optim.placement.schedule.HostOwner`."""
        self._own_grads = None  # its hooks go with it
        self.push_settings = _nothing

    def on_host(self, update: SlotUpdate) -> SlotUpdate | None:
        """See :class:`~mp_optim.placement.schedule.HostOwner`."""
        return self._assignments.on_host(update, self.param_groups)


def _nothing() -> None: ...
