"""Adam and AdamW (Kingma & Ba 2015; Loshchilov & Hutter 2019). Formulas: docs/numerics.md."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from mp_optim.update.optimizer import RuleOptimizer
from mp_optim.update.rule import ElementRule, Settings


def check_decoupled(group: Settings) -> None:
    """Raise ValueError naming a cautious setting that has nothing to hold back: decay that is a
    part of the gradient."""
    for name in ("caution", "cautious_wd"):
        if group.get(name) and not group.get("adam_w_mode", True):
            raise ValueError(
                f"{name}=True: weight decay has to be decoupled from the gradient "
                "(adam_w_mode=True, decoupled_weight_decay=True of the config)"
            )


class AdamRule(ElementRule):
    """Adam. With ``betas[0]`` at 0 it keeps no first moment, which would be the gradient."""

    name = "adam"

    def deciding_setting(self, group: Settings) -> str:
        return "betas"

    def moments(self, group: Settings) -> tuple[str, ...]:
        unread = self.unread_moments(group)
        return tuple(name for name in super().moments(group) if name not in unread)

    def check_settings(self, group: Settings) -> None:
        super().check_settings(group)
        check_decoupled(group)

    def unread_moments(self, group: Settings) -> tuple[str, ...]:
        match group["betas"]:
            case (first, _, *_) if first == 0.0:
                return ("exp_avg",)
        return ()  # also of what are no betas: check_settings says so


class FusedAdam(RuleOptimizer):
    """Adam over FP32 tensors on any device, in one pass per batch.

    With ``betas[0]`` at 0 it keeps no first moment, which would be the gradient.

    Args:
        params: FP32 parameters, named parameters or groups.
        adam_w_mode: decoupled weight decay; False adds ``weight_decay * p`` to the gradient.
        caution: see ``OptimizerConfig.caution``.
        cautious_wd: see ``OptimizerConfig.cautious_wd``.
        backend: see ``OptimizerConfig.fused_backend``.
        **precision: fields of :class:`~mp_optim.update.state_format.StatePrecision`, such as
            ``exp_avg_dtype``.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        *,
        bias_correction: bool = True,
        adam_w_mode: bool = True,
        caution: bool = False,
        cautious_wd: bool = False,
        backend: str = "auto",
        **precision: Any,
    ) -> None:
        rule = AdamRule()
        settings = rule.settings_from(locals())
        super().__init__(rule, params, settings, backend, precision)
