"""Stochastic gradient descent with momentum, as torch defines it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from mp_optim.update.optimizer import RuleOptimizer
from mp_optim.update.rule import ElementRule, Settings


class SgdRule(ElementRule):
    """SGD with momentum. The momentum buffer starts as the first gradient."""

    name = "sgd"

    def deciding_setting(self, group: Settings) -> str:
        return "momentum"

    def moments(self, group: Settings) -> tuple[str, ...]:
        return super().moments(group) if group["momentum"] else ()

    def reads_steps(self, group: Settings) -> bool:
        return False

    def check_settings(self, group: Settings) -> None:
        super().check_settings(group)
        if group["nesterov"] and not (group["momentum"] > 0 and group["dampening"] == 0):
            raise ValueError(
                f"nesterov={group['nesterov']!r}: must be False unless momentum > 0 and "
                "dampening == 0"
            )


class FusedSGD(RuleOptimizer):
    """SGD over FP32 tensors. The momentum buffer starts as the first gradient.

    Args:
        **precision: fields of :class:`~mp_optim.update.state_format.StatePrecision`;
            ``exp_avg_dtype`` is the buffer's.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        momentum: float = 0.0,
        dampening: float = 0.0,
        weight_decay: float = 0.0,
        nesterov: bool = False,
        *,
        backend: str = "auto",
        **precision: Any,
    ) -> None:
        rule = SgdRule()
        settings = rule.settings_from(locals())
        super().__init__(rule, params, settings, backend, precision)
