"""Writes to a model's parameters by somebody else: other values, other tensors."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from lab.any_program.arithmetic import F
from lab.any_program.oracle import Slot
from lab.any_program.subject import Subject, as_tensor, as_values, need, random_values

VALUES = ("random", "same", "zero", "one", "nan", "inf", "subnormal", "fine")
WAYS = ("data", "parameter", "swap")

_SPECIAL = {"zero": 0.0, "one": 1.0, "nan": np.nan, "inf": np.inf, "subnormal": 1e-41}


def values(subject: Subject, slot: Slot, kind: str, seed: int) -> Any:
    """Values that somebody else writes, of the parameter's dtype."""
    drawn = random_values(seed, slot.shape, slot.dtype).reshape(-1)
    if kind == "same":
        return as_values(subject.model.param(slot.name))
    if kind in _SPECIAL and drawn.size:
        drawn[seed % drawn.size :: 3] = _SPECIAL[kind]
    if kind == "fine":  # more bits than 16, where the parameter has them
        drawn = drawn + F(2.0**-20)
    return as_values(as_tensor(drawn, slot.shape, slot.dtype))


def replace(subject: Subject, slot: Slot, fresh: Tensor, how: str) -> None:
    """Another tensor where a slot's parameter was."""
    param = subject.model.param(slot.name)
    if how == "data":
        param.data = fresh
        return
    new = nn.Parameter(fresh, requires_grad=param.requires_grad)
    if how == "parameter":
        group, position = subject.place_of(slot.name)
        group["params"][position] = new
        subject.model.add(slot.name, new)
        return
    try:
        torch.utils.swap_tensors(param, new)
    except RuntimeError:  # torch refuses while something else refers to the tensor
        need(False)


TRACED = ("copy", "foreach", "set", "view")


def write(param: nn.Parameter, fresh: Tensor, how: str) -> None:
    """Write values where that leaves a trace."""
    with torch.no_grad():
        if how == "foreach":
            torch._foreach_copy_([param], [fresh])
        elif how == "set":
            param.set_(fresh)  # type: ignore[call-overload]
        elif how == "view":
            param[...].view_as(param).copy_(fresh)
        else:
            param.copy_(fresh)


def turn(subject: Subject, slot: Slot) -> Any:
    """The same memory read by columns; returns the values that the parameter has then."""
    param = subject.model.param(slot.name)
    need(param.dim() == 2 and param.shape[0] == param.shape[1] > 1)
    param.data = param.data.t()
    return as_values(param)


def write_untraced(subject: Subject, slot: Slot, written: Any, moved: bool) -> None:
    """Write through ``.data``."""
    param = subject.model.param(slot.name)
    fresh = as_tensor(written, slot.shape, slot.dtype)
    if moved:
        param.data = fresh
    else:
        param.data.copy_(fresh)
