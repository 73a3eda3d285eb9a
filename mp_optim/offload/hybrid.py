"""HybridDeviceOptimizer: one optimizer, part of whose state is in host memory."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Any, cast

import torch

from mp_optim.core import Slot, iter_slots, local_tensor
from mp_optim.core.executor import Place
from mp_optim.host.calls import weak_method
from mp_optim.host.transfer import Transfer, transfer_for
from mp_optim.offload.hybrid_executor import PlacedExecutor, is_of_rule
from mp_optim.offload.settings import HostStepSettings, OffloadedStep, SlotStepper, only_accelerator
from mp_optim.offload.state_file import StateFile
from mp_optim.offload.stepper import Stepper
from mp_optim.offload.timeline import StepTimeline
from mp_optim.offload.worker import occupy, worker_threads
from mp_optim.rules.fused import FusedAdam
from mp_optim.rules.rule_optimizer import SlotOptimizer


class HybridDeviceOptimizer(SlotOptimizer[PlacedExecutor]):
    """Keeps main params and state of a fraction of its parameters on the host, and steps them there
    or streams them through the device; the rest is stepped where it lies.

    Args:
        params: parameters, named parameters or param groups, as torch takes them.
        offload_fraction: share of elements that are offloaded (see :func:`plan_offload`).
        cpu_optimizer_cls: any torch optimizer class, or a rule, which steps in one pass.
        gpu_optimizer_cls: the same, for what is stepped on the device.
        param_update_in_fp32: step 16-bit parameters through FP32 copies kept here (always done for
            this package's own optimizers, which only step FP32).
        pin_cpu_grads: page-lock host staging, if an accelerator is used.
        pin_cpu_params: page-lock host parameters, if an accelerator is used.
        overlap_cpu_optimizer_d2h_h2d: overlap copies in both directions with the host's arithmetic.
        offload_mode: ``sync``: the host computes in ``step``. ``overlap``: gradients come down
            during backward, and those that leave the device are measured on the host.
            ``speculative``: they are also stepped, into a back buffer of main params and
            moments.
        offload_place: ``host``, or ``streamed``: main params and state are copied to the device
            window by window and stepped there.
        stream_window_bytes: of such a window; there are at most three.
        optimizer_state_path: a folder on a local disk; main params and state of what is offloaded
            lie there in a file between steps, and in host memory are windows of them. The file has
            no name, goes with the process, and is no checkpoint.
        host_threads: threads of the kernels during backward; by default some are left to others.
        transfer: how tensors travel; by default what the parameters' device needs.
        bucket_bytes: staging memory per bucket, at most.
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
        cpu_optimizer_cls: SlotStepper = FusedAdam,
        gpu_optimizer_cls: SlotStepper = FusedAdam,
        param_update_in_fp32: bool = False,
        pin_cpu_grads: bool = True,
        pin_cpu_params: bool = True,
        overlap_cpu_optimizer_d2h_h2d: bool = True,
        *,
        offload_mode: str = "sync",
        offload_place: str = "host",
        stream_window_bytes: int = 256 << 20,
        optimizer_state_path: str | None = None,
        host_threads: int | None = None,
        transfer: Transfer | None = None,
        bucket_bytes: int = 64 << 20,
        sub_optimizer_kwargs: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        how = OffloadedStep(cast(Place, offload_place), offload_mode)
        classes = how.classes(cpu_optimizer_cls, gpu_optimizer_cls)
        construction = sub_optimizer_kwargs or {}
        is_ours = any(map(is_of_rule, classes.values()))
        remainders = bool({**kwargs, **construction}.get("store_param_remainders", False))
        copies = param_update_in_fp32 or is_ours
        executor = PlacedExecutor([], offload_fraction, how, copies, remainders)
        super().__init__(params, dict(kwargs), executor)
        device = only_accelerator(local_tensor(p).device for _, p in iter_slots(self.param_groups))
        file = None
        if optimizer_state_path is not None:
            file = StateFile(optimizer_state_path, is_planned=device.type == "meta")
        settings = HostStepSettings(
            transfer=transfer if transfer is not None else transfer_for(device),
            timeline=StepTimeline(),
            set_up=partial(occupy, worker_threads(host_threads)),
            bucket_bytes=bucket_bytes,
            window_bytes=stream_window_bytes,
            pipelined=overlap_cpu_optimizer_d2h_h2d,
            pin_staging=pin_cpu_grads,
            pin_mains=pin_cpu_params,
            state_file=file,
        )
        self.timeline = settings.timeline
        executor.build(
            classes, {**kwargs, **construction}, settings, weak_method(self.share_settings)
        )
        _, *self.groups_below = executor.all_groups()
        self.share_settings()

    @property
    def offload_fraction(self) -> float:
        """The share of elements that is offloaded, as it was asked for."""
        return self.executor.fraction

    @property
    def stepper(self) -> Stepper:
        """What steps the offloaded slots."""
        return self.executor.stepper

    @property
    def sub_optimizers(self) -> list[torch.optim.Optimizer]:
        """The device's optimizer, then that of what is offloaded, as their classes built them. One
        of this package steps both."""
        return list(self.executor.optimizers.values())

    def offload_to_cpu(self) -> None:
        """As of every optimizer; what was begun during backward is forgotten, as it holds
        gradients."""
        self.stepper.schedule.discard()
        super().offload_to_cpu()

    def place(self, slot: Slot) -> Place:
        """Where a slot is stepped."""
        return self.executor.place(slot)

    def reload_model_params(self) -> None:
        """Take the parameters' present values into the copies kept here."""
        self.executor.reload()
