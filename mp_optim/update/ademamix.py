"""AdEMAMix (Pagliardini et al. 2024): Adam with a second average of gradients, which forgets
slowly. Formulas: docs/numerics.md."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from mp_optim.update.adam import AdamRule
from mp_optim.update.optimizer import RuleOptimizer


class AdemamixRule(AdamRule):
    """AdEMAMix, with decoupled weight decay."""

    name = "ademamix"


class FusedAdEMAMix(RuleOptimizer):
    """AdEMAMix over FP32 tensors on any device, in one pass per batch.

    Args:
        betas: of the first moment, the second moment, and the slow average of gradients.
        alpha: weight of the slow average in the step.
        beta3_warmup: steps in which ``betas[2]`` grows from ``betas[0]``; None starts with it.
        alpha_warmup: steps in which ``alpha`` grows from 0; None starts with it.
        caution: see ``OptimizerConfig.caution``.
        cautious_wd: see ``OptimizerConfig.cautious_wd``.
        **precision: fields of :class:`~mp_optim.update.state_format.StatePrecision`, such as
            ``exp_avg_dtype``, which is the slow average's, too.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float, float] = (0.9, 0.999, 0.9999),
        alpha: float = 5.0,
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        *,
        beta3_warmup: int | None = None,
        alpha_warmup: int | None = None,
        caution: bool = False,
        cautious_wd: bool = False,
        backend: str = "auto",
        **precision: Any,
    ) -> None:
        rule = AdemamixRule()
        settings = rule.settings_from(locals())
        super().__init__(rule, params, settings, backend, precision)
