"""Functions of verl, SkyRL and AReaL that move optimizer state away and back around a rollout."""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

Helper = Callable[[Any, torch.device], None]


def _states(optimizer: Any) -> Iterator[dict[str, Any]]:
    if not optimizer.state:
        return
    for group in optimizer.param_groups:
        for param in group["params"]:
            yield optimizer.state[param]


def all_to(optimizer: Any, device: torch.device) -> None:
    for state in _states(optimizer):
        for key, value in state.items():
            if isinstance(value, Tensor):
                state[key] = value.to(device, non_blocking=True)


def again_to(optimizer: Any, device: torch.device) -> None:
    all_to(optimizer, device)
    for param in list(optimizer.state):
        moved = {key: value.to(device) for key, value in optimizer.state[param].items()}
        optimizer.state[param] = moved


def local_to(optimizer: Any, device: torch.device) -> None:
    for state in _states(optimizer):
        for key in ("exp_avg", "exp_avg_sq"):
            value = state.get(key)
            if value is None:
                continue
            local = value.to_local() if isinstance(value, DTensor) else value
            if local.device.type != device.type:
                state[key] = local.to(device)


HELPERS: dict[str, Helper] = {"verl": all_to, "skyrl": again_to, "areal": local_to}
