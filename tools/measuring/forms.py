"""Which objects of the package a gradient goes through in one step on the host. Prints the names of
their classes.

A gradient is recognised by its values, so that a copy of it counts too.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn

import mp_optim

SIZE = 1237
"""Elements of the parameters; nothing else is as large."""


class Watch:
    """Notes the classes of objects that hold the gradient while functions are called."""

    def __init__(self, grad: Tensor) -> None:
        self._grad = grad
        self.classes: dict[str, None] = {}

    def __call__(self, frame: FrameType, event: str, argument: Any) -> None:
        if event in ("call", "return") and f"{mp_optim.__name__}/" in frame.f_code.co_filename:
            for value in frame.f_locals.values():
                self._look(value, 2)

    def _look(self, value: object, depth: int) -> bool:
        """Whether the gradient is in an object; notes the object's class if it is one of ours."""
        if isinstance(value, Tensor):
            return self._is_grad(value)
        parts = list(_parts(value)) if depth else []
        holds = sum(self._look(part, depth - 1) for part in parts) > 0
        if holds and _is_ours(value):
            self.classes.setdefault(type(value).__name__)
        return holds

    def _is_grad(self, tensor: Tensor) -> bool:
        alike = tensor.dtype == self._grad.dtype and tensor.numel() == SIZE
        return alike and torch.equal(tensor.detach().flatten(), self._grad)


def _parts(value: object) -> Iterator[object]:
    """What an object that travels is made of: items, or attributes; not those of an optimizer."""
    if isinstance(value, (list, tuple)):
        yield from value
    elif _is_ours(value) and not isinstance(value, torch.optim.Optimizer):
        names = getattr(type(value), "__slots__", ())
        yield from getattr(value, "__dict__", {}).values()
        yield from (getattr(value, name, None) for name in names)


def _is_ours(value: object) -> bool:
    return type(value).__module__.startswith(mp_optim.__name__)


def main() -> None:
    params = [torch.randn(SIZE, dtype=torch.bfloat16) for _ in range(3)]
    model = nn.ParameterList(params)
    factors = [torch.randn_like(param) for param in params]
    config = mp_optim.OptimizerConfig(
        lr=1e-3,
        bf16=True,
        clip_grad=0.0,
        optimizer_cpu_offload=True,
        optimizer_offload_fraction=1.0,
        offload_mode="overlap",
    )
    watch = Watch(factors[1])
    optimizer = mp_optim.get_megatron_optimizer(config, model)
    threading.setprofile(watch)
    for _ in range(3):
        sys.setprofile(watch)
        for param, factor in zip(model, factors, strict=True):
            (param * factor).sum().backward()
        optimizer.step()
        sys.setprofile(None)
        optimizer.zero_grad()
    print(*watch.classes)


if __name__ == "__main__":
    main()
