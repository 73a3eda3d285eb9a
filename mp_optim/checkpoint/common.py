"""What is saved beside the tensors: param groups, loss scale, scheduler, the caller's own. Plain
data in one file."""

from __future__ import annotations

import hashlib
import io
import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from mp_optim.checkpoint.inert import load_plain
from mp_optim.checkpoint.manifest import Manifest, read_checked
from mp_optim.checkpoint.ranks import Ranks
from mp_optim.slots.state_dict import with_params

COMMON = "common.pt"
_PARTS = {"optimizer", "extra", "model", "scheduler"}


def without_state(state_dict: Mapping[str, Any]) -> dict[str, Any]:
    """An optimizer's state dict without its tensors, and with a name for each parameter."""
    common = {key: value for key, value in state_dict.items() if key != "state"}
    groups = []
    for index, group in enumerate(state_dict["param_groups"]):
        names = [f"group{index}.param{at}" for at in range(len(group["params"]))]
        groups.append({"param_names": names, **group})
    return {**common, "param_groups": groups}


def packed(common: Mapping[str, Any], ranks: Ranks) -> bytes:
    """The content of the file on the first rank, with the parameters of all ranks in its groups;
    b"" on the others.

    Raises:
        ValueError: it holds what a safe load would refuse.
    """
    optimizer = common["optimizer"]
    groups = [] if optimizer is None else optimizer["param_groups"]
    names = json.dumps([group["param_names"] for group in groups])
    digest = hashlib.sha256(names.encode()).digest()
    others = ranks.gather(None if digest == ranks.broadcast(digest) else groups)

    def pack() -> bytes:
        buffer, content = io.BytesIO(), dict(common)
        if optimizer is not None:
            whole = _merged(groups, filter(None, others))
            content["optimizer"] = {**optimizer, "param_groups": whole}
        try:
            torch.save(content, buffer)
        except Exception as error:  # of whatever it holds
            raise ValueError(
                f"extra or the scheduler's state holds what cannot be saved ({error}): give plain "
                "data, numbers, strings, tensors and containers of them"
            ) from error
        _check_plain(buffer, content)
        return buffer.getvalue()

    return ranks.on_first("saving what is not a tensor", pack) or b""


def read_common(version: Path, manifest: Manifest) -> dict[str, Any]:
    """What :func:`packed` made, without its checksum or its pickle being taken on trust.

    Raises:
        ValueError: it is damaged, or not plain data.
    """
    content = read_checked(version, manifest, COMMON)
    try:
        common: dict[str, Any] = load_plain(content)
        if not isinstance(common, dict) or not common.keys() >= _PARTS:
            raise ValueError(f"it has no {sorted(_PARTS)}")
        if not isinstance(common["model"], dict):
            raise ValueError(f"its 'model' is a {type(common['model']).__name__}")
        for group in (common["optimizer"] or {"param_groups": ()})["param_groups"]:
            if len(group["params"]) != len(set(group["param_names"])):
                raise ValueError("a param group has not one name for each parameter")
    except Exception as error:  # damage raises anything
        first = (str(error).splitlines() or [""])[0]
        raise ValueError(
            f"{version / COMMON} is damaged or no plain data: {type(error).__name__}: {first}"
        ) from error
    return common


def _merged(
    groups: list[dict[str, Any]], others: Iterable[list[dict[str, Any]]]
) -> list[dict[str, Any]]:
    """The first rank's groups, then those of other ranks that hold parameters it does not have,
    numbered anew."""
    result = list(groups)
    seen = {name for group in groups for name in group["param_names"]}
    start = sum(len(group["params"]) for group in groups)
    for groups_of_rank in others:
        for group in groups_of_rank:
            names = group["param_names"]
            new = [at for at, name in enumerate(names) if name not in seen]
            if new:
                numbers = list(range(start, start + len(new)))
                result.append({**with_params(group, new), "params": numbers})
                start += len(new)
                seen |= set(names)
    return result


def _check_plain(buffer: io.BytesIO, common: Any) -> None:
    """What this process happens to trust (``torch.serialization.add_safe_globals``), the next one
    may not."""
    buffer.seek(0)
    unsafe = {
        *torch.serialization.get_unsafe_globals_in_checkpoint(buffer),
        *_trusted_here(common),
    }
    if unsafe:
        raise ValueError(
            "extra, the scheduler's state and what the model's state dict holds beside tensors may "
            "be numbers, strings, tensors and containers of them, nothing else; they hold "
            f"{sorted(unsafe)}"
        )


def _trusted_here(common: Any) -> Iterator[str]:
    """Classes in plain containers that only this process's own list lets a safe load make."""
    listed = torch.serialization.get_safe_globals()
    trusted = {entry[0] if isinstance(entry, tuple) else entry for entry in listed}
    values = [common]
    while values:
        value = values.pop()
        if type(value) in trusted:
            yield f"{type(value).__module__}.{type(value).__name__}"
        elif isinstance(value, dict):
            values += [*value.keys(), *value.values()]
        elif isinstance(value, (list, tuple, set)):
            values += value
