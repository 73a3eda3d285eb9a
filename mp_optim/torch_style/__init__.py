"""The rules as torch optimizers, ``cls(params, lr=..., ...)``: the same stack below."""

from mp_optim.torch_style.classes import (
    LAMB,
    SGD,
    Adafactor,
    Adam,
    AdamW,
    Lion,
    Muon,
    StableAdamW,
)
from mp_optim.torch_style.optimizer import StackOptimizer

__all__ = [
    "LAMB",
    "SGD",
    "Adafactor",
    "Adam",
    "AdamW",
    "Lion",
    "Muon",
    "StableAdamW",
    "StackOptimizer",
]
