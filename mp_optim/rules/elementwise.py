"""The rules of one pass over the elements. Formulas: docs/numerics.md.

- Adam and AdamW: Kingma & Ba 2015, Loshchilov & Hutter 2019
- Lion: the sign of an interpolated momentum, Chen et al. 2023
- SGD with momentum, as torch defines it
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from mp_optim.rules.rule import ElementRule, Settings
from mp_optim.rules.rule_optimizer import RuleOptimizer


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
        **precision: fields of :class:`~mp_optim.kernels.state_format.StatePrecision`, such as
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
        settings = {
            "lr": lr,
            "weight_decay": weight_decay,
            "betas": betas,
            "eps": eps,
            "bias_correction": bias_correction,
            "adam_w_mode": adam_w_mode,
            "caution": caution,
            "cautious_wd": cautious_wd,
        }
        super().__init__(AdamRule(), params, settings, backend, precision)


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
        **precision: fields of :class:`~mp_optim.kernels.state_format.StatePrecision`, such as
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
        settings = {
            "lr": lr,
            "weight_decay": weight_decay,
            "betas": betas,
            "caution": caution,
            "cautious_wd": cautious_wd,
        }
        super().__init__(LionRule(), params, settings, backend, precision)


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
        **precision: fields of :class:`~mp_optim.kernels.state_format.StatePrecision`;
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
        settings = {
            "lr": lr,
            "weight_decay": weight_decay,
            "momentum": momentum,
            "dampening": dampening,
            "nesterov": nesterov,
        }
        super().__init__(SgdRule(), params, settings, backend, precision)
