"""Lion (Chen et al. 2023): the sign of an interpolated momentum. Formulas: docs/numerics.md."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from mp_optim.update.optimizer import RuleOptimizer
from mp_optim.update.rule import ElementRule, Settings


class LionRule(ElementRule):
    """Lion, with decoupled weight decay."""

    name = "lion"

    def reads_steps(self, group: Settings) -> bool:
        return False


class FusedLion(RuleOptimizer):
    """Lion over FP32 tensors, with decoupled weight decay.

    Args:
        betas: of the interpolation that is signed, and of the momentum.
        caution: see ``OptimizerConfig.caution``.
        cautious_wd: see ``OptimizerConfig.cautious_wd``.
        **precision: fields of :class:`~mp_optim.update.state_format.StatePrecision`, such as
            ``exp_avg_dtype``.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-4,
        betas: tuple[float, float] = (0.95, 0.98),
        weight_decay: float = 0.0,
        *,
        caution: bool = False,
        cautious_wd: bool = False,
        backend: str = "auto",
        **precision: Any,
    ) -> None:
        rule = LionRule()
        settings = rule.settings_from(locals())
        super().__init__(rule, params, settings, backend, precision)
