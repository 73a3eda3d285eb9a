"""Names of the tensors in a checkpoint, a check that these tensors fit a model and an optimizer,
and the content of ``common.json``."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor

from mp_optim.checkpoint.common import as_json
from mp_optim.checkpoint.file_format import Saved
from mp_optim.core.flat_shard import PartitionShard
from mp_optim.core.slot_state import AVERAGE
from mp_optim.core.state_dict import with_params
from mp_optim.process_groups.agreement import Ranks

MODEL = "model."
"""Prefix of the names of the model's tensors; the FQN follows."""

STATE = "optimizer.state."
"""Prefix of the names of optimizer state; the state's key, a dot and the parameter's FQN follow."""

_SHOWN = 40


def entry_name(key: str, name: str) -> str:
    """Return the name of a state tensor in a checkpoint, from its state key and the FQN."""
    return f"{STATE}{key}.{name}"


def key_and_fqn(entry: str) -> tuple[str, str]:
    """Return the state key and the FQN in a name from :func:`entry_name`. For any other name return
    two empty texts."""
    if not entry.startswith(STATE):
        return "", ""
    key, _, fqn = entry.removeprefix(STATE).partition(".")
    return key, fqn


# -- check of the tensors --------------------------------------------------------------------------


def check_entries(
    where: object, saved: Mapping[str, Saved], wanted: Mapping[str, Tensor], others: Iterable[str]
) -> None:
    """Check that the tensors of a checkpoint fit the tensors of this rank.

    Args:
        where: name of the checkpoint, for the error.
        saved: tensors of the checkpoint, by name.
        wanted: tensors to read on this rank, by name.
        others: names of the tensors that any rank reads; any other saved tensor is unexpected.

    Raises:
        ValueError: tensors are missing, unexpected, or have another shape or dtype; the message
            lists them.
    """
    unexpected = sorted(saved.keys() - set(others))
    misshaped, of_another_dtype = [], []
    for name in filter(saved.__contains__, wanted):
        there, here = saved[name], wanted[name]
        if there.shape != here.shape:
            text = f"{name}: saved {there.shape}, expected {tuple(here.shape)}"
            is_each_ranks = name.startswith(STATE) and there.shape[1:] == tuple(here.shape)
            if isinstance(here, PartitionShard):
                is_each_ranks = here.is_stacked
            # Scales of blocks are saved separately for each tensor-parallel shard, so such scales
            # can be loaded only with the saved number of ranks.
            more = " (saved separately by each tensor-parallel rank: load with as many ranks)"
            misshaped.append(text + more * is_each_ranks)
        if there.dtype != here.dtype:
            of_another_dtype.append(f"{name}: saved {there.dtype}, expected {here.dtype}")
    listed = []
    for kind, names in (
        ("missing", sorted(wanted.keys() - saved.keys())),
        ("unexpected", unexpected),
        ("mis-shaped", misshaped),
        ("of another dtype", of_another_dtype),
    ):
        more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
        if names:
            listed.append(f"{kind} {names[:_SHOWN]}{more}")
    hint = "; load the checkpoint into the saved model and optimizer"
    if any(key_and_fqn(name)[0] == AVERAGE for name in unexpected):
        hint = "; to load without averages, which this optimizer does not keep, pass convert=True"
    if listed:
        raise ValueError(
            f"{where} does not fit this model and optimizer: {', '.join(listed)}{hint}"
        )


# -- common.json: plain data ----------------------------------------------------------------------


def packed(common: Mapping[str, Any], ranks: Ranks) -> bytes:
    """Return the content of ``common.json`` on the first rank, and b"" on the other ranks.

    The param groups in the content have the parameters of all ranks.

    Raises:
        ValueError: a value is not plain data; the message names the value's type.
    """
    optimizer = common["optimizer"]
    groups = [] if optimizer is None else optimizer["param_groups"]
    names = json.dumps([group["param_names"] for group in groups])
    others = ranks.gather_differing(groups, names)

    def pack() -> bytes:
        if optimizer is None:
            return as_json(common)
        whole = {**optimizer, "param_groups": _merged(groups, filter(None, others))}
        return as_json({**common, "optimizer": whole})

    return ranks.run_on_first("saving objects other than tensors", pack) or b""


def _merged(
    groups: list[dict[str, Any]], others: Iterable[list[dict[str, Any]]]
) -> list[dict[str, Any]]:
    """Return the first rank's param groups, and groups of other ranks with the parameters that the
    first rank does not have. Parameters of other ranks get new indices."""
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
