"""Formats of other libraries: state dicts of torch, apex and Megatron, DeepSpeed's universal
checkpoints, and safetensors as Hugging Face names and splits them."""

from __future__ import annotations

import json
import os
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from mp_optim.checkpoint.commit import replace_durably, sync
from mp_optim.checkpoint.entries import Models
from mp_optim.checkpoint.foreign.state import ForeignGroup, ForeignState, positional_state
from mp_optim.checkpoint.ranks import Ranks
from mp_optim.checkpoint.shards import FlatShard, PartitionShard, held_places, piece
from mp_optim.checkpoint.version_files import load_plain_file
from mp_optim.process.calls import in_own_modes
from mp_optim.process.torch_types import is_dtensor
from mp_optim.slots import iter_slots
from mp_optim.slots.identity import has_names
from mp_optim.slots.keyed_optimizer import OverStack, SlotKeyedOptimizer, stack_of
from mp_optim.slots.names import named_params
from mp_optim.slots.partition import check_cover
from mp_optim.slots.slot_state import AVERAGE, MASTER, STEP
from mp_optim.slots.tensors import whole_tensor

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
    """State of a torch optimizer.

    Args:
        state_dict: as ``state_dict()`` gives it.
        names: of all parameters in the order in which the optimizer was given them; not needed if
            it was given named parameters.
        masters: the FP32 copies that were stepped for 16-bit parameters, by name.
        step: steps taken, for optimizers that do not count them (SGD).

    Raises:
        ValueError: names are missing, or masters are of unknown parameters.
    """
    foreign = positional_state(state_dict, names, step)
    masters = masters or {}
    if unknown := sorted(masters.keys() - set(foreign.names)):
        raise ValueError(f"masters of parameters that the optimizer does not have: {unknown}")
    return foreign.with_masters(masters)


def to_torch(foreign: ForeignState, *, param_names: bool = True) -> dict[str, Any]:
    """A state dict that ``torch.optim.AdamW.load_state_dict`` takes, over FP32 parameters (see
    :func:`fp32_params`).

    Args:
        param_names: name the parameters in the groups, as torch does if it was given named ones.
    """
    names = foreign.names
    index_of = {name: index for index, name in enumerate(names)}
    groups = []
    for group in foreign.groups:
        decoupled = group.settings.get("adam_w_mode", _DEFAULTS["decoupled_weight_decay"])
        settings = {**_DEFAULTS, "decoupled_weight_decay": decoupled, **group.settings}
        settings["params"] = [index_of[name] for name in group.names]
        if param_names:
            settings["param_names"] = list(group.names)
        groups.append(settings)
    state = {}
    for name in names:
        if tensors := foreign.state.get(name):
            kept = {key: value for key, value in tensors.items() if key != MASTER}
            state[index_of[name]] = kept
    return {"state": state, "param_groups": groups}


def fp32_params(foreign: ForeignState) -> dict[str, Tensor]:
    """The FP32 values of all parameters that have one, by name."""
    return {name: state[MASTER] for name, state in foreign.state.items() if MASTER in state}


# -- apex: FusedAdam, whose FP32 copies (param_groups_master) are not in its state dict -----------


