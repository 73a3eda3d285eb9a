"""What the ranks of a distributed optimizer have to agree on, line by line."""

from __future__ import annotations

from collections.abc import Sequence

from mp_optim.config import OptimizerConfig
from mp_optim.precision.settings_agreement import of_config, of_groups
from mp_optim.slots import ParamGroups, Slot, iter_slots, slot_name
from mp_optim.slots.param_attributes import norm_attributes


def of_construction(
    config: OptimizerConfig, groups: ParamGroups, in_forward: Sequence[Slot]
) -> list[str]:
    """Config, parameters and settings.

    Args:
        in_forward: the trained ones, in the order in which forward is expected to use them.
    """
    lines = of_config(config)
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
    return lines + of_groups(groups)


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
    return [*of_groups(groups), f"step {step}", *said, passes]
