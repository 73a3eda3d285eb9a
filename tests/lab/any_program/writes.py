"""Writes to parameters and state by other code."""

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
    drawn = random_values(seed, slot.shape, slot.dtype).reshape(-1)
    if kind == "same":
        return as_values(subject.model.param(slot.name))
    if kind in _SPECIAL and drawn.size:
        drawn[seed % drawn.size :: 3] = _SPECIAL[kind]
    if kind == "fine":  # more bits than 16, where the parameter has them
        drawn = drawn + F(2.0**-20)
    return as_values(as_tensor(drawn, slot.shape, slot.dtype))


def replace(subject: Subject, slot: Slot, fresh: Tensor, how: str) -> None:
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


WRITERS = ("copy", "foreach", "set", "view", "data", "data =", "storage", "dlpack", "numpy")


def write(param: nn.Parameter, fresh: Tensor, how: str) -> None:
    """Write values, with a trace (a count of writes, other memory) or without."""
    if how == "data =":
        param.data = fresh
        return
    with torch.no_grad():
        if how == "data":
            param.data.copy_(fresh)
        elif how == "dlpack":
            torch.from_dlpack(param.detach()).copy_(fresh)
        elif how == "numpy":
            _bits(param).numpy()[...] = _bits(fresh.expand_as(param)).numpy()
        elif how == "storage":
            memory = torch.empty(0, dtype=param.dtype)
            memory.set_(
                param.untyped_storage(), param.storage_offset(), param.shape, param.stride()
            )
            memory.copy_(fresh)
        elif how == "foreach":
            torch._foreach_copy_([param], [fresh])
        elif how == "set":
            param.set_(fresh)  # type: ignore[call-overload]
        elif how == "view":
            param[...].view_as(param).copy_(fresh)
        else:
            param.copy_(fresh)


def turn(subject: Subject, slot: Slot) -> Any:
    param = subject.model.param(slot.name)
    need(param.dim() == 2 and param.shape[0] == param.shape[1] > 1)
    param.data = param.data.t()
    return as_values(param)


def _bits(tensor: Tensor) -> Tensor:
    """Return a view as integers: NumPy has no bfloat16."""
    return tensor.detach().view(torch.int32 if tensor.itemsize == 4 else torch.int16)


# -- state ----------------------------------------------------------------------------------------

OF_STATE = ("mul", "zero", "copy", "index", "data", "set", "swap", "data.mul")
RESETS = ("clear", "assign", "delete", "pop", "empty", "clear one")


def of_moment(now: Any, how: str, seed: int, dtype: torch.dtype) -> Any:
    if how in ("mul", "data.mul"):
        values = now * F(0.5)
    elif how == "zero":
        values = np.zeros_like(now)
    elif how == "index":
        values = now.copy()
        values[seed % now.size] = F(0.25)
    else:
        values = np.random.RandomState(seed).rand(now.size).astype(F)
    return as_values(torch.from_numpy(values).to(dtype))


def write_state(tensor: Tensor, values: Any, how: str) -> None:
    """Have a moment take values, in one of the ways ``OF_STATE``."""
    fresh = torch.from_numpy(values.copy()).to(tensor.dtype).view(tensor.shape)
    with torch.no_grad():
        if how == "mul":
            tensor.mul_(0.5)
        elif how == "zero":
            tensor.zero_()
        elif how == "data.mul":
            tensor.data.mul_(0.5)
        elif how == "index":
            tensor.view(-1)[...] = fresh.view(-1)
        elif how == "data":
            tensor.data = fresh
        elif how == "set":
            tensor.set_(fresh)  # type: ignore[call-overload]
        elif how == "swap":
            torch.utils.swap_tensors(tensor, fresh)
        else:
            tensor.copy_(fresh)


def reset(subject: Subject, slot: Slot, how: str) -> bool:
    """Take state away; returns whether that of all parameters."""
    optimizer, param = subject.optimizer, subject.model.param(slot.name)
    if how == "clear":
        optimizer.state.clear()
    elif how == "assign":
        optimizer.state = {}
    elif how == "delete":
        del optimizer.state[param]
    elif how == "pop":
        optimizer.state.pop(param)
    elif how == "empty":
        optimizer.state[param] = {}
    else:
        optimizer.state[param].clear()
    return how in ("clear", "assign")