def from_apex(
    state_dict: Mapping[str, Any],
    masters: Sequence[Sequence[Tensor | None]] | None,
    names: Sequence[str] | None = None,
) -> ForeignState:
    """State of ``apex.optimizers.FusedAdam``, whose step counts are its groups'.

    Args:
        state_dict: as ``state_dict()`` gives it.
        masters: ``[group["params"] for group in optimizer.param_groups_master]``; None without
            ``master_weights``.
        names: of all parameters in order; not needed if the groups have ``param_names``.

    Raises:
        ValueError: names, groups and masters do not fit each other.
    """
    foreign = positional_state(state_dict, names)
    if masters is None:
        return foreign
    counts = [len(group.names) for group in foreign.groups]
    if [len(group) for group in masters] != counts:
        raise ValueError(
            f"masters of {[len(group) for group in masters]} parameters for groups of {counts} "
            "(apex's add_param_group adds no masters)"
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
"""Key of the Float16 optimizer's FP32 copies."""


def from_megatron(
    state_dict: Mapping[Any, Any] | Sequence[Mapping[str, Any]],
    names: Sequence[str],
    *,
    fp32_names: Collection[str] = (),
    step: float | None = None,
) -> ForeignState:
    """State of one rank that holds whole parameters (no distributed optimizer, no tensor
    parallelism).

    Args:
        state_dict: ``state_dict()``; for a chain its list, or the dict by number that Megatron
            makes of it on disk.
        names: of all parameters, in the order of ``optimizer.param_groups``, member after member.
        fp32_names: parameters that the model itself keeps in FP32 (routers, say), which have no
            copy.
        step: steps taken, if the state does not say.

    Raises:
        ValueError: names and state do not fit each other.
    """
    members = states_of_members(state_dict)
    counts = []
    for member in members:
        counts.append(sum(len(group["params"]) for group in _inner(member)["param_groups"]))
    if len(names) != sum(counts):
        raise ValueError(
            f"{len(names)} names for parts of {counts} parameters, {sum(counts)} together"
        )
    groups: list[ForeignGroup] = []
    state: dict[str, Mapping[str, Tensor]] = {}
    start = 0
    for member, count in zip(members, counts, strict=True):
        named = _state_of_member(member, names[start : start + count], fp32_names, step)
        groups += named.groups
        state |= named.state
        start += count
    scaler = next((member["grad_scaler"] for member in members if member.get("grad_scaler")), None)
    return ForeignState(tuple(groups), state, scaler)


def states_of_members(
    state_dict: Mapping[Any, Any] | Sequence[Mapping[str, Any]],
) -> list[Mapping[str, Any]]:
    """What is saved of each member of a chain, or of the only optimizer."""
    if not isinstance(state_dict, Mapping):
        return list(state_dict)
    if state_dict and all(isinstance(key, int) or str(key).isdigit() for key in state_dict):
        return [state_dict[key] for key in sorted(state_dict, key=int)]
    return [state_dict]


def _inner(member: Mapping[str, Any]) -> Mapping[str, Any]:
    inner: Mapping[str, Any] = member.get("optimizer", member.get("optimizer_state_dict", member))
    if "param_groups" not in inner or "state" not in inner:
        raise ValueError(
            f"no state of Megatron's Float16 or FP32 optimizer: it has {sorted(map(str, inner))}. "
            "The distributed optimizer's is a shard of each parameter: save it with --ckpt-format "
            "torch_dist and without --use-distributed-optimizer first"
        )
    return inner


def _state_of_member(
    member: Mapping[str, Any], names: Sequence[str], fp32_names: Collection[str], step: float | None
) -> ForeignState:
    foreign = positional_state(_inner(member), names, step)
    masters = member.get(COPIES, member.get("fp32_from_fp16"))
    if masters is None:
        return foreign
    copies: dict[str, Tensor] = {}
    for index, (group, tensors) in enumerate(zip(foreign.groups, masters, strict=True)):
        halves = [name for name in group.names if name not in fp32_names]
        if len(halves) != len(tensors):
            raise ValueError(
                f"param group {index} has {len(tensors)} FP32 copies for {len(halves)} 16-bit "
                "parameters; name those that the model keeps in FP32 in fp32_names="
            )
        copies.update(zip(halves, tensors, strict=True))
    return foreign.with_masters(copies)


# -- DeepSpeed ------------------------------------------------------------------------------------
#
# Universal checkpoints: ``<folder>/zero/<name>/{fp32,exp_avg,exp_avg_sq,step}.pt`` and
# ``zero/optimizer_state.pt``, as its ``ds_to_universal.py`` writes and ``load_universal`` reads
# them.

_FILES = {"fp32": MASTER, "exp_avg": "exp_avg", "exp_avg_sq": "exp_avg_sq"}
_VALUE = "param"
_GLOBAL = "optimizer_state.pt"
_VERSION = "0.16.0"
"""The oldest that the layout written here is that of; DeepSpeed refuses state without a version."""
_SETTINGS = ("lr", "betas", "eps", "weight_decay", "bias_correction")
"""Of DeepSpeed's Adam; others would replace what its config says."""


def from_deepspeed(folder: str | os.PathLike[str], *, step: float | None = None) -> ForeignState:
    """State of all parameters of a universal checkpoint, in one group without settings.

    Tensors are in their parameter's shape, but for those converted from ZeRO-3, which are flat;
    ``import_state`` gives them their shape.

    Args:
        step: steps taken, where there is no ``step.pt`` (ZeRO-3).

    Raises:
        FileNotFoundError: there is no universal checkpoint.
        ValueError: files are missing or hold something else, listing them; or no file says the
            step.
    """
    root = Path(folder) / "zero"
    names = sorted(path.parent.relative_to(root).as_posix() for path in root.glob("**/fp32.pt"))
    if not names:
        raise FileNotFoundError(
            f"no universal checkpoint in {folder}: there is no zero/<name>/fp32.pt; convert it "
            "with DeepSpeed's ds_to_universal.py first"
        )
    missing = [
        f"{name}/{file}.pt"
        for name in names
        for file in _FILES
        if not (root / name / f"{file}.pt").is_file()
    ]
    if missing:
        raise ValueError(f"{root} lacks {missing}")
    state = {}
    for name in names:
        state[name] = {STEP: _step(root / name, step)}
        for file, key in _FILES.items():
            state[name][key] = _value(root / name / f"{file}.pt")
    return ForeignState((ForeignGroup(tuple(names)),), state)


def _value(path: Path) -> Tensor:
    content = load_plain_file(path)
    if isinstance(content, dict):
        content = content.get(_VALUE)
    if not isinstance(content, Tensor):
        raise ValueError(f"{path} holds no tensor under {_VALUE!r}")
    return content


def _step(folder: Path, step: float | None) -> Tensor:
    path = folder / "step.pt"
    if path.is_file():
        saved = torch.as_tensor(load_plain_file(path), device="cpu")
        return saved.reshape(()).to(torch.float32)
    if step is None:
        raise ValueError(
            f"{path} is missing (ZeRO-3 has none); pass step=, the number of steps taken"
        )
    return torch.tensor(float(step), dtype=torch.float32, device="cpu")


def to_deepspeed(
    foreign: ForeignState,
    folder: str | os.PathLike[str],
    *,
    groups: Sequence[Sequence[str]] | None = None,
) -> Path:
    """Write the optimizer's part of a universal checkpoint; the model states next to it are
    DeepSpeed's.

    Args:
        groups: names of the parameters of DeepSpeed's groups, which may be others; by default as
            they are here.

    Returns:
        The folder ``zero``.

    Raises:
        ValueError: a parameter has no FP32 value, or no moments of Adam's, listing them; nothing
            was written.
    """
    missing = [
        f"{name}.{key}"
        for name in foreign.names
        for key in (STEP, *_FILES.values())
        if key not in foreign.state.get(name, {})
    ]
    if missing:
        raise ValueError(
            "a universal checkpoint has step, fp32, exp_avg and exp_avg_sq of every parameter; "
            f"missing {missing}"
        )
    root = Path(folder) / "zero"
    for name in foreign.names:
        (root / name).mkdir(parents=True, exist_ok=True)
        for file, key in _FILES.items():
            torch.save({_VALUE: _whole(foreign.state[name][key])}, root / name / f"{file}.pt")
        torch.save(_whole(foreign.state[name][STEP]), root / name / "step.pt")
    settings = {name: group.settings for group in foreign.groups for name in group.names}
    index_of = {name: index for index, name in enumerate(foreign.names)}
    param_groups = []
    for names in groups or [group.names for group in foreign.groups]:
        if names:
            own = settings[names[0]]
            kept = {key: own[key] for key in _SETTINGS if key in own}
            param_groups.append({**kept, "params": [index_of[name] for name in names]})
    torch.save({"ds_version": _VERSION, "param_groups": param_groups}, root / _GLOBAL)
    return root


def _whole(tensor: Tensor) -> Tensor:
    """On the CPU, with memory of its own: a view would take its whole storage along."""
    return tensor.detach().to("cpu", copy=True).contiguous()


# -- safetensors: FP32 main params ----------------------------------------------------------------

_INDEX = "model.safetensors.index.json"


@in_own_modes
def export_safetensors(
    path: str | os.PathLike[str],
    optimizer: SlotKeyedOptimizer | OverStack,
    *,
    model: Models | None = None,
    averaged: bool = False,
    max_shard_size: int = 5 * 10**9,
    process_group: ProcessGroup | None = None,
) -> list[Path]:
    """Write the FP32 main params into a folder: ``model.safetensors``; or, if they need more than
    one file, ``model-00001-of-0000N.safetensors`` and so on with ``model.safetensors.index.json``.
    Every rank calls it.

    The first rank writes, and holds at most one file's tensors and one more at a time. A file
    appears under its name only when it is complete; the files of an earlier export are then
    deleted.

    Args:
        path: folder; created if missing, other files in it are left alone.
        optimizer: parameters that several ranks hold parts of are put together.
        model: names the parameters, which are found in it by identity: a module, or the list of
            chunks. Needed where the param groups have no names (``AdamW(model.parameters())``, and
            Hugging Face's Trainer).
        averaged: write the averages of the main params instead (``ema_decay``); of a parameter that
            was never stepped, or never trained, its value.
        max_shard_size: bytes of tensors in a file; a larger tensor has a file of its own.
        process_group: the ranks that hold the parameters; all by default.

    Returns:
        The safetensors files, in order.

    Raises:
        ValueError: ``max_shard_size`` is not positive, no averages are kept, parameters have no
            names or are not in ``model``, or ranks hold different parameters, naming some.
        ModuleNotFoundError: safetensors is not installed.
    """
    if max_shard_size < 1:
        raise ValueError(f"max_shard_size={max_shard_size}: must be a positive number of bytes")
    try:
        from safetensors.torch import save_file
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            "export_safetensors needs safetensors: pip install mp_optim[hf]"
        ) from error
    ranks, folder = Ranks.of(process_group), Path(path)
    stack = stack_of(optimizer)
    names = ranks.run_on_all("exporting", lambda: _names(stack, model))
    every = ranks.union(set(names.values()))
    written: list[tuple[Path, list[str], int]] = []
    ranks.run_on_all("exporting", lambda: _check_names(set(names.values()), every))

    def write(tensors: dict[str, Tensor]) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        temporary = folder / f".model-{len(written) + 1:05d}.tmp"
        save_file(tensors, temporary, metadata={"format": "pt"})
        sync(temporary)
        size = sum(tensor.nbytes for tensor in tensors.values())
        written.append((temporary, list(tensors), size))

    named = _named_averages(stack) if averaged else stack.named_main_params()
    for tensors in _files(_whole_tensors(stack, named, names, ranks), max_shard_size):
        ranks.run_on_first(f"exporting to {folder}", lambda tensors=tensors: write(tensors))  # type: ignore[misc]
    paths = ranks.broadcast_result(f"exporting to {folder}", lambda: _publish(folder, written))
    return list(map(Path, paths))


