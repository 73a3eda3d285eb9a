"""LAMB, which scales a whole parameter's update: You et al. 2020, with apex's settings. Formulas:
docs/numerics.md."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from mp_optim.core import SlotUpdate
from mp_optim.kernels import Backend
from mp_optim.kernels.kernel_args import LambScalars, fp32
from mp_optim.kernels.sums import reduce_rows
from mp_optim.rules.rule import Launch, Rule, Settings
from mp_optim.rules.rule_optimizer import RuleOptimizer


class LambRule(Rule):
    """LAMB. The trust ratio is per parameter: nothing crosses devices, and for a sharded parameter
    one small tensor of sums is reduced."""

    name = "lamb"
    clips = True
    needs_numbers = False

    def is_collective(self, group: Settings, update: SlotUpdate) -> bool:
        return bool(update.shard_groups)

    def effective_multiplier(self, group: Settings, multiplier: float, grad_norm: float) -> float:
        limit = group["max_grad_norm"]
        if not limit or grad_norm <= limit:
            return multiplier
        return fp32(multiplier * limit / grad_norm)

    def apply(self, launch: Launch, backend: Backend) -> None:
        lists, multiplier = launch.lists, launch.factor
        scalars = LambScalars.at(launch.settings, launch.step)
        shard_groups = launch.updates.shard_groups
        if any(shard_groups):
            sums = backend.lamb_moments(lists, scalars, multiplier)
            reduce_rows(sums, shard_groups, "adding up LAMB's norms")
            backend.lamb_finish(lists, scalars, sums, multiplier)
        else:
            backend.lamb(lists, scalars, multiplier)


class FusedLAMB(RuleOptimizer):
    """LAMB over FP32 tensors, wherever they lie and however they are split.

    The trust ratio is per parameter: nothing crosses devices, and for a sharded parameter one small
    tensor of sums is reduced. The gradient norm for ``max_grad_norm`` is global: callers of
    ``step_slots`` pass it in, ``step`` computes it over all devices.

    Args:
        grad_averaging: weigh the gradient with ``1 - beta1`` in the first moment.
        max_grad_norm: clip the global gradient norm to this; 0 turns clipping off.
        use_nvlamb: adapt the learning rate also where ``weight_decay`` is 0.
        **precision: fields of :class:`~mp_optim.kernels.state_format.StatePrecision`, such as
            ``exp_avg_dtype``.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.01,
        *,
        bias_correction: bool = True,
        adam_w_mode: bool = True,
        grad_averaging: bool = True,
        max_grad_norm: float = 1.0,
        use_nvlamb: bool = False,
        backend: str = "auto",
        **precision: Any,
    ) -> None:
        settings = {
            "lr": lr,
            "weight_decay": weight_decay,
            "betas": betas,
            "eps": eps,
            "bias_correction": bias_correction,
            "adam_w_mode": adam_w_mode,
            "max_grad_norm": max_grad_norm,
            "use_nvlamb": use_nvlamb,
            "grad_averaging": grad_averaging,
        }
        super().__init__(LambRule(), params, settings, backend, precision)
