"""Formats of other libraries: state dicts of torch, apex and Megatron, and DeepSpeed's universal
checkpoints."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mp_optim.apps.convert.state import ForeignGroup, ForeignState, positional_state
from mp_optim.apps.convert.torch_files import load_plain_file
from mp_optim.core.slot_state import MASTER, STEP

# -- torch: Adam and AdamW, and any optimizer whose state is tensors of the parameter's shape -----

_DEFAULTS = {
    "amsgrad": False,
    "maximize": False,
    "foreach": None,
    "capturable": False,
    "differentiable": False,
    "fused": None,
    "decoupled_weight_decay": True,
}


def from_torch(
    state_dict: Mapping[str, Any],
    names: Sequence[str] | None = None,
    *,
    masters: Mapping[str, Tensor] | None = None,
    step: float | None = None,
) -> ForeignState:
    """Return the state of a torch optimizer.

    Args:
        state_dict: result of ``state_dict()``.
        names: names of all parameters, in the order of the optimizer's param groups; not needed if
            the optimizer has named parameters.
        masters: FP32 main params of 16-bit parameters, by name.
        step: number of steps taken, for optimizers that count no steps (SGD).

    Raises:
        ValueError: names are missing, or masters belong to unknown parameters.
    """
    foreign = positional_state(state_dict, names, step)
    masters = masters or {}
    if unknown := sorted(masters.keys() - set(foreign.names)):
        raise ValueError(
            f"masters= has entries for {unknown}, which are not parameters of the optimizer; "
            "remove these entries"
        )
    return foreign.with_masters(masters)


def to_torch(foreign: ForeignState) -> dict[str, Any]:
    """Return a state dict for ``torch.optim.AdamW.load_state_dict``, with names of parameters.

    The optimizer has to step FP32 parameters with the values of :func:`fp32_params`.
    """
    names = foreign.names
    index_of = {name: index for index, name in enumerate(names)}
    groups = []
    for group in foreign.groups:
        decoupled = group.settings.get("adam_w_mode", _DEFAULTS["decoupled_weight_decay"])
        settings = {**_DEFAULTS, "decoupled_weight_decay": decoupled, **group.settings}
        settings["params"] = [index_of[name] for name in group.names]
        settings["param_names"] = list(group.names)
        groups.append(settings)
    state = {}
    for name in names:
        if tensors := foreign.state.get(name):
            kept = {key: value for key, value in tensors.items() if key != MASTER}
            state[index_of[name]] = kept
    return {"state": state, "param_groups": groups}


def fp32_params(foreign: ForeignState) -> dict[str, Tensor]:
    """Return FP32 values by parameter name. Parameters without an FP32 value are left out."""
    return {name: state[MASTER] for name, state in foreign.state.items() if MASTER in state}


# -- apex: FusedAdam, whose FP32 copies (param_groups_master) are not in its state dict -----------


def from_apex(
    state_dict: Mapping[str, Any],
    masters: Sequence[Sequence[Tensor | None]] | None,
    names: Sequence[str] | None = None,
) -> ForeignState:
    """Return the state of ``apex.optimizers.FusedAdam``, which keeps step counts in its groups.

    Args:
        state_dict: result of ``state_dict()``.
        masters: ``[group["params"] for group in optimizer.param_groups_master]``; None without
            ``master_weights``.
        names: names of all parameters in order; not needed if the groups have ``param_names``.

    Raises:
        ValueError: names, groups and masters do not match.
    """
    foreign = positional_state(state_dict, names)
    if masters is None:
        return foreign
    counts = [len(group.names) for group in foreign.groups]
    if [len(group) for group in masters] != counts:
        raise ValueError(
            f"masters= has {[len(group) for group in masters]} tensors per group, but the state "
            f"dict's groups have {counts} parameters; pass the masters of every group (apex's "
            "add_param_group does not add them to param_groups_master)"
        )
    copies = {
        name: tensor
        for group, tensors in zip(foreign.groups, masters, strict=True)
        for name, tensor in zip(group.names, tensors, strict=True)
        if tensor is not None
    }
    return foreign.with_masters(copies)


# -- Megatron: Float16OptimizerWithFloat16Params, FP32Optimizer, ChainedOptimizer -----------------


COPIES = "fp32_from_fp16_params"
"""Key of FP32 copies of parameters in the state dict of Megatron's Float16 optimizer."""


