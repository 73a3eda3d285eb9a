"""Foreign state in one file of ours, and the optimizer's part of a checkpoint of ours as foreign
state."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from mp_optim.checkpoint.common import read_common
from mp_optim.checkpoint.contents import open_checkpoint
from mp_optim.checkpoint.foreign.state import MASTER, ForeignGroup, ForeignState

_FORMAT = "mp_optim foreign state 1"
_STATE, _MODEL = "optimizer.state.", "model."


def to_file(foreign: ForeignState, path: str | os.PathLike[str]) -> None:
    """Write it as plain data that ``torch.load(weights_only=True)`` reads."""
    scaler = foreign.grad_scaler
    groups = [
        {"names": list(g.names), "settings": dict(g.settings)} for g in foreign.groups
    ]
    content = {
        "format": _FORMAT,
        "groups": groups,
        "state": {name: _cloned(state) for name, state in foreign.state.items()},
        "grad_scaler": None if scaler is None else dict(scaler),
    }
    torch.save(content, path)


def _cloned(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {key: value.detach().clone() for key, value in state.items()}


def plain_content(path: str | os.PathLike[str]) -> Any:
    """What is in a file of ``torch.save``: plain data and tensors, or nothing is read.

    Raises:
        OSError: it cannot be opened.
        ValueError: it is no such file, damaged, or holds objects of classes.
    """
    try:
        return torch.load(path, map_location="cpu", weights_only=True)
    except OSError:
        raise
    except Exception as error:  # zipfile's, pickle's, RuntimeError, and more
        raise ValueError(
            f"{path} is not a whole file of torch.save with nothing but plain data and tensors "
            "(objects of classes could run code, and are not read)"
        ) from error


def from_file(path: str | os.PathLike[str]) -> ForeignState:
    """Read what :func:`to_file` wrote.

    Raises:
        OSError: it cannot be opened.
        ValueError: it is another kind of file, or damaged.
    """
    content = plain_content(path)
    if not isinstance(content, dict) or content.get("format") != _FORMAT:
        raise ValueError(f"{path} is no file that mp-optim convert wrote for mp_optim")
    groups = tuple(
        ForeignGroup(tuple(group["names"]), group["settings"])
        for group in content["groups"]
    )
    return ForeignState(groups, content["state"], content["grad_scaler"])


def from_checkpoint(path: str | os.PathLike[str]) -> ForeignState:
    """The optimizer's part of the newest version in a folder that ``mp_optim.checkpoint.save``
    wrote; no model needed.

    Raises:
        FileNotFoundError: there is no complete checkpoint.
        ValueError: it has no optimizer, or state in compact forms, which no other library reads.
    """
    saved = open_checkpoint(path)
    keys = {
        name: name.removeprefix(_STATE).partition(".")[0]
        for name in saved.entries
        if name.startswith(_STATE)
    }
    compact = sorted(
        name for name, key in keys.items() if key == "remainder" or "_scale" in key
    )
    if compact:
        raise ValueError(
            f"{saved.version} has compact state ({compact[0]}, ...): save it with "
            "full_precision=True"
        )
    common = read_common(saved.version, saved.manifest)["optimizer"]
    if common is None:
        raise ValueError(f"{saved.version} holds a model and no optimizer")
    entries = {
        name: saved.read(name)
        for name in saved.entries
        if name in keys or name.startswith(_MODEL)
    }
    groups = common["param_groups"]
    return ForeignState(
        tuple(map(_group, groups)), _by_name(entries, groups), common.get("grad_scaler")
    )


def _by_name(
    entries: dict[str, Tensor], groups: list[dict[str, Any]]
) -> dict[str, dict[str, Tensor]]:
    """Each parameter's state; the FP32 value of one that has no copy is the model's."""
    state: dict[str, dict[str, Tensor]] = {
        name: {} for group in groups for name in group["param_names"]
    }
    for entry, value in entries.items():
        key, _, name = entry.removeprefix(_STATE).partition(".")
        if entry.startswith(_STATE) and name in state:
            state[name][key] = value
    for name, tensors in state.items():
        model = entries.get(f"{_MODEL}{name}")
        if (
            tensors
            and MASTER not in tensors
            and model is not None
            and model.dtype == torch.float32
        ):
            tensors[MASTER] = model
    return state


def _group(group: dict[str, Any]) -> ForeignGroup:
    return ForeignGroup(
        tuple(group["param_names"]),
        {
            key: value
            for key, value in group.items()
            if key not in ("params", "param_names")
        },
    )
