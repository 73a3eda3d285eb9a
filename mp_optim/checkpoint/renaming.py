"""Checkpoints whose names are a wrapped model's, read under the canonical ones."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any

from mp_optim.checkpoint.entries import MODEL, STATE
from mp_optim.checkpoint.index import Index
from mp_optim.slots.names import matched_names


def _split(entry: str) -> tuple[str, str]:
    """An entry's name as what its FQN follows, and the FQN."""
    if entry.startswith(MODEL):
        return MODEL, entry.removeprefix(MODEL)
    if not entry.startswith(STATE) or "." not in entry.removeprefix(STATE):
        return entry, ""
    key, fqn = entry.removeprefix(STATE).split(".", 1)
    return f"{STATE}{key}.", fqn


def renamed_entries(saved: Iterable[str], wanted: Iterable[str]) -> dict[str, str]:
    """Saved entries, and what they are called here; only those that are called otherwise.

    Args:
        saved: a checkpoint's entries. wanted: entries of the present model and optimizer.
    """
    parts = {entry: _split(entry) for entry in saved}
    present = {_split(entry)[1] for entry in wanted}
    names = matched_names({fqn for _, fqn in parts.values() if fqn}, present)
    return {
        entry: begin + names[fqn]
        for entry, (begin, fqn) in parts.items()
        if fqn and names[fqn] != fqn
    }


def index_under(names: Mapping[str, str], index: Index) -> Index:
    """A checkpoint's index with some entries called otherwise."""
    if not names:
        return index
    entries = {names.get(name, name): saved for name, saved in index.entries.items()}
    return dataclasses.replace(index, entries=entries)


def common_under(names: Mapping[str, str], common: Mapping[str, Any]) -> dict[str, Any]:
    """What a checkpoint holds beside tensors, with the same entries called otherwise."""
    fqns = {_split(old)[1]: _split(new)[1] for old, new in names.items()}
    model = {fqns.get(name, name): value for name, value in common["model"].items()}
    if not fqns or common["optimizer"] is None:
        return {**common, "model": model}
    groups = []
    for group in common["optimizer"]["param_groups"]:
        renamed = [fqns.get(name, name) for name in group.get("param_names", ())]
        groups.append({**group, "param_names": renamed})
    return {
        **common,
        "model": model,
        "optimizer": {**common["optimizer"], "param_groups": groups},
    }
