"""A param group taken apart: what Muon steps, and what AdamW does."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from mp_optim.groups.muon import is_hidden_matrix
from mp_optim.process.caller_warnings import warn
from mp_optim.slots.param_attributes import is_expert_param

Named = tuple[str, Tensor]


def by_rule(group: dict[str, Any]) -> list[dict[str, Any]]:
    """A group as one or two: Muon's matrices, and the rest.

    Raises:
        ValueError: ``optimizer`` of the group is neither muon nor adam.
    """
    settings = {
        key: value for key, value in group.items() if key not in ("params", "use_muon")
    }
    chosen = group.get("optimizer", {False: "adam"}.get(group.get("use_muon", True)))
    if chosen is not None:
        return [{**settings, "params": group["params"], "optimizer": chosen}]
    members = _members(group["params"])
    matrices = [member for member in members if _is_matrix(member)]
    rest = [member for member in members if not _is_matrix(member)]
    if matrices and not isinstance(matrices[0], tuple):
        warn(
            "Muon was given parameters without names, so every matrix is stepped by it, embeddings "
            'and output layers too: pass model.named_parameters(), or a group with optimizer="adam"'
            " for those"
        )
    parts = [
        {**settings, "params": members, "optimizer": rule}
        for rule, members in (("muon", matrices), ("adam", rest))
    ]
    return [part for part in parts if part["params"]] or parts[:1]


def _members(params: Any) -> list[Tensor | Named]:
    return [params] if isinstance(params, Tensor) else list(params)


def _is_matrix(member: Tensor | Named) -> bool:
    name, param = ("", member) if isinstance(member, Tensor) else member
    return is_hidden_matrix(param, name, is_expert_param(param, name))
