"""HybridDeviceOptimizer: one optimizer, part of whose state is in host memory.

Keyed by position. Tensors in ``param_groups`` may be replaced at any time: before each step the
sub-optimizers, one for each place, are handed whatever sits at each slot now.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from mp_optim.placement.assignments import Assignments
from mp_optim.placement.cores import occupy, worker_threads
from mp_optim.placement.host_step import HostStepSettings, Stepper
from mp_optim.placement.main_memory import MainMemory
from mp_optim.placement.own_grads import OwnGrads
from mp_optim.placement.speculation import SpeculationSettings
from mp_optim.placement.state_file import state_file_in
from mp_optim.placement.stepped_tensors import MainDtypes, SteppedTensors
from mp_optim.placement.steppers import (
    OffloadedStep,
    only_accelerator,
)
from mp_optim.placement.sub_groups import adopt_defaults, sub_group
from mp_optim.placement.timeline import StepTimeline
from mp_optim.process.torch_modes import in_own_modes
from mp_optim.process.transfer import Transfer, transfer_for
from mp_optim.slots import (
    Slot,
    SlotUpdate,
    SlotUpdates,
    current_grad,
    iter_slots,
    local_tensor,
    param_at,
    update_of,
)
from mp_optim.slots.group_lists import added_whole
from mp_optim.slots.host_part import Place
from mp_optim.slots.interrupted_step import StepMark
from mp_optim.slots.keyed_optimizer import Closure, Mode
from mp_optim.slots.optimizer import SlotOptimizer
from mp_optim.slots.slot_state import SlotState
from mp_optim.slots.tensor_layout import part_of
from mp_optim.update import (
    FusedAdam,
    as_slot_optimizer,
    global_grad_norm,
)
from mp_optim.update.foreign import ForeignOptimizer
from mp_optim.update.main_param_state import WithMainParam


class HybridDeviceOptimizer(SlotOptimizer):
    """Keeps main params and state of a fraction of its parameters on the host, and steps them there
    or streams them through the device; the rest is stepped where it lies.

    Args:
        params: parameters, named parameters or param groups, as torch takes them.
        offload_fraction: share of elements that are offloaded (see :func:`plan_offload`).
        cpu_optimizer_cls: any torch optimizer class; ours step in one pass.
        gpu_optimizer_cls: the same, for what is stepped on the device.
        param_update_in_fp32: step 16-bit parameters through FP32 copies kept here (always done for
            this package's own optimizers, which only step FP32).
        pin_cpu_grads: page-lock host staging, if an accelerator is used.
        pin_cpu_params: page-lock host parameters, if an accelerator is used.
        overlap_cpu_optimizer_d2h_h2d: overlap copies in both directions with the host's arithmetic.
        offload_mode: ``sync``: the host computes in ``step``. ``overlap``: gradients come down and
            are measured during backward. ``speculative``: they are also stepped, into a back buffer
            of main params and moments.
        offload_place: ``host``, or ``streamed``: main params and state come to the device window by
            window and are stepped there; or ``auto``: a share of them does, beside the host.
        offload_streamed_fraction: that share; by default it is measured.
        stream_window_bytes: of such a window; there are at most three.
        optimizer_state_path: a folder on a local disk; main params and state of what is offloaded
            lie there in a file between steps, and in host memory are windows of them. The file has
            no name, goes with the process, and is no checkpoint.
        host_threads: threads of the kernels during backward; by default some are left to others.
        host_cores: cores that those threads are pinned to.
        transfer: how tensors travel; by default what the parameters' device needs.
        bucket_bytes: staging memory per bucket, at most.
        speculation: when ``speculative`` pauses; by default as
            :class:`~mp_optim.placement.speculation.SpeculationSettings` says.
        sub_optimizer_kwargs: constructor arguments of both classes that are not hyperparameters.
        **kwargs: hyperparameters for both optimizer classes.

    Raises:
        ValueError: for a fraction outside [0, 1], parameters on several accelerators, or a rule
            that cannot be stepped so.
        OSError: state does not fit there, or may not be kept there.
    """

    def __init__(
        self,
        params: Iterable[Any],
        offload_fraction: float = 0.5,
        cpu_optimizer_cls: type[torch.optim.Optimizer] = FusedAdam,
        gpu_optimizer_cls: type[torch.optim.Optimizer] = FusedAdam,
        param_update_in_fp32: bool = False,
        pin_cpu_grads: bool = True,
        pin_cpu_params: bool = True,
        overlap_cpu_optimizer_d2h_h2d: bool = True,
        *,
        offload_mode: str = "sync",
        offload_place: str = "host",
        offload_streamed_fraction: float | None = None,
        stream_window_bytes: int = 256 << 20,
        optimizer_state_path: str | None = None,
        host_threads: int | None = None,
        host_cores: Sequence[int] | None = None,
        transfer: Transfer | None = None,
        bucket_bytes: int = 64 << 20,
        speculation: SpeculationSettings | None = None,
        sub_optimizer_kwargs: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        how = OffloadedStep(offload_place, offload_mode, offload_streamed_fraction)
        classes = how.classes(cpu_optimizer_cls, gpu_optimizer_cls)
        self._offloaded = place = how.sub_place
        construction = sub_optimizer_kwargs or {}
        self.offload_fraction = offload_fraction
        self._dtypes = MainDtypes(
            param_update_in_fp32
            or any(issubclass(cls, SlotOptimizer) for cls in classes.values()),
            bool({**kwargs, **construction}.get("store_param_remainders", False)),
        )
        self._assignments = Assignments()
        self._subs: dict[Place, SlotOptimizer] = {}
        super().__init__(params, dict(kwargs))
        named = [(s, self.slot_name(s), p) for s, p in iter_slots(self.param_groups)]
        device = only_accelerator(local_tensor(param).device for _, _, param in named)
        transfer = transfer if transfer is not None else transfer_for(device)
        self._assignments.assign(
            self.param_groups, offload_fraction, place, self._dtypes.stepped
        )
        state_file = state_file_in(optimizer_state_path, device)
        empty_host = partial(transfer.empty_host, pin=pin_cpu_params)
        self._main_memory = MainMemory(state_file, self._offloaded_forms(), empty_host)
        self._tensors = SteppedTensors(
            self.param_groups,
            self._assignments,
            self._subs,
            self._main_memory,
            self._dtypes,
            self._exposed,
        )
        self._build_subs(
            {
                where: partial(kind, **kwargs, **construction)
                for where, kind in classes.items()
            }
        )
        self.timeline = StepTimeline()
        settings = HostStepSettings(
            transfer,
            self.timeline,
            partial(occupy, worker_threads(host_threads), host_cores),
            bucket_bytes,
            stream_window_bytes,
            overlap_cpu_optimizer_d2h_h2d,
            pin_cpu_grads,
            pin_cpu_params,
            speculation or SpeculationSettings(),
            state_file,
        )
        how.check(self._subs[place], named, self._is_offloaded, settings)
        slots = self._assignments.offloaded_slots(self.param_groups)
        self.stepper = how.new_stepper(self._subs[place], slots, self, settings)
        self._own_grads = OwnGrads(self) if self.stepper.works_in_backward else None

    def _offloaded_forms(self) -> Iterator[tuple[int, torch.dtype]]:
        """Elements and dtype of the main param of each offloaded slot, if it has one."""
        for slot, param in iter_slots(self.param_groups):
            if self._is_offloaded(slot):
                yield local_tensor(param).numel(), self.main_dtype(param.dtype)

    @property
    def host_main_bytes(self) -> int:
        """Host memory that was asked for in one piece, for all main params there."""
        return self._main_memory.host_bytes

    @property
    def host(self) -> Stepper:
        return self.stepper

    # -- places and sub-optimizers ----------------------------------------------------------------

    def place(self, slot: Slot) -> Place:
        assigned = self._assignments[slot]
        if assigned.place == "device":
            return "device"
        return self.stepper.place_of(assigned.sub_slot)

    def _is_offloaded(self, slot: Slot) -> bool:
        return self._assignments[slot].place != "device"

    @property
    def sub_optimizers(self) -> list[torch.optim.Optimizer]:
        """The device's optimizer, then that of what is offloaded, as their classes built them."""
        return [
            sub.optimizer if isinstance(sub, ForeignOptimizer) else sub
            for sub in self._subs.values()
        ]

    def sub_optimizer(self, place: Place) -> SlotOptimizer:
        """What steps the slots of a place."""
        return self._subs["device" if place == "device" else self._offloaded]

    def _sub_group(self, index: int, place: Place) -> dict[str, Any]:
        """A group as the optimizer of a place is given it."""
        of_group = enumerate(self._assignments.of_group(index))
        here = [position for position, assigned in of_group if assigned.place == place]
        return sub_group(self.param_groups[index], here)

    def _build_subs(
        self, build: Mapping[Place, Callable[[Any], torch.optim.Optimizer]]
    ) -> None:
        indices = range(len(self.param_groups))
        for place, build_sub in build.items():
            sub = build_sub([self._sub_group(index, place) for index in indices])
            self._subs[place] = as_slot_optimizer(sub)
        self._tell_subs(indices)
        self.use_mark(self.step_mark)

    def _tell_subs(self, indices: Collection[int]) -> None:
        """After new groups: tell sub-optimizers, which have local tensors, what those are parts of;
        show the hyperparameters that they filled in, so that they can be changed here.

        Raises:
            ValueError: the two classes' defaults differ, so that a parameter's rule would depend on
                its place.
        """
        for index in indices:
            for position, param in enumerate(self.param_groups[index]["params"]):
                assigned = self._assignments[Slot(index, position)]
                self._subs[assigned.place].set_part(assigned.sub_slot, part_of(param))
        adopt_defaults(self.param_groups, list(self._subs.values()))
        self.share_settings()
        self._tensors.forget()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group; its parameters are placed on their own, by the same fraction and policy."""
        if not self._subs:
            # torch's constructor is adding the first groups; they are planned together
            super().add_param_group(param_group)
            return
        with added_whole(self):
            super().add_param_group(param_group)
            index = len(self.param_groups) - 1
            groups = [self.param_groups[index]]
            self._assignments.assign(
                groups, self.offload_fraction, self._offloaded, self._dtypes.stepped
            )
            for place, sub in self._subs.items():
                sub.add_param_group(self._sub_group(index, place))
            self._tell_subs([index])
            self._cut_buckets()
            self._watch()

    def forget_groups(self, count: int) -> None:
        super().forget_groups(count)
        if not self._subs:
            return  # it is being built
        self._assignments.forget_groups(count)
        for sub in self._subs.values():
            sub.forget_groups(count)
        self._tensors.forget()
        self._cut_buckets()
        self._watch()

    def use_mark(self, mark: StepMark) -> None:
        super().use_mark(mark)
        for sub in self._subs.values():
            sub.use_mark(mark)

    def recover(self) -> None:
        for sub in self._subs.values():
            sub.recover()
        # With other back buffers: half a swap may have left two tensors with one memory.
        self._cut_buckets()

    def _cut_buckets(self) -> None:
        self.stepper.cut_buckets(self._assignments.offloaded_slots(self.param_groups))

    def memory_moved(self) -> None:
        for sub in self._subs.values():
            sub.memory_moved()

    def optimizers_below(self) -> Sequence[SlotOptimizer]:
        return list(self._subs.values())

    def switch_mode(self, mode: Mode) -> None:
        self.bind_tensors()
        with self.step_mark.step(self):
            self.step_mark.touch()
            for sub in self._subs.values():
                sub.switch_mode(mode)
            for slot, param in iter_slots(self.param_groups):
                if (main := self._assignments[slot].main) is not None:
                    local_tensor(param).copy_(main)
            self.share_settings()

    def check_groups(self) -> None:
        self.share_settings()
        for sub in self._subs.values():
            sub.check_groups()

    def check_settings(self, group: dict[str, Any]) -> None:
        self._subs["device"].check_settings(group)

    def metrics(self) -> dict[str, float]:
        totals: Counter[str] = Counter()
        for sub in self._subs.values():
            totals.update(sub.metrics())
        return dict(totals)

    # -- main params ----------------------------------------------------------------------------

    def main_dtype(self, dtype: torch.dtype) -> torch.dtype:
        return self._dtypes.main(dtype)

    def main_param(self, slot: Slot) -> Tensor:
        sub, sub_slot = self._tensors.in_sub(slot)
        return sub.main_param(sub_slot)

    def set_main_param(self, slot: Slot, value: Tensor) -> None:
        sub, sub_slot = self._tensors.in_sub(slot)
        sub.set_main_param(sub_slot, value)

    def written_outside(self, slot: Slot) -> None:
        sub, sub_slot = self._tensors.in_sub(slot)
        sub.written_outside(sub_slot)

    def reserve_main_params(self, coming: Sequence[tuple[Slot, Tensor]]) -> None:
        super().reserve_main_params(
            [pair for pair in coming if not self._is_offloaded(pair[0])]
        )

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

    def bind_tensors(self) -> None:
        """Hand current tensors and hyperparameters to the sub-optimizers."""
        self.share_settings()
        self._tensors.bind()

    def reload_model_params(self) -> None:
        """Take the parameters' present values into the copies kept here."""
        for slot, param in iter_slots(self.param_groups):
            if self._assignments[slot].main is not None or param.dtype != torch.float32:
                self.set_main_param(slot, local_tensor(param))

    # -- state ----------------------------------------------------------------------------------

    def _exposed(self, sub_slot: Slot) -> None:
        """The stepper of now hears of it."""
        self.stepper.state_exposed(sub_slot)

    def allocate_state(self, slots: Sequence[Slot]) -> None:
        for place, sub in self._subs.items():
            sub.allocate_state(
                [
                    self._tensors.in_sub(slot)[1]
                    for slot in slots
                    if self._assignments[slot].place == place
                ]
            )

    def state_of(self, slot: Slot) -> SlotState:
        sub, sub_slot = self._tensors.in_sub(slot)
        state, main = sub.state_of(sub_slot), self._assignments[slot].main
        if main is None or main.dtype == param_at(self.param_groups, slot).dtype:
            return state  # the parameter says as much as the copy
        name = self.slot_name(slot)
        missing = f"state of {name}: master_param ({main.dtype}) is missing"
        return WithMainParam(state, name, main, missing)

    # -- stepping -------------------------------------------------------------------------------

    @in_own_modes
    def step(self, closure: Closure | None = None) -> Any:
        """Step from the parameters' own gradients, as any torch optimizer does."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self.check_lists()
        updates = [
            update_of(slot, self.slot_name(slot), param, grad)
            for slot, param in iter_slots(self.param_groups)
            if (grad := current_grad(param)) is not None
        ]
        clips = any(group.get("max_grad_norm", 0.0) for group in self.param_groups)
        self.step_slots(updates, grad_norm=global_grad_norm(updates) if clips else None)
        return loss

    @in_own_modes
    def step_slots(
        self, updates: Sequence[SlotUpdate], *, grad_norm: float | None = None
    ) -> None:
        if not self._tensors.are_bound:
            self._watch()
        self.bind_tensors()
        for sub in self._subs.values():
            sub.check_groups()
        with self.step_mark.step(self):
            by_place = self._assignments.by_place(
                SlotUpdates.of(updates), self.param_groups
            )

            def step_device() -> None:
                if by_place["device"]:
                    self._subs["device"].step_slots(
                        by_place["device"], grad_norm=grad_norm
                    )

            self.stepper.step_buckets(by_place[self._offloaded], grad_norm, step_device)
            self._tensors.written()
        self.share_settings()

    def verdict_device(self) -> torch.device | None:
        return None if self.stepper.has_slots else self._subs["device"].verdict_device()

    # -- gradients that get ready during backward -------------------------------------------------

    def _watch(self) -> None:
        if self._own_grads is not None:
            self._own_grads.follow()

    def stop_watching(self) -> None:
        """See :class:`~mp_optim.placement.host_step.HostOwner`."""
        self._own_grads = None  # its hooks go with it

    def on_host(self, update: SlotUpdate) -> SlotUpdate | None:
        """See :class:`~mp_optim.placement.host_step.HostOwner`."""
        return self._assignments.on_host(update, self.param_groups)
