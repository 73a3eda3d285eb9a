"""Settings of param groups as Megatron saves them: known by what they are, not by their order."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch.distributed as dist

from mp_optim.precision import MegatronOptimizer
from mp_optim.slots.state_dict import plain_groups

Settings = dict[str, Any]

_KIND = ("wd_mult", "lr_mult", "is_expert_parallel", "is_decoupled_lr")
"""Settings that tell groups apart in every version of Megatron."""
_MOVING = ("lr", "weight_decay", "step")
"""Settings that change as training goes on, and so tell nothing apart."""
_OF_THIS_RANK = ("params", "param_names", "param_checksums", "fqns")


def group_settings_of(part: MegatronOptimizer) -> list[Settings]:
    """The settings of a part's groups, without its parameters."""
    return [
        {key: value for key, value in group.items() if key not in _OF_THIS_RANK}
        for group in plain_groups(part.param_groups)
    ]


def groups_elsewhere(stack: MegatronOptimizer) -> list[list[Settings]]:
    """For each part, groups that only other ranks have (experts, say, of other pipeline stages).
    Collective over all processes, as Megatron's factory is."""
    here = [group_settings_of(part) for part in stack.chained_optimizers]
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return [[] for _ in here]
    everywhere: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everywhere, here)
    return [
        _beside(
            groups, [of_rank[index] for of_rank in everywhere if index < len(of_rank)]
        )
        for index, groups in enumerate(here)
    ]


def _beside(
    here: Sequence[Settings], everywhere: Sequence[Sequence[Settings]]
) -> list[Settings]:
    """Groups of some rank that are of no kind that is here; each once."""
    known = [_identity(group) for group in here]
    beside: list[Settings] = []
    for groups in everywhere:
        for group in groups:
            identity = _identity(group)
            if identity not in known and _has_kind(group):
                known.append(identity)
                beside.append(group)
    return beside


def _has_kind(group: Mapping[str, Any]) -> bool:
    """Whether a group was made of parameters; a rank without any has one that says nothing."""
    return all(key in group for key in _KIND)


def _identity(group: Mapping[str, Any]) -> Settings:
    """The settings that a group keeps, in a form to compare."""
    skipped = (*_MOVING, *_OF_THIS_RANK)
    return {key: _plain(value) for key, value in group.items() if key not in skipped}


def _plain(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def matched_settings(live: Settings, saved: Sequence[Mapping[str, Any]]) -> Settings:
    """The settings that a group takes from saved ones: of the group of its kind, and of those the
    one that is most like it. Experts are a kind of their own only in some layouts, so for want of
    it a dense group will do, and the other way round.

    Raises:
        ValueError: there is none of its kind, or two are as like it; naming the settings.
    """
    wanted = _identity(live).items()
    exact = [group for group in saved if _kind(group) == _kind(live)]
    kind = exact or [
        group for group in saved if _without_experts(group) == _without_experts(live)
    ]
    if not kind:
        raise ValueError(
            f"no saved param group has {_kind_in_words(live)}; saved are "
            f"{'; '.join(map(_kind_in_words, saved)) or 'none'}"
        )
    kind = [group for group in kind if _has_rule_of(group, live)] or kind
    likeness = [
        sum(_plain(group.get(key)) == value for key, value in wanted) for group in kind
    ]
    best = [
        group
        for group, like in zip(kind, likeness, strict=True)
        if like == max(likeness)
    ]
    shared = live.keys() - set(_OF_THIS_RANK)
    taken = [{key: group[key] for key in shared & group.keys()} for group in best]
    if any(settings != taken[0] for settings in taken[1:]):
        raise ValueError(
            f"{len(best)} saved param groups have {_kind_in_words(live)}, and none is more like "
            "the present one than the others"
        )
    return taken[0]


def _kind(group: Mapping[str, Any]) -> tuple[Any, ...]:
    """NeMo keeps some of them under ``pre_<name>``."""
    return tuple(group.get(key, group.get(f"pre_{key}")) for key in _KIND)


def same_kind(group: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Whether two groups have the settings that tell groups apart in common."""
    return _kind(group) == _kind(other)


def _has_rule_of(group: Mapping[str, Any], live: Mapping[str, Any]) -> bool:
    """Whether a saved group was stepped by a live one's rule: beside Muon, Megatron names only the
    scalar optimizer."""
    return (
        "optimizer" not in live or group.get("optimizer", "muon") == live["optimizer"]
    )


def _without_experts(group: Mapping[str, Any]) -> tuple[Any, ...]:
    return _kind({**group, "is_expert_parallel": None})


def _kind_in_words(group: Mapping[str, Any]) -> str:
    return ", ".join(
        f"{key}={value!r}" for key, value in zip(_KIND, _kind(group), strict=True)
    )


def saved_parts(loaded: Mapping[Any, Any]) -> Iterator[Mapping[str, Any]]:
    """Of a loaded state dict, what is saved for each part of a chain, or for the only one."""
    numbered = sorted(key for key in loaded if isinstance(key, int))
    yield from [loaded[key] for key in numbered] or [loaded]


def inner_of(part: Mapping[str, Any]) -> Mapping[str, Any]:
    """Where a part has its param groups: an FP32 optimizer has them at the top."""
    inner: Mapping[str, Any] = part.get("optimizer", part)
    return inner
