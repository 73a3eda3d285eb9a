"""Export of FP32 main params as safetensors files."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from mp_optim.checkpoint.commit import replace_durably, sync
from mp_optim.checkpoint.inventory import Models, chunks_of
from mp_optim.core import iter_slots
from mp_optim.core.flat_shard import FlatShard, PartitionShard, held_boxes, piece
from mp_optim.core.keyed_optimizer import SlotKeyedOptimizer
from mp_optim.core.names import named_params
from mp_optim.core.partition import check_cover
from mp_optim.core.slot_state import AVERAGE
from mp_optim.core.tensors import whole_tensor
from mp_optim.host.calls import in_own_modes
from mp_optim.host.torch_types import is_dtensor
from mp_optim.process_groups.agreement import Ranks

_INDEX = "model.safetensors.index.json"


@in_own_modes
def export_safetensors(
    path: str | os.PathLike[str],
    optimizer: SlotKeyedOptimizer,
    *,
    model: Models | None = None,
    averaged: bool = False,
    max_shard_size: int = 5 * 10**9,
    process_group: ProcessGroup | None = None,
) -> list[Path]:
    """Write the FP32 main params into a folder as safetensors files. Every rank calls this
    function.

    The file is ``model.safetensors``. If more than one file is needed, the files are
    ``model-00001-of-0000N.safetensors`` and so on, with ``model.safetensors.index.json``. The first
    rank writes, and holds at most one file's tensors and one more tensor at a time. A file appears
    under its name only when it is complete; the files of an earlier export are then deleted.

    Args:
        path: folder; created if missing. Other files in the folder are not changed.
        optimizer: the optimizer. A parameter that is sharded over ranks is gathered.
        model: a module or list of chunks. Each tensor gets the name of its parameter in the model.
            Required if the param groups have no names (``AdamW(model.parameters())``, and Hugging
            Face's Trainer).
        averaged: True to write the averages of the main params (``ema_decay``) instead. If a
            parameter was never stepped, its main param is written.
        max_shard_size: bytes of tensors in a file; a larger tensor has a file of its own.
        process_group: the ranks that hold the parameters; None for all ranks.

    Returns:
        The safetensors files, in order.

    Raises:
        ValueError: ``max_shard_size`` is not positive, no averages are kept, parameters have no
            names or are not in ``model``, or ranks hold different parameters; the message names
            some of them.
        ModuleNotFoundError: safetensors is not installed.
    """
    if max_shard_size < 1:
        raise ValueError(
            f"max_shard_size={max_shard_size}: a file has at least 1 byte; pass a positive number "
            "of bytes"
        )
    try:
        from safetensors.torch import save_file
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            "export_safetensors: safetensors is not installed; run pip install mp_optim[hf]"
        ) from error
    ranks, folder = Ranks.of(process_group), Path(path)
    stack: Any = optimizer.stack
    names = ranks.run_on_all("exporting", lambda: _names(stack, model))
    missing = ranks.union(set(names.values())) - set(names.values())
    written: list[tuple[Path, list[str], int]] = []

    def check_names() -> None:
        if missing:
            raise ValueError(
                f"parameters {sorted(missing)[:10]} are not on this rank; export with the ranks "
                "that have the same parameters (process_group=)"
            )

    def write(tensors: dict[str, Tensor]) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        temporary = folder / f".model-{len(written) + 1:05d}.tmp"
        save_file(tensors, temporary, metadata={"format": "pt"})
        sync(temporary)
        size = sum(tensor.nbytes for tensor in tensors.values())
        written.append((temporary, list(tensors), size))

    ranks.run_on_all("exporting", check_names)
    named = _named_averages(stack) if averaged else stack.named_main_params()
    for tensors in _files(_whole_tensors(stack, named, names, ranks), max_shard_size):
        ranks.run_on_first(f"exporting to {folder}", lambda tensors=tensors: write(tensors))  # type: ignore[misc]
    paths = ranks.broadcast_result(f"exporting to {folder}", lambda: _publish(folder, written))
    return list(map(Path, paths))


def _names(optimizer: Any, model: Models | None) -> dict[str, str]:
    """Return the name of each parameter in the file, by the optimizer's name of the parameter."""
    whole, groups = optimizer.model_parallel.names, optimizer.param_groups
    if model is None:
        for slot in optimizer.slots():
            if not (groups[slot.group].get("param_names") or groups[slot.group].get("fqns")):
                raise ValueError(
                    f"{optimizer.slot_name(slot)}: param group {slot.group} has no names, and a "
                    "file without the model's names cannot be loaded; pass model=, or build the "
                    "optimizer with model.named_parameters()"
                )
        return {name: whole[name] for name in map(optimizer.slot_name, optimizer.slots())}
    called = {id(param): name for name, param in named_params(chunks_of(model))}
    found: dict[str, str] = {}
    for slot, param in iter_slots(groups):
        own = optimizer.slot_name(slot)
        if id(param) not in called:
            raise ValueError(
                f"{own} of shape {tuple(param.shape)} is not a parameter of model=; pass the "
                "model that the optimizer steps (the prepared model, if a library prepared it)"
            )
        found[own] = whole[called[id(param)]]
    return found


def _named_averages(optimizer: Any) -> Iterator[tuple[str, Tensor]]:
    """Yield the average of every main param; for a parameter without a step, the main param."""
    mains = optimizer.named_main_params()
    for slot, (name, main) in zip(optimizer.slots(), mains, strict=True):
        state = optimizer.slot_state(slot)
        if state and AVERAGE not in state:
            raise ValueError(
                f"averaged=True: the optimizer keeps no average of {name}; set ema_decay"
            )
        yield name, state[AVERAGE] if state and state["step"] > 0 else main


def _whole_tensors(
    optimizer: Any, named: Iterable[tuple[str, Tensor]], names: Mapping[str, str], ranks: Ranks
) -> Iterator[tuple[str, Tensor]]:
    """Yield every whole tensor on the host, on the rank that writes. Other ranks yield meta
    tensors.

    Args:
        optimizer: the optimizer.
        named: main params, or tensors of the same shapes.
        names: names in the file, by the optimizer's names.
        ranks: the ranks that export.
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
    """Return a whole tensor, joined from the shards of several ranks, on the first rank. Other
    ranks get a meta tensor."""
    shape = tuple(shard.shape)
    gathered = ranks.gather([(box, piece(shard, box).cpu()) for box in held_boxes(shard)])

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
    """Group tensors into files of at most ``limit`` bytes in FP32, in order. A larger tensor has a
    file of its own. Without tensors yield one empty group."""
    tensors: dict[str, Tensor] = {}
    for name, tensor in named:
        elements = sum(other.numel() for other in tensors.values()) + tensor.numel()
        if tensors and 4 * elements > limit:
            yield tensors
            tensors = {}
        tensors[name] = tensor
    yield tensors


def _publish(folder: Path, written: list[tuple[Path, list[str], int]]) -> list[str]:
    """Rename the temporary files, write the index if there are several files, and delete the files
    of an earlier export. Return the paths of the files."""
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
