"""The modes of torch that a caller may be in, and none of which may show in what the package makes.

A state tensor allocated inside ``torch.inference_mode()`` could never be stepped outside of it, and one that autograd
sees would keep a graph alive.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, ParamSpec, TypeVar

import torch

__all__ = ["in_own_modes", "without_autocast"]

P = ParamSpec("P")
T = TypeVar("T")


def in_own_modes(function: Callable[P, T]) -> Callable[P, T]:
    """Run a door of the package without autograd and outside of inference mode, whatever its caller is in."""

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        if torch.is_inference_mode_enabled():
            with torch.inference_mode(False), torch.no_grad():  # leaving inference mode turns autograd on
                return function(*args, **kwargs)
        if torch.is_grad_enabled():
            with torch.no_grad():
                return function(*args, **kwargs)
        return function(*args, **kwargs)

    return call


def without_autocast(device: torch.device) -> AbstractContextManager[Any]:
    """A context in which products on a device keep the dtype of their factors."""
    if device.type == "meta" or not torch.is_autocast_enabled(device.type):
        return nullcontext()
    return torch.autocast(device.type, enabled=False)
