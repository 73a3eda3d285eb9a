"""The rules as torch optimizers, ``cls(params, lr=..., ...)``: the same stack below. Their classes
are in :mod:`mp_optim.torch_style.classes`."""

from mp_optim.torch_style.optimizer import StackOptimizer

__all__ = ["StackOptimizer"]
