"""A step as Megatron cuts it: gradients are prepared, their norm is asked for and clipped, and they
are stepped with. Whoever coordinates several optimizers calls these; ``step`` is all of them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from mp_optim.distributed.optimizer import DistributedOptimizer
from mp_optim.precision import MegatronOptimizer, Verdict
from mp_optim.precision.grad_scaler import inverse_of, trackers_of
from mp_optim.precision.measure import EXCLUDED, MAIN, Measurement
from mp_optim.precision.skip_rule import RollingRule
from mp_optim.precision.step_grads import StepGrads
from mp_optim.precision.step_phases import apply_verdict, conclude, scale_follows
from mp_optim.precision.verdict import decide
from mp_optim.slots import current_grad, local_tensor, param_at


@dataclass
class _Prepared:
    """Gradients that were measured, and what has been decided of their step so far."""

    grads: StepGrads
    measurement: Measurement
    verdict: Verdict
    clipped: bool = False


class StepInParts:
    """The parts of one stack's step.

    Nothing is written between them: the clip coefficient and the inverse loss scale are multiplied
    in when the parameters are stepped, so gradients stay as backward left them.
    """

    def __init__(self, stack: MegatronOptimizer) -> None:
        self._stack = stack
        self._prepared: _Prepared | None = None
        self._rule: RollingRule | None = None

    def prepare(self) -> bool:
        """Collect and measure this step's gradients; whether some are not finite, and then the step
        is over: the loss scale has followed, and there is nothing to step with."""
        stack = self._stack
        stack.watch.check_scaled(stack)
        with stack.step_mark.step(stack):
            stack.early_work.finish()
            grads = stack.collect_grads()
            measurement = grads.sums()
            self._rule = stack.skip_rule.begun(torch.device("cpu"))
        stack.watch.see_gradients(stack, grads.has_any())
        prepared = _Prepared(grads, measurement, self._decided(measurement, 0.0))
        if prepared.verdict.found_inf:
            self._finish(prepared)
        else:
            self._prepared = prepared
        return prepared.verdict.found_inf

    def clip(self, limit: float) -> float:
        """Let the step be clipped to a norm (0 for no clipping); the norm before that.

        Raises:
            RuntimeError: nothing is prepared, or its gradients are not finite.
        """
        prepared = self._require("clip_grad_norm")
        prepared.verdict = self._decided(prepared.measurement, limit)
        prepared.clipped = True
        return self.norms()[MAIN]

    def norms(self) -> dict[str, float]:
        """Norms of the unscaled gradients, by norm group."""
        norms = self._require("get_grad_norm").verdict.norms
        return {MAIN: 0.0, **{k: v for k, v in norms.items() if k != EXCLUDED}}

    def zeros(self) -> int:
        """Zero gradient elements.

        Raises:
            ValueError: they are not counted.
        """
        zeros = self._require("count_zeros").verdict.num_zeros
        if zeros is None:
            raise ValueError(
                "count_zeros: log_num_zeros_in_grad=False, so zeros were not counted when the "
                "gradients were read; set it to True"
            )
        return zeros

    def step(self) -> bool:
        """Step with what was prepared; whether parameters were updated.

        Raises:
            RuntimeError: it was neither said how to clip it nor that it is not to be clipped.
        """
        prepared = self._require("step_with_ready_grads")
        norm, limit = prepared.verdict.grad_norm or 0.0, self._stack.config.clip_grad
        if not prepared.clipped and 0.0 < limit < norm:
            raise RuntimeError(
                f"step_with_ready_grads: clip_grad={limit:g}, the norm is {norm:g}, and nobody "
                "called clip_grad_norm. Call optimizer.clip_grad_norm(limit), with 0 for no "
                "clipping: gradients that were clipped otherwise are not seen here"
            )
        self._finish(prepared)
        return not prepared.verdict.skip

    def grads_for_norm(self, norm_group: str | None = None) -> list[Tensor]:
        """FP32 copies of this rank's unscaled gradients that count in a norm, by default the main
        one."""
        if self._prepared is None:
            with self._stack.step_mark.step(self._stack):
                self._stack.collect_grads()
        inverse = inverse_of(self._stack.grad_scaler)
        factor = 1.0 if inverse is None else inverse
        grads = _counted(self._stack, norm_group or MAIN)
        return [(grad * factor).to(torch.float32) for grad in grads]

    def _decided(self, measurement: Measurement, limit: float) -> Verdict:
        stack = self._stack
        config = dataclasses.replace(stack.config, clip_grad=limit)
        scaler = stack.grad_scaler
        return decide(
            measurement, inverse_of(scaler), config, trackers_of(scaler), self._rule
        )

    def _require(self, caller: str) -> _Prepared:
        if self._prepared is None:
            raise RuntimeError(
                f"{caller}: no gradients are prepared; call prepare_grads() first, once a step, "
                "and go on only if it returns False"
            )
        return self._prepared

    def _finish(self, prepared: _Prepared) -> None:
        stack, verdict = self._stack, prepared.verdict
        self._prepared = None
        with stack.step_mark.step(stack):
            if self._rule is not None:
                self._rule.take_on_host(verdict.norms)
            apply_verdict(stack, prepared.grads, verdict)
            scale_follows(stack, verdict)
        conclude(stack, verdict)


def _counted(stack: MegatronOptimizer, norm_group: str) -> Iterator[Tensor]:
    for part in stack.chained_optimizers:
        owner = part.shards if isinstance(part, DistributedOptimizer) else part
        for slot in owner.slots():
            grad = current_grad(param_at(owner.param_groups, slot))
            if grad is not None and owner.norm_key(slot).group == norm_group:
                yield local_tensor(grad)


class AsksForParts:
    """What Megatron's callers ask for between backward and step.

    Attributes:
        stack: see :class:`~mp_optim.megatron.face.MegatronFace`.
    """

    stack: MegatronOptimizer

    @property
    def step_in_parts(self) -> StepInParts:
        """The step that is under way."""
        parts: StepInParts = self.__dict__.setdefault(
            "_step_in_parts", StepInParts(self.stack)
        )
        return parts

    def prepare_grads(self) -> bool:
        """Measure the gradients; True if they are not finite, and then nothing is left to step."""
        return self.step_in_parts.prepare()

    def get_grad_norm(self) -> float:
        """Of the prepared gradients, unscaled and not clipped, over all ranks."""
        return self.step_in_parts.norms()[MAIN]

    def clip_grad_norm(self, clip_grad: float) -> float:
        """Step with gradients clipped to this norm (0: as they are); returns the norm before."""
        return self.step_in_parts.clip(clip_grad)

    def count_zeros(self) -> int:
        """Zero elements of the prepared gradients, over all ranks; with ``log_num_zeros_in_grad``
        alone."""
        return self.step_in_parts.zeros()

    def step_with_ready_grads(self) -> bool:
        """Step with the prepared gradients; True unless ``grad_norm_skip_threshold`` forbids."""
        return self.step_in_parts.step()

    def get_grads_for_grad_norm(self, grad_norm_group: str | None = None) -> list[Any]:
        """This rank's gradients that count in the norm: FP32 copies, unscaled."""
        return self.step_in_parts.grads_for_norm(grad_norm_group)

    get_main_grads_for_grad_norm = get_grads_for_grad_norm

    def has_grad_norm_group(self, grad_norm_group: str) -> bool:
        """Whether a parameter of this rank is clipped by a norm of its own of that name."""
        keys = (self.stack.norm_key(slot) for slot in self.stack.slots())
        return any(key.group == grad_norm_group for key in keys)

    @property
    def grad_norms_by_group(self) -> dict[str, float]:
        """Of the last step: the norms of gradients that are clipped by one of their own."""
        norms = self.stack.counts.settle().norms
        return {key: norms[key] for key in norms if key not in (MAIN, EXCLUDED)}

    def get_grad_stats_parallel_group(self) -> ProcessGroup | None:
        """The ranks that agree on the gradient norm; None for this one alone.

        Raises:
            ValueError: the dense and the expert part have different ones.
        """
        parts = [part.norm_ranks() for part in self.stack.chained_optimizers]
        if any(ranks != parts[0] for ranks in parts):
            raise ValueError(
                "the dense and the expert part agree on their norms over different ranks; ask "
                "the parts, in chained_optimizers"
            )
        return parts[0][0] if parts[0] else None
