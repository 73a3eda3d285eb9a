"""State of ``--ckpt-format torch``.

The state dict has the state that is equal on every data-parallel rank. The first data-parallel rank
writes sharded state into a separate file.

State of Megatron's Float16 optimizer is read, too: FP32 copies and moments by position in its param
groups. Megatron identifies saved param groups by their settings, not by their order.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from mp_optim.apps.convert.formats import from_megatron
from mp_optim.apps.convert.state import import_state
from mp_optim.core import Slot, param_at
from mp_optim.core.flat_shard import FlatShard
from mp_optim.core.slot_state import State
from mp_optim.core.state_dict import plain_groups
from mp_optim.host.accelerator import CUDA
from mp_optim.mixed_precision import MegatronOptimizer
from mp_optim.zero.zero import DistributedOptimizer

APART = "parameter_state_apart"
"""Key in a state dict without state tensors. A file of :func:`save_parameter_state` has the
tensors."""
_FORMAT = "mp_optim parameter state 1"


# -- state that is sharded over data-parallel ranks


def save_parameter_state(stack: MegatronOptimizer, filename: str) -> None:
    """Write the state of all slots, whole and in FP32.

    The call is collective over each part's data-parallel ranks. A rank that is the first
    data-parallel rank of a part writes ``filename``.
    """
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
    """Load files of :func:`save_parameter_state`, on any number of data-parallel ranks.

    The first data-parallel rank of each part reads ``filename``, and sends each other rank the
    elements of that rank.

    Raises:
        ValueError: the file is not from :func:`save_parameter_state`, or does not match this
            optimizer; no state was loaded.
    """
    parts: list[dict[str, State] | None] = [None] * len(stack.chained_optimizers)
    if any(map(_is_first, stack.chained_optimizers)):
        saved = torch.load(filename, map_location="cpu", mmap=True, weights_only=True)
        if not isinstance(saved, dict) or saved.get("format") != _FORMAT:
            raise ValueError(
                f"{filename} has no state of this package. If Megatron's own distributed optimizer "
                "wrote the file, load the file with Megatron's optimizer, save with --ckpt-format "
                "torch_dist --dist-ckpt-optim-fully-reshardable, and load the result"
            )
        parts = saved["parts"]
    state: dict[int, State] = {}
    for part, named in zip(stack.chained_optimizers, parts, strict=True):
        group = part.process_groups.dp if isinstance(part, DistributedOptimizer) else None
        for slot in part.slots():
            sent: list[Any] = [None if named is None else named.get(part.slot_name(slot), {})]
            if group is not None and group.size() > 1:
                dist.broadcast_object_list(sent, dist.get_global_rank(group, 0), group=group)
            state[len(state)] = own = dict(sent[0])
            if (shard := flat_shard_of(part.slot_state(slot))) is None:
                continue
            stop = shard.start + shard.local.numel()
            for key, value in own.items():
                if isinstance(value, Tensor) and value.shape == shard.shape and key != "step":
                    elements = value.reshape(-1)[shard.start : stop].clone()
                    own[key] = FlatShard(elements, shard.shape, shard.start)
    plain = {"state": state, "param_groups": plain_groups(stack.param_groups)}
    if stack.grad_scaler is not None:
        plain["grad_scaler"] = stack.grad_scaler.state_dict()
    stack.load_state_dict(plain)


def _is_first(part: MegatronOptimizer) -> bool:
    group = part.process_groups.dp if isinstance(part, DistributedOptimizer) else None
    return group is None or group.rank() == 0


# -- state dicts of Megatron's Float16 optimizer


def load_positional(
    stack: MegatronOptimizer, saved: Sequence[Mapping[str, Any]], *, convert: bool = False
) -> None:
    """Load state that was saved by position, and saved group settings, into a stack over the same
    parameters.

    Args:
        stack: the stack to load into.
        saved: the state dict of each part of a chain, or of the only optimizer.
        convert: True to round state to the dtypes configured here, even if bits are lost.

    Raises:
        ValueError: parts, param groups or shapes do not match; no state was loaded.
    """
    parts = [part for part in stack.chained_optimizers if not part.is_stub_optimizer]
    if len(saved) != len(parts):
        raise ValueError(
            f"the state dict has the state of {len(saved)} chained optimizers, but this chain has "
            f"{len(parts)}; use as many expert-parallel ranks as in the save with --ckpt-format "
            "torch, or save with --ckpt-format torch_dist"
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
    """Yield the names of a part's parameters in the order of the saved groups."""
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
                f"no param group matches the saved group of {count} parameters with "
                f"wd_mult={group.get('wd_mult')!r}, lr_mult={group.get('lr_mult')!r}; pass the "
                "model and the config_overrides of the saved run"
            )
        del left[alike[0]]
        for position in range(count):
            yield part.slot_name(Slot(alike[0], position))


