"""HybridDeviceOptimizer: one optimizer, part of whose parameters are stepped on the host."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mp_optim.placement.cores import occupy, worker_threads
from mp_optim.placement.device_split import DeviceSplitOptimizer
from mp_optim.placement.grad_hooks import GradHooks, final_in_backward
from mp_optim.placement.host_step import HostBytes, HostStepper, HostStepSettings
from mp_optim.placement.overlap_step import OverlappedHostStepper
from mp_optim.placement.speculation import SpeculationSettings
from mp_optim.placement.speculative_step import SpeculativeHostStepper
from mp_optim.placement.timeline import StepTimeline
from mp_optim.placement.transfer import Transfer
from mp_optim.process.torch_modes import in_own_modes
from mp_optim.slots import (
    Slot,
    SlotUpdate,
    SlotUpdates,
    UpdateSelection,
    current_grad,
    iter_slots,
    local_tensor,
    update_of,
)
from mp_optim.slots.host_part import Place
from mp_optim.slots.optimizer import Closure, SlotOptimizer
from mp_optim.update import FusedAdam, RuleOptimizer, global_grad_norm

__all__ = ["HybridDeviceOptimizer"]


class _Routes(NamedTuple):
    """What the slots of a step come to; kept as long as they are the same.

    Attributes:
        by_place: the slots of each sub-optimizer.
        have_outputs: every update says itself what receives the stepped value.
    """

    slots: Sequence[Slot]
    by_place: dict[Place, UpdateSelection]
    have_outputs: bool


class HybridDeviceOptimizer(DeviceSplitOptimizer):
    """Steps a fraction of its parameters on the host, the rest where they lie.

    Args:
        params: parameters, named parameters or param groups, as torch takes them.
        offload_fraction: share of elements stepped on the host (see :func:`plan_offload`).
        cpu_optimizer_cls, gpu_optimizer_cls: any torch optimizer classes; ours step in one pass.
        param_update_in_fp32: step 16-bit parameters through FP32 copies kept here (always done for
            this package's own optimizers, which only step FP32).
        pin_cpu_grads, pin_cpu_params: page-lock host staging and host parameters, if an accelerator
            is used.
        overlap_cpu_optimizer_d2h_h2d: overlap copies in both directions with the host's arithmetic.
        offload_mode: ``sync``: the host computes in ``step``. ``overlap``: gradients come down and
            are measured during backward. ``speculative``: they are also stepped, into a back buffer
            of main params and moments.
        host_threads, host_cores: of the thread that works during backward; by default it leaves
            some to others.
        transfer: how tensors travel; by default what the parameters' device needs.
        bucket_bytes: staging memory per bucket, at most.
        speculation: when ``speculative`` pauses; by default as
            :class:`~mp_optim.placement.speculation.SpeculationSettings` says.
        sub_optimizer_kwargs: constructor arguments of both classes that are not hyperparameters.
        **kwargs: hyperparameters for both optimizer classes.

    Raises:
        ValueError: for a fraction outside [0, 1], parameters on several accelerators, or
            ``speculative`` with a rule that cannot be carried out apart from its step.
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
        host_threads: int | None = None,
        host_cores: Sequence[int] | None = None,
        transfer: Transfer | None = None,
        bucket_bytes: int = 64 << 20,
        speculation: SpeculationSettings | None = None,
        sub_optimizer_kwargs: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        classes: dict[Place, type[torch.optim.Optimizer]] = {
            "device": gpu_optimizer_cls,
            "host": cpu_optimizer_cls,
        }
        in_fp32 = param_update_in_fp32 or any(
            issubclass(cls, SlotOptimizer) for cls in classes.values()
        )
        super().__init__(
            params,
            offload_fraction,
            classes,
            in_fp32,
            kwargs,
            sub_optimizer_kwargs or {},
            transfer,
            pin_cpu_params,
        )
        self.timeline = StepTimeline()
        settings = HostStepSettings(
            bucket_bytes,
            overlap_cpu_optimizer_d2h_h2d,
            pin_cpu_grads and self._can_pin,
            pin_cpu_params and self._can_pin,
            speculation or SpeculationSettings(),
        )
        set_up = partial(occupy, worker_threads(host_threads), host_cores)
        self._check_mode(offload_mode)
        self.stepper = self._stepper(offload_mode, settings, set_up)
        self._hooks: GradHooks | None = None
        self._watched: list[tuple[Slot, Tensor]] = []
        if self.stepper.works_in_backward:
            self._hooks = GradHooks(self._on_own_grad)
            self._watch()

    def _stepper(
        self, mode: str, settings: HostStepSettings, set_up: Callable[[], None]
    ) -> HostStepper:
        host, slots = self._subs["host"], self._host_slots()
        common = (host, slots, self, self._transfer, settings, self.timeline)
        if mode == "sync":
            return HostStepper(*common)
        kind = OverlappedHostStepper if mode == "overlap" else SpeculativeHostStepper
        return kind(*common, set_up)

    @property
    def host(self) -> HostStepper:
        return self.stepper

    def _check_mode(self, mode: str) -> None:
        if mode not in ("sync", "overlap", "speculative"):
            raise ValueError(
                f"offload_mode={mode!r}: must be one of ['sync', 'overlap', 'speculative']"
            )
        host = self._subs["host"]
        if mode != "speculative":
            return
        if not isinstance(host, RuleOptimizer):
            raise ValueError(
                f"offload_mode='speculative': {self._classes['host'].__name__} cannot step into "
                "other memory than it steps from; use one of this package's optimizers, or "
                "'overlap'"
            )
        self._check_collectives(host)

    def _check_collectives(self, host: RuleOptimizer) -> None:
        for slot, param in iter_slots(self.param_groups):
            if host.is_collective(update_of(slot, self.slot_name(slot), param, param)):
                raise ValueError(
                    f"offload_mode='speculative': {type(host).__name__} steps "
                    f"{self.slot_name(slot)}, which is split over ranks, by a collective, which "
                    "may not meet those of backward; use 'overlap'"
                )

    def _assignments_changed(self) -> None:
        super()._assignments_changed()
        self._routes: _Routes | None = None

    def _placed(self) -> None:
        self.stepper.cut_buckets(self._host_slots())
        self._watch()

    def recover(self) -> None:
        super().recover()
        # With other back buffers: half a swap may have left two tensors with one memory.
        self.stepper.cut_buckets(self._host_slots())

    def _state_exposed(self, slot: Slot) -> None:
        self.stepper.state_exposed(slot)

    # -- stepping -------------------------------------------------------------------------------

    @in_own_modes
    def step(self, closure: Closure | None = None) -> Any:
        """Step from the parameters' own gradients, as any torch optimizer does."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        updates = [
            update_of(slot, self.slot_name(slot), param, grad)
            for slot, param in iter_slots(self.param_groups)
            if (grad := current_grad(param)) is not None
        ]
        clips = any(group.get("max_grad_norm", 0.0) for group in self.param_groups)
        self.step_slots(updates, grad_norm=global_grad_norm(updates) if clips else None)
        return loss

    @in_own_modes
    def step_slots(self, updates: Sequence[SlotUpdate], *, grad_norm: float | None = None) -> None:
        if self._bound is None:
            self._watch()
        self.bind_tensors()
        for sub in self._subs.values():
            sub.check_groups()
        with self.step_mark.step(self):
            by_place = self._by_place(SlotUpdates.of(updates))

            def step_device() -> None:
                if by_place["device"]:
                    self._subs["device"].step_slots(by_place["device"], grad_norm=grad_norm)

            self.stepper.step(by_place["host"], grad_norm, step_device)

    def _by_place(self, updates: SlotUpdates) -> dict[Place, SlotUpdates]:
        """The updates of each sub-optimizer, in terms of its slots."""
        if self._routes is None or self._routes.slots is not updates.slots:
            self._routes = _Routes(
                updates.slots,
                {place: self._selection(place, updates.slots) for place in self._subs},
                all(self._assigned(slot).resident for slot in updates.slots),
            )
        if not self._routes.have_outputs:
            updates = replace(updates, outputs=self._outputs(updates))
        return {place: chosen.take(updates) for place, chosen in self._routes.by_place.items()}

    def _selection(self, place: Place, slots: Sequence[Slot]) -> UpdateSelection:
        indices = [index for index, slot in enumerate(slots) if self._assigned(slot).place == place]
        sub_slots = [Slot(slots[i].group, self._assigned(slots[i]).index) for i in indices]
        return UpdateSelection(indices, sub_slots, len(slots))

    def _outputs(self, updates: SlotUpdates) -> Sequence[Tensor | None]:
        """What receives the stepped values: where this optimizer made the copies that are stepped,
        the parameters."""
        return [
            output if self._assigned(slot).resident else local_tensor(self._param(slot))
            for slot, output in zip(updates.slots, updates.outputs, strict=True)
        ]

    # -- gradients that get ready during backward -------------------------------------------------

    def mark_writing(self) -> None:
        """See :class:`~mp_optim.placement.host_step.HostOwner`."""
        self.step_mark.touch()

    def stop_watching(self) -> None:
        """See :class:`~mp_optim.placement.host_step.HostOwner`."""
        self._hooks = None  # which go with it

    def on_host(self, update: SlotUpdate) -> SlotUpdate | None:
        """See :class:`~mp_optim.placement.host_step.HostOwner`."""
        assigned = self._assigned(update.slot)
        if assigned.place == "device":
            return None
        output = update.output if assigned.resident else local_tensor(self._param(update.slot))
        return update._replace(slot=Slot(update.slot.group, assigned.index), output=output)

    def _watch(self) -> None:
        """Notice gradients of the parameters held here."""
        if self._hooks is not None:
            self._watched = list(iter_slots(self.param_groups))
            self._hooks.follow(
                [param for _, param in self._watched],
                [self._assigned(slot).place == "host" for slot, _ in self._watched],
            )

    def _on_own_grad(self, index: int) -> None:
        slot, param = self._watched[index]
        grad = current_grad(param)
        if self._param(slot) is not param:
            return  # a wrapper has put its main param there, and reports the gradients itself
        if grad is not None and final_in_backward(param):
            self.stepper.on_grad_ready(update_of(slot, self.slot_name(slot), param, grad))

    # -- memory -----------------------------------------------------------------------------------

    def use_transfer(self, transfer: Transfer, bucket_bytes: int | None = None) -> None:
        """Have tensors travel another way from now on, or in other buckets; nothing may be on its
        way."""
        self._transfer = transfer
        settings = self.stepper.settings
        if bucket_bytes is not None:
            settings = replace(settings, bucket_bytes=bucket_bytes)
        self.stepper.reconfigure(transfer, settings)

    def memory_moved(self) -> None:
        for sub in self._subs.values():
            sub.memory_moved()

    def verdict_device(self) -> torch.device | None:
        return None if self.stepper.has_slots else self._subs["device"].verdict_device()

    def host_bytes(self) -> HostBytes:
        """Host memory that stepping holds beside main params and state."""
        return self.stepper.host_bytes()
