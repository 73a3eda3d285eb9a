"""HybridDeviceOptimizer: one optimizer with a fraction of its state in host memory."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Any, cast

import torch

from mp_optim.core import Slot, iter_slots, local_tensor
from mp_optim.core.executor import Place
from mp_optim.host.calls import weak_method
from mp_optim.host.transfer import Transfer, transfer_for
from mp_optim.offload.backward_scheduler import occupy, worker_threads
from mp_optim.offload.buckets import StepTimeline
from mp_optim.offload.hybrid_executor import PlacedExecutor, is_of_rule
from mp_optim.offload.settings import HostStepSettings, SlotStepper, only_accelerator
from mp_optim.offload.state_storage import StateFile
from mp_optim.offload.stepper import Stepper
from mp_optim.rules.fused import FusedAdam
from mp_optim.rules.rule_optimizer import SlotOptimizer


class HybridDeviceOptimizer(SlotOptimizer[PlacedExecutor]):
    """A torch optimizer with the main params and state of a fraction of its parameters in host
    memory.

    The host steps these parameters, or streams their state through the device. The other parameters
    are stepped on their device.

    Args:
        params: parameters, named parameters or param groups, as torch takes them.
        offload_fraction: share of elements to offload, 0.0 to 1.0 (see :func:`plan_offload`).
        cpu_optimizer_cls: any torch optimizer class, or a rule, for offloaded parameters.
        gpu_optimizer_cls: any torch optimizer class, or a rule, for parameters that are stepped on
            the device.
        param_update_in_fp32: True to step 16-bit parameters through FP32 copies. This package's own
            optimizers always do so.
        pin_cpu_grads: True to page-lock staging memory, if an accelerator is used.
        pin_cpu_params: True to page-lock host parameters, if an accelerator is used.
        overlap_cpu_optimizer_d2h_h2d: True to overlap copies in both directions with the host's
            arithmetic.
        offload_mode: ``sync``: the host begins in ``step``. ``overlap``: gradients are copied to
            the host during backward, and the host computes the sums of squares of released
            gradients. ``speculative``: the host also steps parameters during backward, into a
            back buffer of main params and moments.
        offload_place: ``host``, or ``streamed``: main params and state are copied to the device
            window by window and stepped there.
        stream_window_bytes: size of a window in bytes; at most three windows are on the device at a
            time.
        optimizer_state_path: a folder on a local disk for a file with main params and state of
            offloaded parameters; None keeps them in host memory. Host memory then has only windows
            of the file. The file has no name, is freed with the process, and is not a checkpoint.
        host_threads: number of kernel threads during backward; None leaves some cores to other
            threads.
        transfer: interface for copies; None for the transfer of the parameters' device.
        bucket_bytes: largest staging memory of a bucket in bytes.
        sub_optimizer_kwargs: constructor arguments of both classes that are not hyperparameters.
        **kwargs: hyperparameters for both optimizer classes.

    Raises:
        ValueError: the fraction is outside [0, 1], parameters are on several accelerators, or a
            rule does not support the mode or the place.
        OSError: the folder has too little space, or is not writable.
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
        place = cast(Place, offload_place)
        offloaded_cls = gpu_optimizer_cls if place == "streamed" else cpu_optimizer_cls
        classes: dict[Place, SlotStepper] = {"device": gpu_optimizer_cls, place: offloaded_cls}
        construction = sub_optimizer_kwargs or {}
        is_ours = any(map(is_of_rule, classes.values()))
        remainders = bool({**kwargs, **construction}.get("store_param_remainders", False))
        copies = param_update_in_fp32 or is_ours
        executor = PlacedExecutor([], offload_fraction, copies, remainders)
        super().__init__(params, dict(kwargs), executor)
        device = only_accelerator(local_tensor(p).device for _, p in iter_slots(self.param_groups))
        file = None
        if optimizer_state_path is not None:
            file = StateFile(optimizer_state_path, is_planned=device.type == "meta")
        settings = HostStepSettings(
            place=place,
            mode=offload_mode,
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
        """The share of elements that the constructor was asked to offload, 0.0 to 1.0."""
        return self.executor.fraction

    @property
    def stepper(self) -> Stepper:
        """The stepper of the offloaded slots."""
        return self.executor.stepper

    @property
    def sub_optimizers(self) -> list[torch.optim.Optimizer]:
        """The device's optimizer, then the optimizer of offloaded slots, as their classes built
        them. An optimizer of this package steps both kinds of slots and is listed once."""
        return list(self.executor.optimizers.values())

    def offload_to_cpu(self) -> None:
        """Move all state to the host. Results of backward are discarded, because they hold
        gradients."""
        self.stepper.schedule.discard()
        super().offload_to_cpu()

    def place(self, slot: Slot) -> Place:
        """Return the place where a slot is stepped."""
        return self.executor.place(slot)

    def reload_model_params(self) -> None:
        """Copy the parameters' present values into the FP32 copies that this optimizer steps."""
        self.executor.reload()
