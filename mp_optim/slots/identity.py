"""Slots: a parameter's identity is its place in the param groups, never the tensor that sits there.

Wrappers replace tensors (a mixed-precision wrapper, FSDP2, tensor parallelism); the pair
``(group, position)`` outlives all of that. Everything in this package that has to be found again
later is found by slot.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Sequence
from itertools import chain
from operator import itemgetter
from typing import Any, NamedTuple

from torch import Tensor

ParamGroups = list[dict[str, Any]]


class Slot(NamedTuple):
    """The identity of a parameter: index of its param group, position inside that group."""

    group: int
    position: int


def iter_slots(param_groups: ParamGroups) -> Iterator[tuple[Slot, Tensor]]:
    """Every slot with the tensor that sits there now, in group order."""
    for index, group in enumerate(param_groups):
        for position, param in enumerate(group["params"]):
            yield Slot(index, position), param


def all_params(param_groups: ParamGroups) -> list[Tensor]:
    """The tensors that sit at the slots now, in slot order."""
    return [*chain.from_iterable(map(itemgetter("params"), param_groups))]


def param_at(param_groups: ParamGroups, slot: Slot) -> Tensor:
    """The tensor that sits at a slot now."""
    param: Tensor = param_groups[slot.group]["params"][slot.position]
    return param


def group_settings(group: dict[str, Any]) -> dict[str, Any]:
    """A group's hyperparameters: all that is not its parameters and their names."""
    return {key: group[key] for key in group if key not in ("params", "param_names")}


def with_names(group: dict[str, Any]) -> dict[str, Any]:
    """A copy of a group in the form torch takes names in: ``params`` as (name, tensor) pairs."""
    plain = {key: value for key, value in group.items() if key != "param_names"}
    names = group.get("param_names")
    if names is not None:
        plain["params"] = zip(names, group["params"], strict=True)
    return {**plain, "params": list(plain["params"])}


def has_names(group: dict[str, Any]) -> bool:
    """Whether a group's parameters have names, or :func:`slot_name` makes some up."""
    return bool(group.get("param_names") or group.get("fqns"))


def slot_name(param_groups: ParamGroups, slot: Slot) -> str:
    """The FQN of a slot if its group carries ``param_names`` (or ``fqns``: torch forbids the former
    in a group without parameters, which executors may have), else ``group<g>.param<i>``."""
    group = param_groups[slot.group]
    names: Sequence[str] | None = group.get("param_names") or group.get("fqns")
    return names[slot.position] if names else f"group{slot.group}.param{slot.position}"


def stream_of(name: str, first_element: int = 0) -> int:
    """The stream of random numbers of a parameter, from its name and the place of its first local
    element."""
    return zlib.crc32(name.encode()) | first_element << 32