SavedSettings = dict[str, Any]
Range = tuple[int, int]
"""First element of a flattened parameter on a rank, and the number of its elements."""

REQUEST = "mp_optim_request"
"""Key in a state dict for ``dist_checkpointing.load``: the arguments of the request."""
_KIND = ("wd_mult", "lr_mult", "is_expert_parallel", "is_decoupled_lr")
"""Settings that distinguish groups in every version of Megatron."""
_OF_THIS_RANK = ("params", "param_names", "param_checksums", "fqns")
_NOT_IDENTITY = ("lr", "weight_decay", "step", *_OF_THIS_RANK)
"""Settings that change during training or differ between ranks, so they do not identify a param
group."""


# -- settings of param groups


def group_settings_of(part: MegatronOptimizer) -> list[SavedSettings]:
    """Return the settings of a part's param groups, without parameters."""
    return [
        {key: value for key, value in group.items() if key not in _OF_THIS_RANK}
        for group in plain_groups(part.param_groups)
    ]


def groups_elsewhere(stack: MegatronOptimizer) -> list[list[SavedSettings]]:
    """Return for each part the param groups that only other ranks have, such as experts of another
    pipeline stage.

    The call is collective over all processes, as Megatron's factory is.
    """
    here = [group_settings_of(part) for part in stack.chained_optimizers]
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return [[] for _ in here]
    everywhere: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everywhere, here)
    elsewhere: list[list[SavedSettings]] = []
    for index, groups in enumerate(here):
        known, others = [_identity(group) for group in groups], []
        of_ranks = (of_rank[index] for of_rank in everywhere if index < len(of_rank))
        for group in chain.from_iterable(of_ranks):
            identity = _identity(group)
            # A rank without parameters has a group without settings, which no checkpoint needs.
            if identity not in known and all(key in group for key in _KIND):
                known.append(identity)
                others.append(group)
        elsewhere.append(others)
    return elsewhere


def groups_with_settings(
    stack: MegatronOptimizer, saved: Sequence[Mapping[str, Any]]
) -> list[SavedSettings]:
    """Return the stack's groups, each with the settings of the matching saved group."""
    groups = plain_groups(stack.param_groups)
    for group in groups:
        if group["params"]:
            group.update(matched_settings(group, saved))
    return groups


def matched_settings(live: SavedSettings, saved: Sequence[Mapping[str, Any]]) -> SavedSettings:
    """Return the settings of the saved param group that matches a param group: the most similar
    saved group with equal multipliers of learning rate and weight decay.

    Experts have separate groups only in some layouts. So a dense group may match a group of experts
    if no dense group was saved, and a group of experts may match a dense group if no group of
    experts was saved.

    Raises:
        ValueError: no such group was saved, or two saved groups are equally similar and have
            different settings; the message names the settings.
    """
    wanted = _identity(live).items()
    kind: list[Mapping[str, Any]] = []
    for keys in (_KIND, [key for key in _KIND if key != "is_expert_parallel"]):
        alike = (group for group in saved if kind_of(group, keys) == kind_of(live, keys))
        kind = kind or list(alike)
    if not kind:
        raise ValueError(
            f"config_overrides: no saved param group matches a group with {_kind_in_words(live)}; "
            f"the saved groups have {'; '.join(map(_kind_in_words, saved)) or 'no settings'}; pass "
            "the config_overrides of the saved run"
        )
    # With Muon, Megatron writes the optimizer's name only into groups of the scalar optimizer, so a
    # group without a name is Muon's.
    if "optimizer" in live:
        rule = live["optimizer"]
        kind = [group for group in kind if group.get("optimizer", "muon") == rule] or kind
    likeness = []
    for identity in map(_identity, kind):
        likeness.append(sum(identity.get(key) == value for key, value in wanted))
    best = [group for group, like in zip(kind, likeness, strict=True) if like == max(likeness)]
    shared = live.keys() - set(_OF_THIS_RANK)
    taken = [{key: group[key] for key in shared & group.keys()} for group in best]
    if any(settings != taken[0] for settings in taken[1:]):
        raise ValueError(
            f"config_overrides: {len(best)} saved param groups match a group with "
            f"{_kind_in_words(live)} equally well, but have different settings; pass the "
            "config_overrides of the saved run"
        )
    return taken[0]


def _identity(group: Mapping[str, Any]) -> SavedSettings:
    settings = {key: value for key, value in group.items() if key not in _NOT_IDENTITY}
    for key, value in settings.items():
        if isinstance(value, list):
            settings[key] = tuple(value)
    return settings


