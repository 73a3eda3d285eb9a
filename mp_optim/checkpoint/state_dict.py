"""Plain functions that turn live param groups into plain data and match saved ones to live ones."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from mp_optim.names import matched_names
from mp_optim.slots import ParamGroups, Slot, iter_slots, slot_name

__all__ = ["GroupMatch", "match_groups", "plain_groups"]


@dataclass(frozen=True)
class GroupMatch:
    """Where each live slot's saved state is, and which saved settings each live group takes.

    Attributes:
        index_of: slot to the index of its entry in the saved ``"state"``.
        settings: one dict per live group: saved hyperparameters without ``params``/``param_names``.
    """

    index_of: dict[Slot, int]
    settings: list[dict[str, Any]]


def plain_groups(param_groups: ParamGroups) -> list[dict[str, Any]]:
    """Param groups as torch saves them: tensors replaced by running indices, the rest copied."""
    start, packed = 0, []
    for group in param_groups:
        count = len(group["params"])
        plain = {key: list(value) if isinstance(value, list) else value
                 for key, value in group.items() if key != "params"}
        packed.append({**plain, "params": list(range(start, start + count))})
        start += count
    return packed


def match_groups(live: ParamGroups, saved: Sequence[dict[str, Any]]) -> GroupMatch:
    """Match saved groups to live ones: by FQN if every group with parameters has names on both sides, else by position.

    Raises:
        ValueError: naming the parameters that only one side has, or the group whose size differs.
    """
    if all("param_names" in group for group in (*live, *saved) if group["params"]):
        return _match_by_name(live, saved)
    return _match_by_position(live, saved)


def _settings(group: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in group.items() if key not in ("params", "param_names")}


def _match_by_position(live: ParamGroups, saved: Sequence[dict[str, Any]]) -> GroupMatch:
    mine, theirs = ([len(group["params"]) for group in groups] for groups in (live, saved))
    if mine != theirs:
        raise ValueError(f"param groups do not match: this optimizer has groups of {mine} parameters, the saved "
                         f"state has {theirs}. With param_names in both, they are matched by name; read "
                         "a state dict of torch, apex, Megatron or DeepSpeed with mp_optim.checkpoint.foreign")
    saved_ids = (index for group in saved for index in group["params"])
    index_of = {slot: index for (slot, _), index in zip(iter_slots(live), saved_ids, strict=True)}
    return GroupMatch(index_of, [_settings(group) for group in saved])


def _saved_names(saved: Sequence[dict[str, Any]]) -> Iterator[tuple[str, int, int]]:
    for group_index, group in enumerate(saved):
        for name, index in zip(group.get("param_names", ()), group["params"], strict=True):
            yield name, index, group_index


def _match_by_name(live: ParamGroups, saved: Sequence[dict[str, Any]]) -> GroupMatch:
    wanted = {slot: slot_name(live, slot) for slot, _ in iter_slots(live)}
    canonical = matched_names((name for name, *_ in _saved_names(saved)), wanted.values())
    found = {canonical[name]: (index, group_index) for name, index, group_index in _saved_names(saved)}
    missing = sorted(set(wanted.values()) - found.keys())
    unexpected = sorted(found.keys() - set(wanted.values()))
    if missing or unexpected:
        raise ValueError(f"saved state does not fit this model: missing {missing}, unexpected {unexpected}")
    settings = []
    for index, group in enumerate(live):
        sources = Counter(found[name][1] for name in group.get("param_names", ()))
        if len(sources) > 1:
            raise ValueError(f"param group {index} takes parameters from saved groups {sorted(sources)}: their "
                             "hyperparameters cannot be merged; group the parameters as they were saved")
        settings.append(_settings(saved[next(iter(sources))]) if sources else {})
    return GroupMatch({slot: found[name][0] for slot, name in wanted.items()}, settings)
