"""MegatronOptimizer: the outer shell of the stack. Measure, agree, decide, apply."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from mp_optim.config import OptimizerConfig
from mp_optim.precision.description import Description, describe
from mp_optim.precision.grad_scaler import MegatronGradScaler
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
from mp_optim.precision.verdict import Verdict, decide
from mp_optim.process_groups import ProcessGroups
from mp_optim.slot_optimizer import Closure
from mp_optim.slots import (
    SlotUpdate,
    SteadyList,
    iter_slots,
    local_tensor,
)
from mp_optim.update import choose_backend

__all__ = ["MegatronOptimizer"]


class MegatronOptimizer(MainParams):
    """Common part of the precision wrappers.

    Args:
        optimizer: any torch optimizer over the model's parameters. This package's own step in one pass
            from the gradients as they are; a foreign one gets FP32 ``.grad``.
        config: see :class:`mp_optim.OptimizerConfig`.
        grad_scaler: loss scale, or None for 1.
        init_state_fn: accepted for drop-in use; state is allocated by :meth:`init_state`.
        process_groups: whom to agree with on the gradient norm.

    Raises:
        TypeError, ValueError: a parameter's dtype does not fit, naming it.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, config: OptimizerConfig,
                 grad_scaler: MegatronGradScaler | None = None, init_state_fn: Any = None, *,
                 process_groups: ProcessGroups | None = None) -> None:
        self.config = config
        self.grad_scaler = grad_scaler
        self._grads: tuple[list[int], SteadyList] | None = None
        self._verdict = Verdict()
        self._counts = {"steps": 0, "skipped_steps": 0}
        super().__init__(optimizer, process_groups)

    # -- the step -------------------------------------------------------------------------------

    @torch.no_grad()
    def step(self, closure: Closure | None = None) -> Any:
        """One step: returns :class:`~mp_optim.precision.verdict.StepResult`, or the closure's loss if one is given.

        A step whose gradients hold an inf or nan, or whose norm exceeds
        ``config.grad_norm_skip_threshold``, changes nothing but the loss scale.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        inv_scale = None if self.grad_scaler is None else self.grad_scaler.inv_scale
        with self._timed("optimizer-clip-main-grad"):
            verdict = decide(self.measure(), inv_scale, self.config)
        with self._timed("optimizer-inner-step"):
            self.apply(verdict)
        if self.grad_scaler is not None:
            self.grad_scaler.update(verdict.found_inf)
        return verdict.result if closure is None else loss

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
        return next((local_tensor(p).device for _, p in iter_slots(self.param_groups)), torch.device("cpu"))

    def measure(self) -> Measurement:
        """Sums of squares of this step's gradients, agreed with the other ranks."""
        if self._parking.occupied:
            raise RuntimeError("the optimizer is offloaded: call restore_from_cpu() before step()")
        self._sync()
        all_keys = self._seen.distinct_keys
        indices, grads = self._grads = self._seen.grads(self.slot_name)
        if not all(self._seen.bound):
            for index in (i for i in indices if not self._seen.bound[i]):  # it was frozen when its group was added
                self._seen.trained(index, self._bind(self._seen.slots[index], self._seen.params[index]))
        return self.measure_grads(grads, self._seen.keys_of(indices), all_keys)

    def measure_grads(self, grads: Sequence[Tensor], keys: Sequence[NormKey],
                      all_keys: Sequence[NormKey]) -> Measurement:
        """The same for given gradients.

        Args:
            grads, keys: local gradients, and which norm each counts in.
            all_keys: every key of the model, also those without a gradient now, so that all ranks reduce alike.
        """
        device = self.device
        sums = measure(grads, keys, all_keys, self._sum_of_squares, device)
        zeros = count_zeros(grads, keys, all_keys, device) if self.config.log_num_zeros_in_grad else None
        ranks = self.process_groups.grad_stats
        if self._norm_groups is None or ranks is None:
            self._norm_groups = norm_groups(all_keys, ranks)
        return agree(sums, zeros, ranks, self._norm_groups)

    def _sum_of_squares(self, grads: Sequence[Tensor]) -> Tensor:
        backend, _ = choose_backend(self.config.fused_backend, grads[0].device)
        return backend.sum_of_squares(grads)

    def apply(self, verdict: Verdict) -> None:
        """Step the slots that have a gradient, unless the verdict says skip."""
        self._verdict = verdict
        self._counts["steps"] += 1
        if self._grads is None:
            self._sync()
            self._grads = self._seen.grads(self.slot_name)
        (indices, grads), self._grads = self._grads, None
        if verdict.skip:
            self._counts["skipped_steps"] += 1
            return
        norm = verdict.norms.get(MAIN)
        clipped = None if norm is None else min(norm, self.config.clip_grad) if self.config.clip_grad > 0 else norm
        self.step_slots(self._seen.updates(indices, grads, verdict.multipliers), grad_norm=clipped)
        self._seen.stepped()

    def step_slots(self, updates: Sequence[SlotUpdate], *, grad_norm: float | None = None) -> None:
        """Step given slots of the wrapped optimizer: what :meth:`step` does after its verdict."""
        self._push_settings()
        self.inner.step_slots(updates, grad_norm=grad_norm)

    def _push_settings(self) -> None:
        for mine, inner in zip(self.param_groups, self.inner.param_groups, strict=True):
            inner.update({key: value for key, value in mine.items() if key not in ("params", "param_names")})

    # -- loss scale, gradients ------------------------------------------------------------------

    def get_loss_scale(self) -> Tensor:
        """FP32, shape (1,)."""
        return torch.ones(1) if self.grad_scaler is None else self.grad_scaler.scale

    def scale_loss(self, loss: Tensor) -> Tensor:
        """The loss times the loss scale; call ``backward`` on the result."""
        return loss if self.grad_scaler is None else loss * self.grad_scaler.scale.to(loss.device).reshape(())

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear ``grad`` and ``decoupled_grad``. ``main_grad`` belongs to whoever made it and is left alone."""
        super().zero_grad(set_to_none=set_to_none)
        for _, param in iter_slots(self.param_groups):
            if getattr(param, "decoupled_grad", None) is not None:
                param.decoupled_grad = None  # type: ignore[attr-defined]

    # -- state: a loss scale beside the slots' -----------------------------------------------------

    def state_dict(self, is_loading: bool = False, *, full_precision: bool = False) -> dict[str, Any]:
        """Torch-shaped, plus ``grad_scaler`` if there is one. ``is_loading`` is accepted and not needed."""
        state_dict = super().state_dict(full_precision=full_precision)
        if self.grad_scaler is not None:
            state_dict["grad_scaler"] = self.grad_scaler.state_dict()
        return state_dict

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any], *, convert: bool = False) -> None:
        self._sync()
        super().load_state_dict(state_dict, convert=convert)
        if self.grad_scaler is not None and "grad_scaler" in state_dict:
            self.grad_scaler.load_state_dict(state_dict["grad_scaler"])

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
        return describe(self)

    def metrics(self) -> dict[str, float]:
        """Numbers about the last step and the run so far."""
        traffic = getattr(self.inner, "traffic", None)
        norms = {f"grad_norm/{name}": norm for name, norm in self._verdict.norms.items() if name != EXCLUDED}
        return {
            "grad_norm": float("nan") if self._verdict.grad_norm is None else self._verdict.grad_norm,
            "loss_scale": float(self.get_loss_scale()),
            "multiplier": self._verdict.multipliers.get(MAIN, 0.0),
            "bytes_down": 0 if traffic is None else traffic.down,
            "bytes_up": 0 if traffic is None else traffic.up,
            **norms,
            **self._counts,
            "reloaded_params": self._reloaded,
        }
