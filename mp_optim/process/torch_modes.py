"""The modes of torch that a caller may be in, and none of which may show in what the package makes.

A state tensor allocated inside ``torch.inference_mode()`` could never be stepped outside of it, and
one that autograd sees would keep a graph alive.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, ParamSpec, TypeVar

import torch

P = ParamSpec("P")
T = TypeVar("T")


def in_own_modes(function: Callable[P, T]) -> Callable[P, T]:
    """Run a door of the package without autograd and outside of inference mode, whatever its caller
    is in."""

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        had_grad = torch.is_grad_enabled()
        # by hand: an interrupt in the wrong place would make no_grad() leave autograd off for good
        try:
            if torch.is_inference_mode_enabled():
                # leaving inference mode turns autograd on
                with torch.inference_mode(False), torch.no_grad():
                    return function(*args, **kwargs)
            torch._C._set_grad_enabled(False)
            return function(*args, **kwargs)
        finally:
            torch._C._set_grad_enabled(had_grad)

    return call


def without_autocast(device: torch.device) -> AbstractContextManager[Any]:
    """A context in which products on a device keep the dtype of their factors."""
    if device.type == "meta" or not torch.is_autocast_enabled(device.type):
        return nullcontext()
    return torch.autocast(device.type, enabled=False)
