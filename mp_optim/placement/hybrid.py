"""HybridDeviceOptimizer: one optimizer, part of whose parameters are stepped on the host."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from mp_optim.placement.arena import aligned_bytes
from mp_optim.placement.cores import occupy, worker_threads
from mp_optim.placement.device_split import DeviceSplitOptimizer, Place
from mp_optim.placement.grad_hooks import GradHooks, final_in_backward
from mp_optim.placement.pipeline import HostPipeline, TransferBytes, staging_bytes
from mp_optim.placement.schedule import HostSchedule, OffloadMode
from mp_optim.placement.timeline import StepTimeline
from mp_optim.placement.transfer import Transfer
from mp_optim.process.torch_modes import in_own_modes
from mp_optim.slots import Slot, SlotUpdate, current_grad, iter_slots, local_tensor, update_of
from mp_optim.slots.optimizer import Closure, SlotOptimizer
from mp_optim.update import FusedAdam, RuleOptimizer, global_grad_norm

__all__ = ["HybridDeviceOptimizer"]


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
            are measured during backward. ``speculative``: they are also stepped, into a second half
            of main params and moments.
        host_threads, host_cores: of the thread that works during backward; by default it leaves
            some to others.
        transfer: how tensors travel; by default what the parameters' device needs.
        bucket_bytes: staging memory per bucket.
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
        self.schedule: HostSchedule | None = None
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
        self.stages = StepTimeline()
        self._pipeline = HostPipeline(
            self._transfer,
            bucket_bytes=bucket_bytes,
            pin=pin_cpu_grads and self._can_pin,
            depth=3 if overlap_cpu_optimizer_d2h_h2d else 1,
            stages=self.stages,
        )
        self._arrivals = GradHooks(self._arrived)
        self._watched: list[tuple[Slot, Tensor]] = []
        if offload_mode != "sync":
            self.schedule = HostSchedule(
                self._subs["host"],
                self._host_slots(),
                self._transfer,
                mode=self._check_mode(offload_mode),
                stages=self.stages,
                bucket_bytes=bucket_bytes,
                pin_staging=pin_cpu_grads and self._can_pin,
                pin_mains=pin_cpu_params and self._can_pin,
                pipelined=overlap_cpu_optimizer_d2h_h2d,
                open_round=self._bind,
                touch=lambda: self.step_mark.touch(),
                set_up=partial(occupy, worker_threads(host_threads), host_cores),
            )
        self._watch()

    def _check_mode(self, mode: str) -> OffloadMode:
        if mode not in ("overlap", "speculative"):
            raise ValueError(
                f"offload_mode={mode!r}: must be one of ['sync', 'overlap', 'speculative']"
            )
        host = self._subs["host"]
        if mode == "speculative" and not isinstance(host, RuleOptimizer):
            raise ValueError(
                f"offload_mode='speculative': {self._classes['host'].__name__} cannot step into "
                "other "
                "memory than it steps from; use one of this package's optimizers, or 'overlap'"
            )
        if mode == "speculative" and isinstance(host, RuleOptimizer):
            self._check_collectives(host)
        return "overlap" if mode == "overlap" else "speculative"

    def _check_collectives(self, host: RuleOptimizer) -> None:
        for slot, param in iter_slots(self.param_groups):
            if host.is_collective(update_of(slot, self.slot_name(slot), param, param)):
                raise ValueError(
                    f"offload_mode='speculative': {type(host).__name__} steps "
                    f"{self.slot_name(slot)}, "
                    "which is split over ranks, by a collective, which may not meet those of "
                    "backward; "
                    "use 'overlap'"
                )

    def _placed(self) -> None:
        if self.schedule is not None:
            self.schedule.plan(self._host_slots())
        self._watch()

    def recover(self) -> None:
        super().recover()
        if (
            self.schedule is not None
        ):  # with other halves of its own: half a flip may have left two with one memory
            self.schedule.plan(self._host_slots())

    def _touched(self, slot: Slot) -> None:
        if self.schedule is not None:
            self.schedule.touched(slot)

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
        self._watch()
        self._bind()
        for sub in self._subs.values():
            sub.check_groups()
        with self.step_mark.step(self):
            self._step_routed(updates, grad_norm)

    def _step_routed(self, updates: Sequence[SlotUpdate], grad_norm: float | None) -> None:
        """Step every slot at its place."""
        routed: dict[Place, list[SlotUpdate]] = {"device": [], "host": []}
        for update in updates:
            routed[self._seat(update.slot).place].append(self._routed(update))

        def step_device() -> None:
            if routed["device"]:
                self._subs["device"].step_slots(routed["device"], grad_norm=grad_norm)

        if self.schedule is not None:
            self.schedule.step(routed["host"], grad_norm, step_device)
            return
        step_device()
        shares = [
            self._seat(update.slot).share
            for update in updates
            if self._seat(update.slot).place == "host"
        ]
        self.stages.begin_step()
        self._pipeline.run(
            routed["host"],
            shares,
            lambda bucket: self._subs["host"].step_slots(bucket, grad_norm=grad_norm),
        )
        self.stages.end_step()

    def _routed(self, update: SlotUpdate) -> SlotUpdate:
        """An update in terms of the sub-optimizer that steps the slot."""
        seat, output = self._seat(update.slot), update.output
        if not seat.resident:
            output = local_tensor(
                self.param_groups[update.slot.group]["params"][update.slot.position]
            )
        return update._replace(slot=Slot(update.slot.group, seat.index), output=output)

    # -- gradients that arrive during backward ----------------------------------------------------

    def arrived(self, update: SlotUpdate) -> None:
        """A gradient is complete, and what is done with it may begin. ``step_slots`` will be given
        the same update.

        Nothing depends on this being called: what was not begun, or with other values, is done in
          ``step_slots``.
        """
        if self.schedule is not None and self._seat(update.slot).place == "host":
            self.schedule.arrived(self._routed(update))

    def _watch(self) -> None:
        """Notice gradients of the parameters held here; main params of a wrapper have none."""
        if self.schedule is not None:
            self._watched = list(iter_slots(self.param_groups))
            self._arrivals.follow(
                [param for _, param in self._watched],
                [self._seat(slot).place == "host" for slot, _ in self._watched],
            )

    def _arrived(self, index: int) -> None:
        slot, param = self._watched[index]
        grad = current_grad(param)
        if self.param_groups[slot.group]["params"][slot.position] is not param:
            # a wrapper has put its main param there, and hands on the gradients of the model's
            return
        if grad is not None and final_in_backward(param):
            self.arrived(update_of(slot, self.slot_name(slot), param, grad))

    def use_transfer(self, transfer: Transfer) -> None:
        """Have tensors travel another way from now on; nothing may be on its way."""
        self._transfer = transfer
        self._pipeline = self._pipeline.over(transfer)
        if self.schedule is not None:
            self.schedule.transfer = transfer
            self.schedule.plan(self._host_slots())

    def memory_moved(self) -> None:
        for sub in self._subs.values():
            sub.memory_moved()

    def verdict_device(self) -> torch.device | None:
        hosted = any(seat.place == "host" for seats in self._seats for seat in seats)
        return None if hosted else self._subs["device"].verdict_device()

    @property
    def traffic(self) -> TransferBytes:
        """Bytes the last step moved between the places."""
        return self._pipeline.traffic if self.schedule is None else self.schedule.traffic

    @property
    def staging_bytes(self) -> int:
        """Host bytes held for transfers."""
        return (
            self._pipeline.staging_bytes if self.schedule is None else self.schedule.staging_bytes
        )

    def host_notes(self) -> tuple[str, ...]:
        """How the host's part is stepped during backward, in words."""
        if self.schedule is None:
            return ()
        return (
            f"host: offload_mode {self.schedule.mode}, {self.schedule.buckets} buckets, "
            f"{self.double_buffer_bytes():,} bytes double buffer",
        )

    def host_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Main params (under an empty name) and state that are stepped on the host, but for step
        counters."""
        self._bind()
        host = self._subs["host"]
        for slot, _ in iter_slots(host.param_groups):
            yield "", host.param_groups[slot.group]["params"][slot.position]
            yield from (
                (key, value) for key, value in host.slot_state(slot).items() if key != "step"
            )

    def double_buffers(self) -> tuple[int, int]:
        """Bytes of the other halves of main params, and of their state; allocated when they are
        first stepped into."""
        if self.schedule is None or self.schedule.mode != "speculative":
            return 0, 0
        sizes = [
            (key, aligned_bytes(tensor.numel(), tensor.dtype))
            for key, tensor in self.host_tensors()
        ]
        return sum(size for key, size in sizes if not key), sum(size for key, size in sizes if key)

    def double_buffer_bytes(self) -> int:
        """Bytes of all other halves."""
        return sum(self.double_buffers())

    def staging_for(self, params: Sequence[Tensor]) -> int:
        """Bytes of staging that stepping takes.

        Args:
            params: the model's, in slot order; gradients are taken to have their dtypes.
        """
        updates, shares = [], []
        for (slot, _), param in zip(iter_slots(self.param_groups), params, strict=True):
            if self._seat(slot).place == "host" and param.requires_grad:
                local = local_tensor(param)
                updates.append(SlotUpdate(slot, local, output=local))
                shares.append(self._seat(slot).share)
        if self.schedule is not None:
            return sum(map(staging_bytes, updates))
        return self._pipeline.staging_for(updates, shares)

    def host_metrics(self) -> dict[str, float]:
        """Milliseconds of the last step's stages on the host, and how speculation did so far."""
        return {**self.stages.metrics(), **({} if self.schedule is None else self.schedule.counts)}