def _names(optimizer: Any, model: Models | None) -> dict[str, str]:
    """What each of the optimizer's parameters is called in the file, by its name there."""
    whole, groups = optimizer.model_parallel.names, optimizer.param_groups
    if model is None:
        for slot in optimizer.slots():
            if not has_names(groups[slot.group]):
                raise ValueError(
                    f"{optimizer.slot_name(slot)}: param group {slot.group} has no names, and "
                    "what is written under made-up ones nobody can load: pass model=, or build "
                    "the optimizer of model.named_parameters()"
                )
        return {name: whole[name] for name in map(optimizer.slot_name, optimizer.slots())}
    chunks = [model] if isinstance(model, nn.Module) else list(model)
    called = {id(param): name for name, param in named_params(chunks)}
    found: dict[str, str] = {}
    for slot, param in iter_slots(groups):
        own = optimizer.slot_name(slot)
        if id(param) not in called:
            raise ValueError(
                f"{own} of shape {tuple(param.shape)} is no parameter of model=: give the model "
                "that the optimizer steps (prepared, if it was prepared)"
            )
        found[own] = whole[called[id(param)]]
    return found


def _check_names(own: set[str], every: set[str]) -> None:
    if own != every:
        raise ValueError(
            f"parameters {sorted(every - own)[:10]} are not on this rank: export the main params "
            "of ranks that hold the same parameters (process_group=)"
        )


