"""State of ``--ckpt-format torch``: what every data-parallel rank has alike in the state dict, and
the state that these ranks share out in a file of its own, written by the first of them.

What Megatron's Float16 optimizer saved there is read, too: FP32 copies and moments by position in
its param groups.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from mp_optim.checkpoint.foreign.formats import from_megatron
from mp_optim.checkpoint.foreign.state import import_state
from mp_optim.checkpoint.shards import FlatShard
from mp_optim.distributed.optimizer import DistributedOptimizer
from mp_optim.megatron.saved_parts import (
    flat_shard_of,
    group_settings_of,
    groups_with_settings,
    kind_of,
    matched_settings,
    whole_states,
)
from mp_optim.precision import MegatronOptimizer
from mp_optim.slots import Slot, param_at
from mp_optim.slots.slot_state import State
from mp_optim.slots.state_dict import plain_groups

APART = "parameter_state_apart"
"""Marks a state dict whose state is in a file of :func:`save_parameter_state`."""
_FORMAT = "mp_optim parameter state 1"


# -- state that data-parallel ranks share out


def alike_state_dict(stack: MegatronOptimizer) -> dict[str, Any]:
    """A stack's state dict; of one that data-parallel ranks share out, what all of them have alike:
    settings and loss scale."""
    parts = stack.chained_optimizers
    if not any(isinstance(part, DistributedOptimizer) for part in parts):
        return stack.state_dict()
    groups = [group for part in parts for group in group_settings_of(part)]
    common: dict[str, Any] = {APART: True, "param_groups": groups}
    if stack.grad_scaler is not None:
        common["grad_scaler"] = stack.grad_scaler.state_dict()
    return common


def load_common(stack: MegatronOptimizer, common: Mapping[str, Any]) -> None:
    """Load what :func:`alike_state_dict` made of a distributed stack; state stays as it is.

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
        for slot, state, _ in whole_states(part, 0):
            named[part.slot_name(slot)] = state
        states.append(named if _is_first(part) else None)
    if any(of_part is not None for of_part in states):
        partial = f"{filename}.partial"
        torch.save({"format": _FORMAT, "parts": states}, partial)
        os.replace(partial, filename)


def load_parameter_state(stack: MegatronOptimizer, filename: str) -> None:
    """Load what :func:`save_parameter_state` wrote, in any number of data-parallel ranks. Each
    part's first rank reads its file and hands the others their elements.

    Raises:
        ValueError: it is another file, or does not fit this optimizer; nothing was loaded.
    """
    parts: list[dict[str, State] | None] = [None] * len(stack.chained_optimizers)
    if any(map(_is_first, stack.chained_optimizers)):
        parts = _read(filename)
    state: dict[int, State] = {}
    for part, named in zip(stack.chained_optimizers, parts, strict=True):
        group = part.process_groups.dp if isinstance(part, DistributedOptimizer) else None
        for slot in part.slots():
            sent: list[Any] = [None if named is None else named.get(part.slot_name(slot), {})]
            if group is not None and group.size() > 1:
                dist.broadcast_object_list(sent, dist.get_global_rank(group, 0), group=group)
            state[len(state)] = _own_elements(part, slot, sent[0])
    plain = {"state": state, "param_groups": plain_groups(stack.param_groups)}
    if stack.grad_scaler is not None:
        plain["grad_scaler"] = stack.grad_scaler.state_dict()
    stack.load_state_dict(plain)


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


def _own_elements(part: MegatronOptimizer, slot: Slot, whole: State) -> State:
    shard = flat_shard_of(part.slot_state(slot))
    if shard is None:
        return whole
    stop = shard.start + shard.local.numel()
    own: State = dict(whole)
    for key, value in whole.items():
        if isinstance(value, torch.Tensor) and value.shape == shard.shape and key != "step":
            elements = value.reshape(-1)[shard.start : stop].clone()
            own[key] = FlatShard(elements, shard.shape, shard.start)
    return own


# -- what Megatron's Float16 optimizer saved


def load_positional(
    stack: MegatronOptimizer, saved: Sequence[Mapping[str, Any]], *, convert: bool = False
) -> None:
    """Load it into a stack over the same parameters, with the settings of its param groups.

    Args:
        saved: the state dict of each part of a chain, or of the only optimizer.
        convert: round state to the dtypes configured here also where that loses bits.

    Raises:
        ValueError: parts, param groups or shapes do not fit; nothing was loaded.
    """
    parts = [part for part in stack.chained_optimizers if not part.is_stub_optimizer]
    if len(saved) != len(parts):
        raise ValueError(
            f"the state dict has {len(saved)} parts, this optimizer {len(parts)}: expert-parallel "
            "ranks are as many as when it was saved with --ckpt-format torch, or save with "
            "--ckpt-format torch_dist"
        )
    names: list[str] = []
    for part, of_part in zip(parts, saved, strict=True):
        names += _names(part, of_part["optimizer"]["param_groups"])
    groups = [group for part in saved for group in part["optimizer"]["param_groups"]]
    live = [group for group in stack.param_groups if group["params"]]
    settings = [matched_settings(group, groups) for group in live]
    without_copy = []
    for slot in stack.slots():
        if param_at(stack.param_groups, slot).dtype == torch.float32:
            without_copy.append(stack.slot_name(slot))
    foreign = from_megatron(saved, names, fp32_names=without_copy)
    import_state(stack, foreign, convert=convert)
    for group, of_group in zip(live, settings, strict=True):
        group.update(of_group)


def _names(part: MegatronOptimizer, saved: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Names of a part's parameters in the order of the saved groups."""
    left = {index: group for index, group in enumerate(part.param_groups) if group["params"]}
    for group in saved:
        count = len(group["params"])
        if not count:
            continue
        alike = [
            index
            for index, live in left.items()
            if len(live["params"]) == count and kind_of(live) == kind_of(group)
        ]
        if not alike:
            raise ValueError(
                f"no param group here is like the saved one of {count} parameters with "
                f"wd_mult={group.get('wd_mult')!r}, lr_mult={group.get('lr_mult')!r}: the model "
                "or its overrides were others"
            )
        del left[alike[0]]
        for position in range(count):
            yield part.slot_name(Slot(alike[0], position))
