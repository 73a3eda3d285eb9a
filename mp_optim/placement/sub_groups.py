"""What the optimizer of each place is given of a group, and told of it before a step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor
from torch.distributed.tensor import DTensor

from mp_optim.slots import ParamGroups, group_settings, local_tensor
from mp_optim.slots.optimizer import SlotOptimizer
from mp_optim.slots.param_attributes import set_shard_info, shard_info


def sub_group(group: dict[str, Any], positions: Sequence[int]) -> dict[str, Any]:
    """A group as the optimizer that steps the parameters at some positions is given it."""
    sub = _settings(group)
    sub["params"] = [_local_part(group["params"][position]) for position in positions]
    if names := group.get("param_names"):
        sub["fqns"] = [names[position] for position in positions]
    return sub


def adopt_defaults(groups: ParamGroups, subs: Sequence[SlotOptimizer]) -> None:
    """Show the hyperparameters that the two sub-optimizers filled in, so that they can be changed.

    Raises:
        ValueError: the two classes' defaults differ, so that a parameter's rule would depend on its
            place.
    """
    device, host = (_settings(sub.param_groups[-1]) for sub in subs)
    for key in (device.keys() & host.keys()) - groups[-1].keys():
        if device[key] != host[key]:
            raise ValueError(
                f"{key} is {device[key]!r} by default on the device and {host[key]!r} on the "
                f"host; pass {key}="
            )
    for sub in subs:
        for group, of_sub in zip(groups, sub.param_groups, strict=True):
            for key, value in _settings(of_sub).items():
                group.setdefault(key, value)


def _settings(group: dict[str, Any]) -> dict[str, Any]:
    """Hyperparameters; the names of a sub-optimizer's parameters are its own."""
    return {key: value for key, value in group_settings(group).items() if key != "fqns"}


def _local_part(param: Tensor) -> Tensor:
    """What a rank has of a parameter, which still says what part of it that is."""
    local = local_tensor(param)
    if not isinstance(param, DTensor):
        set_shard_info(local, shard_info(param))
    return local
