"""HybridDeviceOptimizer: one optimizer, part of whose parameters are stepped on the host."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from mp_optim.placement.cores import occupy, worker_threads
from mp_optim.placement.device_split import DeviceSplitOptimizer
from mp_optim.placement.grad_hooks import GradHooks, final_in_backward
from mp_optim.placement.host_step import HostStepper, HostStepSettings
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
    current_grad,
    iter_slots,
    update_of,
)
from mp_optim.slots.host_part import Place
from mp_optim.slots.keyed_optimizer import Closure
from mp_optim.slots.optimizer import SlotOptimizer
from mp_optim.update import FusedAdam, RuleOptimizer, global_grad_norm


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
            self._transfer,
            self.timeline,
            partial(occupy, worker_threads(host_threads), host_cores),
            bucket_bytes,
            overlap_cpu_optimizer_d2h_h2d,
            pin_cpu_grads and self._can_pin,
            pin_cpu_params and self._can_pin,
            speculation or SpeculationSettings(),
        )
        host, slots = (
            self._subs["host"],
            self._assignments.host_slots(self.param_groups),
        )
        self.stepper: HostStepper
        if offload_mode == "sync":
            self.stepper = HostStepper(host, slots, self, settings)
        elif offload_mode == "overlap":
            self.stepper = OverlappedHostStepper(host, slots, self, settings)
        elif offload_mode == "speculative":
            self._check_can_speculate(cpu_optimizer_cls)
            self.stepper = SpeculativeHostStepper(host, slots, self, settings)
        else:
            raise ValueError(
                f"offload_mode={offload_mode!r}: must be one of ['sync', 'overlap', 'speculative']"
            )
        self._own_grads = _OwnGrads(self) if self.stepper.works_in_backward else None

    @property
    def host(self) -> HostStepper:
        return self.stepper

    def _check_can_speculate(self, kind: type[torch.optim.Optimizer]) -> None:
        host = self._subs["host"]
        if not isinstance(host, RuleOptimizer):
            raise ValueError(
                f"offload_mode='speculative': {kind.__name__} cannot step into other memory than "
                "it steps from; use one of this package's optimizers, or 'overlap'"
            )
        for slot, param in iter_slots(self.param_groups):
            name = self.slot_name(slot)
            if host.is_collective(update_of(slot, name, param, param)):
                raise ValueError(
                    f"offload_mode='speculative': {type(host).__name__} steps {name}, which is "
                    "split over ranks, by a collective, which may not meet those of backward; use "
                    "'overlap'"
                )

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        super().add_param_group(param_group)
        if self._subs:  # else torch's constructor is at work
            self._cut_buckets()
            self._watch()

    def recover(self) -> None:
        super().recover()
        # With other back buffers: half a swap may have left two tensors with one memory.
        self._cut_buckets()

    def _cut_buckets(self) -> None:
        self.stepper.cut_buckets(self._assignments.host_slots(self.param_groups))

    def _in_sub(self, slot: Slot) -> tuple[SlotOptimizer, Slot]:
        sub, sub_slot = super()._in_sub(slot)
        if self.place(slot) == "host":
            self.stepper.state_exposed(sub_slot)
        return sub, sub_slot

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
    def step_slots(
        self, updates: Sequence[SlotUpdate], *, grad_norm: float | None = None
    ) -> None:
        if self._bound is None:
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

            self.stepper.step(by_place["host"], grad_norm, step_device)

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


class _OwnGrads:
    """Reports the gradients of an optimizer's own parameters to its stepper, as long as nothing
    wraps it."""

    def __init__(self, optimizer: HybridDeviceOptimizer) -> None:
        self._optimizer = optimizer
        self._hooks = GradHooks(self._on_grad)
        self._watched: list[tuple[Slot, Tensor]] = []
        self.follow()

    def follow(self) -> None:
        """Notice gradients of the parameters that the optimizer has now."""
        optimizer = self._optimizer
        self._watched = list(iter_slots(optimizer.param_groups))
        wanted = [optimizer.place(slot) == "host" for slot, _ in self._watched]
        self._hooks.follow([param for _, param in self._watched], wanted)

    def _on_grad(self, index: int) -> None:
        (slot, param), optimizer = self._watched[index], self._optimizer
        grad = current_grad(param)
        if optimizer.param_groups[slot.group]["params"][slot.position] is not param:
            return  # a wrapper has put its main param there, and reports the gradients itself
        if grad is not None and final_in_backward(param):
            update = update_of(slot, optimizer.slot_name(slot), param, grad)
            optimizer.stepper.on_grad_ready(update)
