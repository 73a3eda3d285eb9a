"""The legacy ``torch`` format: what every data-parallel rank has alike in the state dict, and the
state that they share out in a file beside it, written by the first of them."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from mp_optim.checkpoint.flat import FlatShard
from mp_optim.distributed.optimizer import DistributedOptimizer
from mp_optim.megatron.loaded_state import groups_with_settings
from mp_optim.megatron.saved_groups import group_settings_of
from mp_optim.megatron.whole_params import Range, whole_states
from mp_optim.precision import MegatronOptimizer
from mp_optim.slots import Slot
from mp_optim.slots.slot_state import State
from mp_optim.slots.state_dict import plain_groups

APART = "parameter_state_apart"
"""Marks a state dict whose state is in a file of :func:`save_parameter_state`."""
_FORMAT = "mp_optim parameter state 1"


def is_shared_out(stack: MegatronOptimizer) -> bool:
    """Whether data-parallel ranks have different parts of the state."""
    return any(
        isinstance(part, DistributedOptimizer) for part in stack.chained_optimizers
    )


def is_apart(state_dict: Any) -> bool:
    """Whether :func:`common_state_dict` made this."""
    return isinstance(state_dict, Mapping) and bool(state_dict.get(APART))


def common_state_dict(stack: MegatronOptimizer) -> dict[str, Any]:
    """Settings and loss scale: what a distributed stack has alike on all data-parallel ranks."""
    parts = stack.chained_optimizers
    groups = [group for part in parts for group in group_settings_of(part)]
    common: dict[str, Any] = {APART: True, "param_groups": groups}
    if stack.grad_scaler is not None:
        common["grad_scaler"] = stack.grad_scaler.state_dict()
    return common


def load_common(stack: MegatronOptimizer, common: Mapping[str, Any]) -> None:
    """Load what :func:`common_state_dict` made; state stays as it is.

    Raises:
        ValueError: it does not fit this optimizer; nothing was loaded.
    """
    plain = stack.state_dict()
    plain["param_groups"] = groups_with_settings(stack, common["param_groups"])
    if common.get("grad_scaler"):
        plain["grad_scaler"] = common["grad_scaler"]
    stack.load_state_dict(plain)


def save_parameter_state(stack: MegatronOptimizer, filename: str) -> None:
    """Write the state of all slots, whole and in FP32. Collective over each part's data-parallel
    ranks; a rank that is the first of some part's writes the file of that name."""
    stack.step_mark.check("save_parameter_state")
    stack.init_state()
    states: list[dict[str, State] | None] = []
    for part in stack.chained_optimizers:
        named: dict[str, State] = {}
        for whole in whole_states(part, _first_rank):
            named[part.slot_name(whole.slot)] = whole.state
        states.append(named if _is_first(part) else None)
    if any(state is not None for state in states):
        partial = f"{filename}.partial"
        torch.save({"format": _FORMAT, "parts": states}, partial)
        os.replace(partial, filename)


def load_parameter_state(stack: MegatronOptimizer, filename: str) -> None:
    """Load what :func:`save_parameter_state` wrote, in any number of data-parallel ranks. Each
    part's first rank reads its file and hands the others their elements.

    Raises:
        ValueError: it is another file, or does not fit this optimizer; nothing was loaded.
    """
    first = [_is_first(part) for part in stack.chained_optimizers]
    parts = _read(filename) if any(first) else [None] * len(first)
    state: dict[int, State] = {}
    for part, named in zip(stack.chained_optimizers, parts, strict=True):
        for own in _handed_out(part, named):
            state[len(state)] = own
    plain = {"state": state, "param_groups": plain_groups(stack.param_groups)}
    if stack.grad_scaler is not None:
        plain["grad_scaler"] = stack.grad_scaler.state_dict()
    stack.load_state_dict(plain)


def _first_rank(ranges: Sequence[Range]) -> int:
    return 0


def _is_first(part: MegatronOptimizer) -> bool:
    group = part.process_groups.dp if isinstance(part, DistributedOptimizer) else None
    return group is None or group.rank() == 0


def _read(filename: str) -> list[dict[str, State] | None]:
    saved = torch.load(filename, map_location="cpu", mmap=True, weights_only=True)
    if not isinstance(saved, dict) or saved.get("format") != _FORMAT:
        raise ValueError(
            f"{filename} was not written by this optimizer: Megatron's own distributed optimizer "
            "writes its buckets there. Load it with Megatron's, save with --ckpt-format torch_dist "
            "--dist-ckpt-optim-fully-reshardable, and load that"
        )
    parts: list[dict[str, State] | None] = saved["parts"]
    return parts


def _handed_out(
    part: MegatronOptimizer, named: Mapping[str, State] | None
) -> Iterator[State]:
    """A slot's state after the other, of each what this rank has."""
    group = part.process_groups.dp if isinstance(part, DistributedOptimizer) else None
    for slot in part.slots():
        name = part.slot_name(slot)
        sent: list[Any] = [None if named is None else named.get(name, {})]
        if group is not None and group.size() > 1:
            dist.broadcast_object_list(
                sent, dist.get_global_rank(group, 0), group=group
            )
        yield _own_elements(part, slot, sent[0])


def _own_elements(part: MegatronOptimizer, slot: Slot, whole: State) -> State:
    live = part.slot_state(slot)
    shard = next(
        (value for value in live.values() if isinstance(value, FlatShard)), None
    )
    if shard is None:
        return whole
    stop = shard.start + shard.local.numel()
    own: State = {}
    for key, value in whole.items():
        is_whole = (
            isinstance(value, torch.Tensor)
            and value.shape == shard.shape
            and key != "step"
        )
        own[key] = value
        if is_whole:
            elements = value.reshape(-1)[shard.start : stop].clone()
            own[key] = FlatShard(elements, shard.shape, shard.start)
    return own
