"""Optimizers with torch's signature, ``cls(params, lr=..., ...)``, over the mixed-precision stack.

The classes are in :mod:`mp_optim.optimizers.classes`.
"""

from mp_optim.optimizers.base import StackOptimizer

__all__ = ["StackOptimizer"]
