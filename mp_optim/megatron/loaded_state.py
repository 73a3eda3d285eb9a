"""What ``dist_checkpointing.load`` returned, as the plain state dict that every stack of ours
loads: checked as a whole before anything is written."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from mp_optim.megatron.bucket_space import as_shard
from mp_optim.megatron.requested import REQUEST
from mp_optim.megatron.saved_groups import (
    Settings,
    inner_of,
    matched_settings,
    saved_parts,
)
from mp_optim.megatron.sharded import MAINS, STATE
from mp_optim.precision import MegatronOptimizer
from mp_optim.slots.slot_state import State
from mp_optim.slots.state_dict import plain_groups
from mp_optim.slots.state_keys import MASTER


def is_loaded(state_dict: Any) -> bool:
    """Whether this is an answer to a request of ours."""
    return isinstance(state_dict, Mapping) and REQUEST in state_dict


def plain_state_dict(
    stack: MegatronOptimizer, loaded: Mapping[Any, Any]
) -> dict[str, Any]:
    """A state dict for the stack's ``load_state_dict``.

    Raises:
        ValueError: param groups do not match, or nothing says how many steps were taken.
    """
    parts = list(saved_parts(loaded))
    request = loaded[REQUEST]
    step = torch.tensor(_step(parts), dtype=torch.float32, device="cpu")
    state: dict[int, State] = {}
    for index, slot in enumerate(stack.slots()):
        if "step" not in stack.slot_state(slot):
            continue  # never trained
        tensors = dict(loaded.get(STATE, {}).get(index, {}))
        for main in MAINS & tensors.keys():
            tensors[MASTER] = tensors.pop(main)
        if request["in_buckets"]:
            live = stack.full_slot_state(slot)
            del live["step"]
            tensors = {
                key: as_shard(value, tensors.get(key)) for key, value in live.items()
            }
        state[index] = {"step": step.clone(), **tensors}
    plain = {
        "state": state,
        "param_groups": groups_with_settings(stack, list(_groups(parts))),
    }
    scalers = [part["grad_scaler"] for part in parts if part.get("grad_scaler")]
    return {**plain, "grad_scaler": scalers[0]} if scalers else plain


def groups_with_settings(
    stack: MegatronOptimizer, saved: Sequence[Mapping[str, Any]]
) -> list[Settings]:
    """The stack's groups, each with the settings of the saved one that is of its kind."""
    groups = plain_groups(stack.param_groups)
    for group in groups:
        if group["params"]:
            group.update(matched_settings(group, saved))
    return groups


def _groups(parts: Sequence[Mapping[str, Any]]) -> Iterator[Mapping[str, Any]]:
    for part in parts:
        yield from inner_of(part).get("param_groups", ())


def _step(parts: Sequence[Mapping[str, Any]]) -> float:
    """The steps taken: Megatron says so in one of two places, and for optimizers that need no
    number in none, which is taken as 1."""
    for part in parts:
        common = inner_of(part).get("state", {}).get("common_step")
        if common is not None:
            return float(common)
    steps = [group["step"] for group in _groups(parts) if group.get("step") is not None]
    return float(max(steps, default=1))
