"""Copies of all tensors and settings of a model and its optimizer, to compare bits."""

from typing import Any

import torch
from torch import Tensor, nn

from support.layouts import local


def _bits(value: Any) -> Any:
    if not isinstance(value, Tensor):
        return value
    held = local(value).contiguous()
    return held.dtype, tuple(held.shape), held.view(-1).view(torch.uint8).numpy().tobytes()


def print_of(model: nn.Module, optimizer: Any) -> dict[str, Any]:
    saved = optimizer.state_dict()
    found = {f"model.{name}": _bits(value) for name, value in model.state_dict().items()}
    for index, state in saved["state"].items():
        found |= {f"{index}.{key}": _bits(value) for key, value in state.items()}
    return {**found, "settings": repr({**saved, "state": None})}


def differing(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    return [key for key in before.keys() | after.keys() if before.get(key) != after.get(key)]
