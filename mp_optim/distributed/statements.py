"""What the ranks of a distributed optimizer have to agree on, line by line."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from typing import Any

from torch import Tensor

from mp_optim.config import OptimizerConfig
from mp_optim.slots import ParamGroups, Slot, iter_slots, slot_name
from mp_optim.slots.param_attributes import norm_attributes

_OF_ONE_RANK = ("timers", "host_threads", "host_cores")
_NOT_COMPARED = ("params", "param_names")


def of_construction(
    config: OptimizerConfig, groups: ParamGroups, in_forward: Sequence[Slot]
) -> list[str]:
    """Config, settings and parameters.

    Args:
        in_forward: the trained ones, in the order in which forward is expected to use them.
    """
    lines = [
        f"{spec.name}={getattr(config, spec.name)!r}"
        for spec in fields(config)
        if spec.name not in _OF_ONE_RANK
    ]
    lines += of_settings(groups)
    for slot, param in iter_slots(groups):
        marks = norm_attributes(param)
        said = {name: str(mark) for name, mark in marks.items() if mark}
        lines.append(
            f"group {slot.group} position {slot.position}: {slot_name(groups, slot)} "
            f"{tuple(param.shape)} {param.dtype} "
            f"{'trained' if param.requires_grad else 'frozen'}{said or ''}"
        )
    for place, slot in enumerate(in_forward):
        lines.append(f"place {place} in forward: {slot_name(groups, slot)}")
    return lines


def of_settings(groups: ParamGroups) -> list[str]:
    """Each group's hyperparameters."""
    return [f"group {index}: {_settings(group)}" for index, group in enumerate(groups)]


def of_step(
    groups: ParamGroups, step: int, rounds: int, frozen: Sequence[Slot]
) -> list[str]:
    """What may differ from step to step.

    Args:
        step: its number. rounds: backward passes that were reduced for it.
        frozen: parameters that were trained when the optimizer was built, and are not now.
    """
    names = (slot_name(groups, slot) for slot in frozen)
    said = (f"{name} was frozen since the optimizer was built" for name in names)
    passes = f"gradients of {rounds} backward passes reduced since zero_grad()"
    return [*of_settings(groups), f"step {step}", *said, passes]


def _settings(group: dict[str, Any]) -> str:
    compared = ((key, group[key]) for key in sorted(group) if key not in _NOT_COMPARED)
    return ", ".join(f"{key}={_plain(value)!r}" for key, value in compared)


def _plain(value: Any) -> Any:
    return value.tolist() if isinstance(value, Tensor) else value