def kind_of(group: Mapping[str, Any], keys: Sequence[str] = _KIND) -> tuple[Any, ...]:
    """Return the settings that distinguish groups. NeMo keeps some settings under
    ``pre_<name>``."""
    return tuple(group.get(key, group.get(f"pre_{key}")) for key in keys)


def _kind_in_words(group: Mapping[str, Any]) -> str:
    return ", ".join(f"{key}={value!r}" for key, value in zip(_KIND, kind_of(group), strict=True))


# -- state over all data-parallel ranks


def whole_states(
    part: MegatronOptimizer, rank: int | None = None
) -> Iterator[tuple[Slot, State, bool]]:
    """Yield the state of every slot of a part that has state.

    Host tensors are copies, so that a background save may read them during later steps. The call is
    collective over the data-parallel ranks of a distributed part.

    Args:
        part: the part.
        rank: data-parallel rank that gets sharded state. None chooses, for each parameter, the rank
            with most of its elements, because most parameters are whole on one rank.

    Yields:
        ``(slot, tensors, is_only)`` for each slot. ``tensors`` has ``step``, and FP32 tensors for
        the whole parameter on this model-parallel rank; only ``step`` if another data-parallel rank
        got the tensors. ``is_only`` is True if no other data-parallel rank has the tensors.
    """
    if not isinstance(part, DistributedOptimizer):
        yield from ((slot, _copied_state(part, slot), False) for slot in part.slots())
        return
    group = part.process_groups.dp
    # The constructor of a distributed optimizer requires a data-parallel group.
    assert group is not None
    own: list[Range | None] = []
    for slot in part.slots():
        shard = flat_shard_of(part.slot_state(slot))
        own.append(None if shard is None else (shard.start, shard.local.numel()))
    ranges: list[Any] = [None] * group.size()
    dist.all_gather_object(ranges, own, group=group)
    for slot, *of_ranks in zip(part.slots(), *ranges, strict=True):
        state = _copied_state(part, slot)
        if any(of_rank is None for of_rank in of_ranks):
            # Every rank steps the whole parameter, so any rank can save the state.
            yield slot, state, False
            continue
        counts = [count for _, count in of_ranks]
        receiver = counts.index(max(counts)) if rank is None else rank
        shards = {key: value for key, value in state.items() if isinstance(value, FlatShard)}
        whole = {key: value for key, value in state.items() if key not in shards}
        is_here, holders = group.rank() == receiver, [count for count in counts if count]
        gathered: list[Tensor] = []
        if len(holders) > 1 or (holders and not counts[receiver]):
            gathered = _gather(list(shards.values()), of_ranks, receiver, group)
        elif is_here:
            gathered = [shard.local.view(shard.shape) for shard in shards.values()]
        if is_here:
            whole |= zip(shards, gathered, strict=True)
        yield slot, whole, True


def flat_shard_of(state: State) -> FlatShard | None:
    """Return a state tensor of which this rank has only some elements; None if this rank has the
    whole state."""
    return next((value for value in state.values() if isinstance(value, FlatShard)), None)


def _copied_state(part: MegatronOptimizer, slot: Slot) -> State:
    """Return a slot's state in FP32, with copies of host tensors.

    Background saves of Megatron copy only tensors on accelerators, so host tensors are copied here.
    """
    state = dict(part.full_slot_state(slot))
    for key, value in state.items():
        if isinstance(value, Tensor) and value.device.type == "cpu":
            state[key] = value.detach().clone()
    return state


def _gather(
    shards: Sequence[FlatShard], ranges: Sequence[Range], rank: int, group: ProcessGroup
) -> list[Tensor]:
    """Return whole tensors, joined from the shards of one parameter, on ``rank``; an empty list on
    the other ranks."""
    is_nccl = "nccl" in str(dist.get_backend(group))
    device = CUDA.current() if is_nccl else torch.device("cpu")
    largest = max(count for _, count in ranges)
    sent = torch.zeros(len(shards), largest, dtype=torch.float32, device=device)
    for row, shard in zip(sent, shards, strict=True):
        row[: shard.local.numel()].copy_(shard.local)
    is_here = group.rank() == rank
    received = [torch.empty_like(sent) for _ in ranges] if is_here else None
    dist.gather(sent, received, dist.get_global_rank(group, rank), group=group)
    if received is None:
        return []
    wholes = []
    for row, shard in enumerate(shards):
        whole = torch.empty(shard.shape.numel(), dtype=torch.float32, device=shard.device)
        for (start, count), of_rank in zip(ranges, received, strict=True):
            whole[start : start + count].copy_(of_rank[row, :count])
        wholes.append(whole.view(shard.shape))
    return wholes
