"""torchtitan's container of optimizers, with the optimizers of this package by their names."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch.optim import Optimizer
from torchtitan.components.optimizer import OptimizersContainer

import mp_optim.optimizers.classes as ours


class MpOptimizersContainer(OptimizersContainer):  # type: ignore[misc]
    """``optimizer_name`` of a ``ParamGroupConfig`` names a class of :mod:`mp_optim.optimizers`.

    Hyperparameters stand in ``optimizer_kwargs``; ``state``, ``offload`` and the like, which a
    whole optimizer has, in ``optimizer_factory_kwargs_by_name``.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(OptimizersContainer.Config):  # type: ignore[misc]
        """The fields of torchtitan's."""

    @staticmethod
    def _resolve_optimizer_factory(name: str) -> Callable[..., Optimizer]:
        if name not in ours.__all__:
            raise NotImplementedError(f"optimizer_name={name!r}: must be one of {ours.__all__}")
        factory: Any = getattr(ours, name)
        return factory  # type: ignore[no-any-return]
