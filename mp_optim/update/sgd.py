"""Stochastic gradient descent with momentum, as torch defines it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor

from mp_optim.config.setting_checks import (
    FINITE,
    NOT_NEGATIVE,
    check_flags,
    check_range,
    check_setting,
    check_shared,
)
from mp_optim.slots import SlotUpdates
from mp_optim.update.backends import Backend
from mp_optim.update.kernel_args import SgdScalars, TensorLists
from mp_optim.update.rule import RuleOptimizer
from mp_optim.update.state_format import StatePrecision


class SGD(RuleOptimizer):
    """SGD over FP32 tensors. The momentum buffer starts as the first gradient.

    Args:
        **precision: fields of :class:`~mp_optim.update.state_format.StatePrecision`;
            ``exp_avg_dtype`` is the buffer's.
    """

    rule = "sgd"
    decides_moments = "momentum"
    needs_numbers = False

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
        super().__init__(
            params,
            {
                "lr": lr,
                "momentum": momentum,
                "dampening": dampening,
                "weight_decay": weight_decay,
                "nesterov": nesterov,
            },
            backend,
            StatePrecision(**precision),
        )

    def moments(self, group: dict[str, Any]) -> tuple[str, ...]:
        return super().moments(group) if group["momentum"] else ()

    def reads_steps(self, group: dict[str, Any]) -> bool:
        return False

    def check_settings(self, group: dict[str, Any]) -> None:
        check_shared(group)
        check_setting("momentum", group["momentum"], NOT_NEGATIVE)
        check_setting("dampening", group["dampening"], FINITE)
        check_flags(group, ("nesterov",))
        nesterov_fits = not group["nesterov"] or (
            group["momentum"] > 0 and group["dampening"] == 0
        )
        check_range(
            group,
            "nesterov",
            nesterov_fits,
            "False unless momentum > 0 and dampening == 0",
        )

    def apply(
        self,
        backend: Backend,
        lists: TensorLists,
        group: dict[str, Any],
        step: int,
        multiplier: float | Tensor,
        updates: SlotUpdates,
    ) -> None:
        backend.sgd(lists, SgdScalars.at(group, step), multiplier)
