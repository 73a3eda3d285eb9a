"""The rules as torch optimizers, ``cls(params, lr=..., ...)``: the same stack below. Their classes
are in :mod:`mp_optim.optimizers.classes`."""

from mp_optim.optimizers.base import StackOptimizer

__all__ = ["StackOptimizer"]
