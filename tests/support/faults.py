"""Flip bits in the inputs and outputs of a backend's step."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from mp_optim.kernels.kernel_args import MAIN, TensorLists
from mp_optim.rules.rule import ElementRule, Launch

Fault = Callable[[TensorLists], Callable[[], None]]
"""A function called before a backend steps; it returns a function to call after the step."""

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}


def flip(tensor: Tensor, element: int, bit: int) -> None:
    """Flip a bit of an element without raising the tensor's version."""
    memory = tensor.data.view(-1).view(_BITS[tensor.itemsize])
    memory[element] ^= 1 << bit


def upper_bit(tensor: Tensor) -> int:
    return {torch.float32: 22, torch.bfloat16: 6, torch.float16: 9}.get(tensor.dtype, 2)


def read_wrong(column: str, element: int) -> Fault:
    def before(lists: TensorLists) -> Callable[[], None]:
        tensor = max(read(lists, column), key=Tensor.numel)
        flip(tensor, element, upper_bit(tensor))
        if column != "grad":
            return lambda: None
        return lambda: flip(tensor, element, upper_bit(tensor))

    return before


def written_wrong(column: str, element: int) -> Fault:
    def before(lists: TensorLists) -> Callable[[], None]:
        columns: dict[str, Sequence[Any]] = {
            MAIN: lists.main,
            "output": lists.output,
            **lists.state,
        }
        tensors = [tensor for tensor in columns[column] if tensor is not None]
        tensor = max(tensors, key=Tensor.numel)
        return lambda: flip(tensor, element, upper_bit(tensor))

    return before


def read(lists: TensorLists, column: str) -> Any:
    present = {MAIN: lists.main, **lists.state, **(lists.source or {})}
    return lists.grad if column == "grad" else present[column]


class _Faulty:
    """Backend that gives wrong results in launches of enough elements."""

    def __init__(self, backend: Any, fault: Fault, few: int) -> None:
        self._backend, self._fault, self._few = backend, fault, few

    def __getattr__(self, name: str) -> Any:
        return getattr(self._backend, name)

    def step(self, rule: str, lists: TensorLists, *given: Any) -> None:
        is_large = max(map(Tensor.numel, lists.main), default=0) > self._few
        after = self._fault(lists) if is_large else lambda: None
        self._backend.step(rule, lists, *given)
        after()


@contextmanager
def faulty(fault: Fault, few: int = 0) -> Iterator[None]:
    """Make the first run of each element-wise launch in the block wrong.

    Args:
        few: largest number of elements for which a launch stays right.
    """
    apply = ElementRule.apply

    def wrong(rule: ElementRule, launch: Launch, backend: Any) -> None:
        apply(rule, launch, _Faulty(backend, fault, few))

    ElementRule.apply = wrong  # type: ignore[method-assign]
    try:
        yield
    finally:
        ElementRule.apply = apply  # type: ignore[method-assign]