def _named_averages(optimizer: Any) -> Iterator[tuple[str, Tensor]]:
    """The average of every main param; the main param where there is none."""
    mains = optimizer.named_main_params()
    for slot, (name, main) in zip(optimizer.slots(), mains, strict=True):
        state = optimizer.slot_state(slot)
        if state and AVERAGE not in state:
            raise ValueError(f"averaged=True: no average of {name} is kept; set ema_decay")
        yield name, state[AVERAGE] if state and state["step"] > 0 else main


def _whole_tensors(
    optimizer: Any, named: Iterable[tuple[str, Tensor]], names: Mapping[str, str], ranks: Ranks
) -> Iterator[tuple[str, Tensor]]:
    """Every tensor, whole, on the host, where this rank writes; empty ones of the same size
    elsewhere.

    Args:
        named: main params, or what has their form. names: of these, in the file.
    """
    parallel = optimizer.model_parallel
    for name, main in named:
        full, partition = main.detach(), parallel.partitions.get(name)
        if partition is not None:
            full = _joined(name, PartitionShard(full, partition), ranks)
        elif is_dtensor(full):
            full = whole_tensor(full)
        elif isinstance(full, FlatShard):
            full = full.full_tensor(ranks.group)
        if ranks.rank == 0:
            yield names[name], full.float().cpu().contiguous()
        else:
            empty = torch.empty(full.shape, dtype=full.dtype, device="meta")
            yield names[name], empty


