"""Lion (Chen et al. 2023): the sign of an interpolated momentum. Formulas: docs/numerics.md."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor

from mp_optim.config.setting_checks import check_betas, check_shared
from mp_optim.slots import SlotUpdates
from mp_optim.update.backends import Backend
from mp_optim.update.kernel_args import LionScalars, TensorLists
from mp_optim.update.rule import RuleOptimizer
from mp_optim.update.state_format import StatePrecision


class Lion(RuleOptimizer):
    """Lion over FP32 tensors, with decoupled weight decay.

    Args:
        betas: of the interpolation that is signed, and of the momentum.
        **precision: fields of :class:`~mp_optim.update.state_format.StatePrecision`, such as
            ``exp_avg_dtype``.
    """

    rule = "lion"
    needs_numbers = False

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-4,
        betas: tuple[float, float] = (0.95, 0.98),
        weight_decay: float = 0.0,
        *,
        backend: str = "auto",
        **precision: Any,
    ) -> None:
        super().__init__(
            params,
            {"lr": lr, "betas": betas, "weight_decay": weight_decay},
            backend,
            StatePrecision(**precision),
        )

    def reads_steps(self, group: dict[str, Any]) -> bool:
        return False

    def check_settings(self, group: dict[str, Any]) -> None:
        check_shared(group)
        check_betas(group["betas"])

    def apply(
        self,
        backend: Backend,
        lists: TensorLists,
        group: dict[str, Any],
        step: int,
        multiplier: float | Tensor,
        updates: SlotUpdates,
    ) -> None:
        backend.lion(lists, LionScalars.at(group, step), multiplier)
