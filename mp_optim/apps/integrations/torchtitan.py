"""Optimizer container for torchtitan that finds the optimizers of this package by name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch.optim import Optimizer
from torchtitan.components.optimizer import OptimizersContainer

import mp_optim.optimizers.classes as ours


class MpOptimizersContainer(OptimizersContainer):  # type: ignore[misc]
    """Container of optimizers; ``optimizer_name`` names a class of :mod:`mp_optim.optimizers`.

    ``optimizer_kwargs`` has hyperparameters. ``optimizer_factory_kwargs_by_name`` has settings of a
    whole optimizer, such as ``state`` and ``offload``.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(OptimizersContainer.Config):  # type: ignore[misc]
        """torchtitan's config of the container."""

    @staticmethod
    def _resolve_optimizer_factory(name: str) -> Callable[..., Optimizer]:
        if name not in ours.__all__:
            raise NotImplementedError(f"optimizer_name={name!r}: must be one of {ours.__all__}")
        factory: Any = getattr(ours, name)
        return factory  # type: ignore[no-any-return]
