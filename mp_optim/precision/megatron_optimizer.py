"""MegatronOptimizer: the outer shell of the stack. Measure, agree, decide, apply."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, NoReturn

import torch
from torch import Tensor

from mp_optim.config import OptimizerConfig
from mp_optim.precision.backward_overlap import BackwardOverlap, OverlapControls
from mp_optim.precision.description import Description, describe
from mp_optim.precision.device_verdict import DeviceVerdict, Formed, decide_on_device, form
from mp_optim.precision.grad_scaler import MegatronGradScaler
from mp_optim.precision.graph_step import GraphedStep, check_capturable
from mp_optim.precision.main_params import MainParams
from mp_optim.precision.measure import (
    EXCLUDED,
    MAIN,
    Measurement,
    NormKey,
    agree,
    count_zeros,
    measure,
    norm_groups,
)
from mp_optim.precision.settings_agreement import disagreement
from mp_optim.precision.standstill import StandstillWatched
from mp_optim.precision.verdict import Verdict, decide
from mp_optim.process.torch_modes import in_own_modes
from mp_optim.quantized import quantize_
from mp_optim.ranks.process_groups import ProcessGroups
from mp_optim.slots import (
    CachedTensorList,
    Multiplier,
    SlotUpdate,
    iter_slots,
    local_tensor,
)
from mp_optim.slots.optimizer import Closure
from mp_optim.update import choose_backend

__all__ = ["MegatronOptimizer"]


class MegatronOptimizer(StandstillWatched, OverlapControls, MainParams):
    """Common part of the precision wrappers.

    Args:
        optimizer: any torch optimizer over the model's parameters. This package's own step in one
            pass from the gradients as they are; a foreign one gets FP32 ``.grad``.
        config: see :class:`mp_optim.OptimizerConfig`.
        grad_scaler: loss scale, or None for 1.
        init_state_fn: accepted for drop-in use; state is allocated by :meth:`init_state`.
        process_groups: whom to agree with on the gradient norm.

    Raises:
        TypeError, ValueError: a parameter's dtype does not fit, naming it.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        config: OptimizerConfig,
        grad_scaler: MegatronGradScaler | None = None,
        init_state_fn: Any = None,
        *,
        process_groups: ProcessGroups | None = None,
    ) -> None:
        self.config = config
        self.grad_scaler = grad_scaler
        self._grads: tuple[list[int], CachedTensorList] | None = None
        self._last: Verdict | DeviceVerdict = Verdict()
        self._counts = {"steps": 0, "skipped_steps": 0}
        self._graphed: GraphedStep | None = None
        super().__init__(optimizer, process_groups)
        self.backward_link = BackwardOverlap(
            self, self._seen, self._sum_of_squares, self._push_settings
        )
        self.backward_link.follow(self._params())
        if config.optimizer_cuda_graph:
            check_capturable(self)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        super().add_param_group(param_group)
        if (
            "backward_link" in self.__dict__
        ):  # torch's constructor is done: backward may come before the next step
            self.backward_link.follow(self._params())

    # -- the step -------------------------------------------------------------------------------

    @in_own_modes
    def step(self, closure: Closure | None = None) -> Any:
        """One step: returns :class:`~mp_optim.precision.verdict.StepResult`, or the closure's loss
        if one is given.

        A step whose gradients hold an inf or nan, or whose norm exceeds
        ``config.grad_norm_skip_threshold``, changes nothing but the loss scale. Warns of a step
        without any gradient, and of steps skipped in a row.

        Raises:
            ValueError: a hyperparameter is out of range, naming it; nothing was stepped.
            BrokenOffError: the step before was broken off half-way (by a signal, or an error in a
                kernel).
            RuntimeError: there is a loss scale, and the gradients were not scaled by it.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self.watch.check_scaled(self)
        with self.step_mark.step(self):
            self.finish_early_work()
            verdict = self._by_graph() if self.config.optimizer_cuda_graph else self._eagerly()
            if self.grad_scaler is not None:
                self.step_mark.touch()
                self.grad_scaler.update(verdict.found_inf)
                self.remember_scale()
        self.take_note(verdict)
        return verdict.result if closure is None else loss

    def has_gradients(self) -> bool:
        """Whether :meth:`gather` found any."""
        return self._grads is not None and bool(self._grads[0])

    def _eagerly(self) -> Verdict | DeviceVerdict:
        inv_scale = self._inv_scale
        with self._timed("optimizer-clip-main-grad"):
            measurement, device = self.measure(), self.verdict_device()
            self.watch.see_gradients(self, self.has_gradients())
            there = [*measurement.sums.values(), *([] if inv_scale is None else [inv_scale])]
            verdict: Verdict | DeviceVerdict
            if device is None or any(value.device != device for value in there):
                verdict = decide(measurement, inv_scale, self.config)
                if verdict.disagrees:
                    self._raise_disagreement()
            else:  # whoever follows the verdict is on the device: nothing waits for it
                verdict = decide_on_device(measurement, inv_scale, self.config)
        with self._timed("optimizer-inner-step"):
            self.apply(verdict)
        return verdict

    @property
    def _inv_scale(self) -> Tensor | None:
        return None if self.grad_scaler is None else self.grad_scaler.inv_scale

    def verdict_device(self) -> torch.device | None:
        return self.inner.verdict_device()

    @property
    def _verdict(self) -> Verdict:
        """The last verdict, and its step in the counts; waits for the device if nobody has yet."""
        if isinstance(self._last, DeviceVerdict):
            self._last = self._last.settle()
            self._counts["skipped_steps"] += self._last.skip
            if self._last.disagrees:
                self._raise_disagreement()
        return self._last

    def _raise_disagreement(self) -> NoReturn:
        """Nothing was stepped."""
        self.forget_grads()
        self.discard_early_work()
        raise disagreement([part._seen.settings for part in self.chained_optimizers])

    @contextmanager
    def _timed(self, name: str) -> Iterator[None]:
        if self.config.timers is None:
            yield
            return
        timer = self.config.timers(name, log_level=1)
        timer.start(barrier=self.config.barrier_with_L1_time)
        try:
            yield
        finally:
            timer.stop()

    @property
    def device(self) -> torch.device:
        """Where the model's parameters lie."""
        return next(
            (local_tensor(p).device for _, p in iter_slots(self.param_groups)), torch.device("cpu")
        )

    def measure(self) -> Measurement:
        """Sums of squares of this step's gradients, agreed with the other ranks."""
        self.gather()
        return self.sums()

    def gather(self) -> None:
        """Find this step's gradients; nothing here asks the device."""
        if self._parking.occupied:
            raise RuntimeError("the optimizer is offloaded: call restore_from_cpu() before step()")
        self.backward_link.finish()
        self._push_settings()
        self.inner.check_groups()
        self.follow_model()
        self.check_remainders()
        self.backward_link.follow(self._seen.params)
        indices, _ = self._grads = self._seen.grads(self.slot_name)
        if not all(self._seen.bound):
            for index in (
                i for i in indices if not self._seen.bound[i]
            ):  # it was frozen when its group was added
                self._seen.trained(
                    index, self._bind(self._seen.slots[index], self._seen.params[index])
                )

    def sums(self) -> Measurement:
        """Sums of squares of the gradients that :meth:`gather` found."""
        assert self._grads is not None
        (indices, grads), all_keys = self._grads, self._seen.distinct_keys
        return self.measure_grads(grads, self._seen.keys_of(indices), all_keys)

    def measure_grads(
        self, grads: Sequence[Tensor], keys: Sequence[NormKey], all_keys: Sequence[NormKey]
    ) -> Measurement:
        """The same for given gradients.

        Args:
            grads, keys: local gradients, and which norm each counts in.
            all_keys: every key of the model, also those without a gradient now, so that all ranks
                reduce alike.
        """
        device = self.device
        sums = measure(grads, keys, all_keys, self.backward_link.sums_of_squares, device)
        zeros = (
            count_zeros(grads, keys, all_keys, device)
            if self.config.log_num_zeros_in_grad
            else None
        )
        ranks = self.process_groups.grad_stats
        if self._norm_groups is None or ranks is None:
            self._norm_groups = norm_groups(all_keys, ranks)
        return agree(
            sums,
            zeros,
            ranks,
            self._norm_groups,
            self._seen.settings.numbers(self.config, self.param_groups, keys, all_keys),
            self._seen.settings.copies,
        )

    def _sum_of_squares(self, grads: Sequence[Tensor]) -> Tensor:
        backend, _ = choose_backend(self.config.fused_backend, grads[0].device)
        return backend.sum_of_squares(grads)

    def apply(self, verdict: Verdict | DeviceVerdict) -> None:
        """Step the slots that have a gradient, unless the verdict says skip."""
        self.follow(verdict)
        if self._grads is None:
            self.follow_model()
            self._grads = self._seen.grads(self.slot_name)
        if isinstance(verdict, Verdict) and verdict.skip:
            self.backward_link.skip()
        else:
            self.carry_out(verdict.multipliers, self._clipped(verdict))
        self._grads = None

    def carry_out(
        self, multipliers: Mapping[str, Multiplier], grad_norm: float | None = None
    ) -> None:
        """Step the gradients that :meth:`gather` found."""
        assert self._grads is not None
        self.step_slots(self._seen.updates(*self._grads, multipliers), grad_norm=grad_norm)
        if any(self._seen.quantized):
            self.step_mark.touch()
            for index in (i for i in self._grads[0] if self._seen.quantized[i]):
                quantize_(self._seen.params[index], self.inner.main_param(self._seen.slots[index]))
        self._seen.stepped()

    def follow(self, verdict: Verdict | DeviceVerdict) -> None:
        """Take a verdict as the last one, after the one before it is settled, and count its
        step."""
        _ = self._verdict
        self._last = verdict
        self._counts["steps"] += 1
        if isinstance(verdict, Verdict):
            self._counts["skipped_steps"] += verdict.skip

    def _clipped(self, verdict: Verdict | DeviceVerdict) -> float | None:
        """The gradients' norm after clipping, for rules that clip by it themselves; they need
        numbers."""
        norm = verdict.norms.get(MAIN) if isinstance(verdict, Verdict) else None
        return (
            min(norm, self.config.clip_grad)
            if norm is not None and self.config.clip_grad > 0
            else norm
        )

    def step_slots(self, updates: Sequence[SlotUpdate], *, grad_norm: float | None = None) -> None:
        """Step given slots of the wrapped optimizer: what :meth:`step` does after its verdict."""
        self._push_settings()
        self.inner.step_slots(updates, grad_norm=grad_norm)

    def _push_settings(self) -> None:
        for mine, inner in zip(self.param_groups, self.inner.param_groups, strict=True):
            inner.update(
                {key: value for key, value in mine.items() if key not in ("params", "param_names")}
            )

    # -- the step by CUDA graphs ------------------------------------------------------------------

    def _by_graph(self) -> Verdict | DeviceVerdict:
        _ = self._verdict
        device = self.verdict_device()
        if device is None or (
            self.grad_scaler is not None and self.grad_scaler.present_scale.device != device
        ):
            return (
                self._eagerly()
            )  # a group was added that is stepped elsewhere, or the scaler replaced
        if self._graphed is None:
            self._graphed = GraphedStep(
                device, choose_backend(self.config.fused_backend, device)[0]
            )
        self.gather()
        self.watch.see_gradients(self, self.has_gradients())
        try:
            return self._graphed.step(self)
        finally:
            self.forget_grads()

    def forget_grads(self) -> None:
        """Let go of the gradients that :meth:`gather` found."""
        self._grads = None

    def form(self) -> Formed:
        """Measure the gradients that :meth:`gather` found, and decide on the device."""
        return form(self.sums(), self._inv_scale, self.config)

    def graph_key(self) -> Any:
        """What a graph of :meth:`form` depends on, apart from what the memory there holds."""
        assert self._grads is not None
        indices, grads = self._grads
        settings = (
            self.config.clip_grad,
            self.config.grad_norm_skip_threshold,
            self.config.log_num_zeros_in_grad,
            None if self.grad_scaler is None else self.grad_scaler.present_scale.data_ptr(),
        )
        return (
            settings,
            indices,
            self._seen.keys_of(indices),
            grads.addresses,
            grads.sizes,
            [grad.dtype for grad in grads],
            [] if grads.contiguous else [grad.stride() for grad in grads],
        )

    def obstacle(self) -> str:
        """Why the step at hand cannot be captured; empty if it can."""
        assert self._grads is not None
        if self._grads[1].contiguous and all(
            local_tensor(param).is_contiguous() for param in self._params()
        ):
            return ""
        return "a parameter or gradient is not contiguous, and is copied in each step"

    def reduces(self) -> bool:
        """Whether a step takes part in reductions with other ranks."""
        return self.process_groups.grad_stats is not None or any(
            key.shard_groups for key in self._seen.keys
        )

    # -- loss scale, gradients ------------------------------------------------------------------

    def get_loss_scale(self) -> Tensor:
        """FP32, shape (1,). Whoever asks is taken to scale by it: say so like this, once a step,
        where gradients come scaled from elsewhere."""
        if self.grad_scaler is None:
            return torch.ones(1, dtype=torch.float32, device="cpu")
        return self.grad_scaler.scale

    def scale_loss(self, loss: Tensor) -> Tensor:
        """The loss times the loss scale; call ``backward`` on the result."""
        return (
            loss
            if self.grad_scaler is None
            else loss * self.grad_scaler.scale.to(loss.device).reshape(())
        )

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear ``grad`` and ``decoupled_grad``. ``main_grad`` belongs to whoever made it and is
        left alone."""
        super().zero_grad(set_to_none=set_to_none)
        for _, param in iter_slots(self.param_groups):
            if getattr(param, "decoupled_grad", None) is not None:
                param.decoupled_grad = None  # type: ignore[attr-defined]

    def offload_to_cpu(self) -> None:
        self.discard_early_work()  # it holds gradients
        super().offload_to_cpu()

    # -- state: a loss scale beside the slots' -----------------------------------------------------

    def state_dict(
        self, is_loading: bool = False, *, full_precision: bool = False
    ) -> dict[str, Any]:
        """Torch-shaped, plus ``grad_scaler`` if there is one. ``is_loading`` is accepted and not
        needed."""
        state_dict = super().state_dict(full_precision=full_precision)
        if self.grad_scaler is not None:
            state_dict["grad_scaler"] = self.grad_scaler.state_dict()
        return state_dict

    def check_beside(self, state_dict: Mapping[str, Any], convert: bool) -> None:
        if self.grad_scaler is not None and (state_dict.get("grad_scaler") or not convert):
            self.grad_scaler.check_state_dict(state_dict.get("grad_scaler"))

    def load_beside(self, state_dict: Mapping[str, Any]) -> None:
        if self.grad_scaler is not None and state_dict.get("grad_scaler"):
            self.grad_scaler.load_state_dict(state_dict["grad_scaler"])
            self.remember_scale()

    # -- what is going on -----------------------------------------------------------------------

    @property
    def is_stub_optimizer(self) -> bool:
        """Whether there is nothing to step on this rank."""
        return not any(group["params"] for group in self.param_groups)

    @property
    def chained_optimizers(self) -> list[MegatronOptimizer]:
        """The parts; an optimizer without parts is its own only part."""
        return [self]

    def get_parameters(self) -> list[Tensor]:
        """The model's parameters in slot order."""
        return self._params()

    def describe(self) -> Description:
        """Per group, place and dtype: count, bytes, backend and why; ``print`` it."""
        found = describe(self)
        return found if self._graphed is None else replace(found, notes=(self._graphed.note,))

    def metrics(self) -> dict[str, float]:
        """Numbers about the last step and the run so far."""
        host, verdict = self.inner.host, self._verdict
        norms = {
            f"grad_norm/{name}": norm for name, norm in verdict.norms.items() if name != EXCLUDED
        }
        return {
            "grad_norm": float("nan") if verdict.grad_norm is None else verdict.grad_norm,
            "loss_scale": 1.0
            if self.grad_scaler is None
            else float(self.grad_scaler.present_scale),
            "multiplier": verdict.multipliers.get(MAIN, 0.0),
            "bytes_down": 0 if host is None else host.transfer_bytes.down,
            "bytes_up": 0 if host is None else host.transfer_bytes.up,
            **({} if host is None else host.metrics()),
            **norms,
            **self._counts,
            **(
                {}
                if self._graphed is None
                else {
                    "graph_captures": self._graphed.captures,
                    "graph_replays": self._graphed.replays,
                }
            ),
            "reloaded_params": self._reloaded,
        }