def from_megatron(
    state_dict: Mapping[Any, Any] | Sequence[Mapping[str, Any]],
    names: Sequence[str],
    *,
    fp32_names: Collection[str] = (),
    step: float | None = None,
) -> ForeignState:
    """Return the state of one Megatron rank with whole parameters.

    The rank must have neither a distributed optimizer nor tensor parallelism.

    Args:
        state_dict: ``state_dict()``; for a chained optimizer its list, or the dict by number that
            Megatron writes to disk.
        names: names of all parameters, in the order of ``optimizer.param_groups`` of each member.
        fp32_names: parameters that the model itself keeps in FP32 (such as routers), which have no
            FP32 copy.
        step: number of steps taken, if the state does not have it.

    Raises:
        ValueError: names and state do not match.
    """
    members = states_of_members(state_dict)
    counts = []
    for member in members:
        counts.append(sum(len(group["params"]) for group in _inner(member)["param_groups"]))
    if len(names) != sum(counts):
        raise ValueError(
            f"names= has {len(names)} entries, but the saved optimizers have {counts} parameters, "
            f"{sum(counts)} in total; pass one name per parameter, in the order of param_groups"
        )
    groups: list[ForeignGroup] = []
    state: dict[str, Mapping[str, Tensor]] = {}
    start = 0
    for member, count in zip(members, counts, strict=True):
        named = positional_state(_inner(member), names[start : start + count], step)
        copies: dict[str, Tensor] = {}
        masters = member.get(COPIES, member.get("fp32_from_fp16"))
        # Megatron's FP32 optimizer has no copies.
        pairs = () if masters is None else zip(named.groups, masters, strict=True)
        for index, (group, tensors) in enumerate(pairs):
            halves = [name for name in group.names if name not in fp32_names]
            if len(halves) != len(tensors):
                raise ValueError(
                    f"param group {index} has {len(tensors)} FP32 copies for {len(halves)} 16-bit "
                    "parameters; pass the names of parameters that the model keeps in FP32 as "
                    "fp32_names="
                )
            copies.update(zip(halves, tensors, strict=True))
        named = named.with_masters(copies)
        groups += named.groups
        state |= named.state
        start += count
    scaler = next((member["grad_scaler"] for member in members if member.get("grad_scaler")), None)
    return ForeignState(tuple(groups), state, scaler)


def states_of_members(
    state_dict: Mapping[Any, Any] | Sequence[Mapping[str, Any]],
) -> list[Mapping[str, Any]]:
    """Return a list of saved states: one for each member of a chain, or the state of a single
    optimizer."""
    if not isinstance(state_dict, Mapping):
        return list(state_dict)
    if state_dict and all(isinstance(key, int) or str(key).isdigit() for key in state_dict):
        return [state_dict[key] for key in sorted(state_dict, key=int)]
    return [state_dict]


def _inner(member: Mapping[str, Any]) -> Mapping[str, Any]:
    inner: Mapping[str, Any] = member.get("optimizer", member.get("optimizer_state_dict", member))
    if "param_groups" not in inner or "state" not in inner:
        raise ValueError(
            f"the state dict has the keys {sorted(map(str, inner))} instead of param_groups and "
            "state, so Megatron's Float16 or FP32 optimizer did not save it; if a distributed "
            "optimizer saved it, load a checkpoint of --ckpt-format torch_dist without "
            "--use-distributed-optimizer, save again, and convert the new checkpoint"
        )
    return inner


# -- DeepSpeed ------------------------------------------------------------------------------------

_FILES = {"fp32": MASTER, "exp_avg": "exp_avg", "exp_avg_sq": "exp_avg_sq"}
"""State key for each file in ``<folder>/zero/<name>/``. DeepSpeed's ``ds_to_universal.py`` writes
these files."""
_VALUE = "param"


def from_deepspeed(folder: str | os.PathLike[str], *, step: float | None = None) -> ForeignState:
    """Return the state of all parameters of a universal checkpoint, in one group without settings.

    Tensors have their parameter's shape. Tensors converted from ZeRO-3 are flat; ``import_state``
    reshapes them.

    Args:
        folder: folder of the checkpoint.
        step: number of steps taken, if the checkpoint has no ``step.pt`` (ZeRO-3).

    Raises:
        FileNotFoundError: the folder has no universal checkpoint.
        ValueError: files are missing or have other content (the message lists them), or the step is
            unknown.
    """
    root = Path(folder) / "zero"
    names = sorted(path.parent.relative_to(root).as_posix() for path in root.glob("**/fp32.pt"))
    if not names:
        raise FileNotFoundError(
            f"{folder} has no file zero/<name>/fp32.pt, so it is not a universal checkpoint; "
            "convert it with DeepSpeed's ds_to_universal.py first"
        )
    missing = [
        f"{name}/{file}.pt"
        for name in names
        for file in _FILES
        if not (root / name / f"{file}.pt").is_file()
    ]
    if missing:
        raise ValueError(f"{root} lacks {missing}; run DeepSpeed's ds_to_universal.py again")
    state = {}
    for name in names:
        path = root / name / "step.pt"
        if not path.is_file() and step is None:
            raise ValueError(
                f"{path} is missing (ZeRO-3 writes no such file); pass step=, the number of steps "
                "taken"
            )
        count = load_plain_file(path) if path.is_file() else step
        count = torch.as_tensor(count, device="cpu").reshape(()).to(torch.float32)
        state[name] = {STEP: count}
        for file, key in _FILES.items():
            path = root / name / f"{file}.pt"
            content = load_plain_file(path)
            value = content.get(_VALUE) if isinstance(content, dict) else content
            if not isinstance(value, Tensor):
                raise ValueError(
                    f"{path} holds no tensor under {_VALUE!r}; run DeepSpeed's ds_to_universal.py "
                    "again"
                )
            state[name][key] = value
    return ForeignState((ForeignGroup(tuple(names)),), state)