def _joined(name: str, shard: PartitionShard, ranks: Ranks) -> Tensor:
    """The whole of what ranks have parts of, where this rank writes; elsewhere nothing of its
    size."""
    shape = tuple(shard.shape)
    gathered = ranks.gather([(box, piece(shard, box).cpu()) for box in held_places(shard)])

    def join() -> Tensor:
        boxes = {place: value for of_rank in gathered for place, value in of_rank}
        check_cover(name, shape, boxes)
        full = torch.empty(shape, dtype=shard.dtype, device="cpu")
        for place, value in boxes.items():
            place.of(full).copy_(value)
        return full

    full = ranks.run_on_first("putting parts together", join)
    empty = torch.empty(shape, dtype=shard.dtype, device="meta")
    return empty if full is None else full


def _files(named: Iterable[tuple[str, Tensor]], limit: int) -> Iterator[dict[str, Tensor]]:
    """Tensors in order, as many to a file as fit; one empty file if there are none."""
    tensors: dict[str, Tensor] = {}
    for name, tensor in named:
        elements = sum(other.numel() for other in tensors.values()) + tensor.numel()
        if tensors and 4 * elements > limit:
            yield tensors
            tensors = {}
        tensors[name] = tensor
    yield tensors


def _publish(folder: Path, written: list[tuple[Path, list[str], int]]) -> list[str]:
    """Give the files their names, write the index if there are several, and delete an earlier
    export's."""
    count = len(written)
    names = [f"model-{at:05d}-of-{count:05d}.safetensors" for at in range(1, count + 1)]
    if count == 1:
        names = ["model.safetensors"]
    total, weight_map = 0, {}
    for (temporary, keys, size), name in zip(written, names, strict=True):
        os.replace(temporary, folder / name)
        weight_map.update(dict.fromkeys(keys, name))
        total += size
    if count > 1:
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        replace_durably(folder / _INDEX, json.dumps(index, indent=2).encode())
    earlier = {path.name for path in folder.glob("model-*-of-*.safetensors")}
    earlier.add("model.safetensors")
    for name in (*(earlier - set(names)), *([_INDEX] if count == 1 else [])):
        (folder / name).unlink(missing_ok=True)
    sync(folder)
    return [str(folder / name) for name in names]
