"""Checkpoints on disk: natural-shape entries under FQNs, committed by one atomic rename.

Layout of a checkpoint directory::

    <path>/latest          name of the newest complete version; replaced atomically
    <path>/version-<n>/    torch.distributed.checkpoint files, plus common.pt (plain, weights_only)

An interrupted save leaves ``latest`` where it was.
"""

from __future__ import annotations

import os
import pickle
import shutil
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

from mp_optim.slots import ParamGroups, Slot

__all__ = ["load", "save"]

_LATEST = "latest"
_PREFIX = "version-"
_COMMON = "common.pt"


class SlotStateful(Protocol):
    """What is needed of an optimizer: slots with names and state."""

    param_groups: ParamGroups

    def slots(self) -> list[Slot]: ...
    def slot_name(self, slot: Slot) -> str: ...
    def slot_state(self, slot: Slot) -> dict[str, Any]: ...
    def full_slot_state(self, slot: Slot) -> dict[str, Any]: ...
    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, state_dict: dict[str, Any], *, convert: bool = False) -> None: ...


def save(path: str | os.PathLike[str], model: nn.Module, optimizer: SlotStateful, scheduler: Any = None,
         extra: Mapping[str, Any] | None = None, *, full_precision: bool = False) -> Path:
    """Save model, optimizer and whatever else is needed to go on.

    Args:
        path: checkpoint directory; created if missing. The version it held stays until the new one is complete.
        scheduler: anything with ``state_dict``.
        extra: plain data (numbers, strings, tensors, containers of them) returned by :func:`load`.
        full_precision: write optimizer state that is kept in fewer bits as FP32.

    Returns:
        The directory of the version written.

    Raises:
        ValueError: ``extra`` or the scheduler's state holds what a safe load would refuse; nothing was replaced.
    """
    root = Path(path)
    root.mkdir(parents=True, exist_ok=True)
    number = max([0, *(int(p.name.removeprefix(_PREFIX)) for p in root.glob(f"{_PREFIX}*") if p.is_dir())]) + 1
    target, staging = root / f"{_PREFIX}{number}", root / f".{_PREFIX}{number}.incomplete"
    common = {"optimizer": _without_state(optimizer.state_dict()), "extra": dict(extra or {}),
              "scheduler": None if scheduler is None else scheduler.state_dict()}
    _barrier()  # every rank has read the number
    if _is_first_rank():
        shutil.rmtree(staging, ignore_errors=True)
        staging.mkdir()
        torch.save(common, staging / _COMMON)
        _check_plain(staging / _COMMON)
    _barrier()
    with _alone_on_purpose():
        dcp_save(_tensors(model, optimizer, full_precision), checkpoint_id=staging, no_dist=not dist.is_initialized())
    if _is_first_rank():
        _commit(root, staging, target)
    _barrier()
    return target


@contextmanager
def _alone_on_purpose() -> Iterator[None]:
    """Torch warns of every save and load without a process group; here that is a way of working."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninitialized")
        yield


def _is_first_rank() -> bool:
    return not dist.is_initialized() or dist.get_rank() == 0


def _barrier() -> None:
    if dist.is_initialized():
        dist.barrier()


def _check_plain(path: Path) -> None:
    try:
        torch.load(path, weights_only=True)
    except pickle.UnpicklingError as error:
        raise ValueError("extra and the scheduler's state may hold numbers, strings, tensors and containers of them, "
                         f"nothing else: {str(error).splitlines()[0]}") from error


def _commit(root: Path, staging: Path, target: Path) -> None:
    """Make a complete version the newest one, then drop the others."""
    _sync_tree(staging)
    staging.rename(target)
    _sync_directory(root)
    _point_to(root, target.name)
    for old in (*root.glob(f"{_PREFIX}*"), *root.glob(f".{_PREFIX}*")):
        if old != target:
            shutil.rmtree(old, ignore_errors=True)


@torch.no_grad()
def load(path: str | os.PathLike[str], model: nn.Module, optimizer: SlotStateful, scheduler: Any = None, *,
         convert: bool = False) -> dict[str, Any]:
    """Load the newest complete version into objects that exist, whatever their placement.

    Args:
        convert: round optimizer state to the dtypes configured here also where that loses bits.

    Returns:
        What was passed to :func:`save` as ``extra``.

    Raises:
        FileNotFoundError: there is no complete checkpoint under ``path``.
        ValueError: entries are missing, unexpected or mis-shaped, listing their names; or bits would be lost.
    """
    version = _newest(Path(path))
    saved = FileSystemReader(version).read_metadata().state_dict_metadata
    tensors = _in_saved_form(_tensors(model, optimizer), saved, optimizer)
    _check_entries(version, saved, tensors)
    common = torch.load(version / _COMMON, weights_only=True)
    if scheduler is not None and common["scheduler"] is None:
        raise ValueError(f"{version} holds no scheduler state; load it with scheduler=None")
    if scheduler is not None and hasattr(scheduler, "check_state_dict"):
        scheduler.check_state_dict(common["scheduler"])
    with _alone_on_purpose():
        dcp_load(tensors, checkpoint_id=version, no_dist=not dist.is_initialized())
    model.load_state_dict({key.removeprefix("model."): value for key, value in tensors.items()
                           if key.startswith("model.")}, strict=False)
    loaded = common["optimizer"]
    loaded["state"] = _state_by_index(loaded["param_groups"], tensors)
    optimizer.load_state_dict(loaded, convert=convert)
    if scheduler is not None:
        scheduler.load_state_dict(common["scheduler"])
    extra: dict[str, Any] = common["extra"]
    return extra


def _tensors(model: nn.Module, optimizer: SlotStateful, full_precision: bool = False) -> dict[str, Tensor]:
    """Every tensor of the checkpoint under its name: ``model.<fqn>``, ``optimizer.state.<key>.<fqn>``."""
    entries = {f"model.{name}": value for name, value in model.state_dict().items() if isinstance(value, Tensor)}
    read = optimizer.full_slot_state if full_precision else optimizer.slot_state
    for slot in optimizer.slots():
        for key, value in read(slot).items():
            entries[_entry(key, optimizer.slot_name(slot))] = value
    return entries


def _entry(key: str, name: str) -> str:
    return f"optimizer.state.{key}.{name}"


_OTHER_FORMS = {"remainder": "master_param", "master_param": "remainder"}
"""Keys under which the same thing may have been saved."""


def _in_saved_form(tensors: dict[str, Tensor], saved: Mapping[str, Any], optimizer: SlotStateful) -> dict[str, Tensor]:
    """The entries to read: the optimizer's own tensors; or new ones for all of them, where some were saved in another
    form, so that a load that is refused for losing bits has changed none."""
    entries: dict[str, Tensor] = {}
    for slot in optimizer.slots():
        for key, own in optimizer.slot_state(slot).items():
            entries |= _as_saved(key, optimizer.slot_name(slot), own, saved)
    own_entries = {name for name in tensors if name.startswith("optimizer.")}
    if entries.keys() == own_entries and all(tensors[name].dtype == value.dtype for name, value in entries.items()):
        return tensors
    return {**{name: value for name, value in tensors.items() if name not in own_entries}, **entries}


def _as_saved(key: str, name: str, own: Tensor, saved: Mapping[str, Any]) -> dict[str, Tensor]:
    """New tensors to read one state tensor of a slot into, under the names and of the dtypes it was saved with."""
    entry, scale = _entry(key, name), _entry(f"{key}_scale", name)
    if entry not in saved:
        other = _entry(_OTHER_FORMS.get(key, ""), name)
        if other in saved:
            return {other: _new_like(own, saved[other])}
        if key.endswith("_scale") and _entry(key.removesuffix("_scale"), name) in saved:
            return {}
    if scale in saved and _dtype(saved[entry], own.dtype) != own.dtype:
        return {entry: _new_like(own, saved[entry]),
                scale: torch.empty(saved[scale].size, dtype=_dtype(saved[scale], torch.float32))}
    return {entry: _new_like(own, saved.get(entry))}


def _new_like(own: Tensor, entry: Any) -> Tensor:
    """A tensor to read an entry into, of the layout of ``own`` and the dtype that was saved."""
    return torch.empty_like(own, dtype=_dtype(entry, own.dtype))


def _without_state(state_dict: dict[str, Any]) -> dict[str, Any]:
    groups = [{"param_names": [f"group{index}.param{i}" for i in range(len(group["params"]))], **group}
              for index, group in enumerate(state_dict["param_groups"])]
    return {**{key: value for key, value in state_dict.items() if key != "state"}, "param_groups": groups}


def _state_by_index(groups: list[dict[str, Any]], tensors: Mapping[str, Tensor]) -> dict[int, dict[str, Tensor]]:
    index_of = {name: index for group in groups
                for name, index in zip(group["param_names"], group["params"], strict=True)}
    state: dict[int, dict[str, Tensor]] = {}
    for entry, value in tensors.items():
        if entry.startswith("optimizer.state."):
            key, name = entry.removeprefix("optimizer.state.").split(".", 1)
            if name in index_of:
                state.setdefault(index_of[name], {})[key] = value
    return state


def _check_entries(version: Path, metadata: Mapping[str, Any], wanted: Mapping[str, Tensor]) -> None:
    missing, unexpected = sorted(wanted.keys() - metadata.keys()), sorted(metadata.keys() - wanted.keys())
    shapes = [f"{name}: saved {tuple(size)}, expected {tuple(value.shape)}" for name, value in wanted.items()
              if name in metadata and (size := getattr(metadata[name], "size", value.shape)) != value.shape]
    dtypes = [f"{name}: saved {saved}, expected {value.dtype}" for name, value in wanted.items()
              if name in metadata and (saved := _dtype(metadata[name], value.dtype)) != value.dtype]
    if missing or unexpected or shapes or dtypes:
        raise ValueError(f"{version} does not fit this model and optimizer: missing {missing}, unexpected "
                         f"{unexpected}, mis-shaped {shapes}, of another dtype {dtypes}")


def _dtype(entry: Any, default: torch.dtype) -> torch.dtype:
    properties = getattr(entry, "properties", None)
    return default if properties is None else properties.dtype


def _newest(root: Path) -> Path:
    pointer = root / _LATEST
    if not pointer.is_file():
        raise FileNotFoundError(f"no complete checkpoint under {root} (there is no {_LATEST} file)")
    return root / pointer.read_text().strip()


def _point_to(root: Path, name: str) -> None:
    temporary = root / f".{_LATEST}.tmp"
    temporary.write_text(name + "\n")
    _sync_file(temporary)
    os.replace(temporary, root / _LATEST)
    _sync_directory(root)


def _sync_file(path: Path) -> None:
    with path.open("rb") as file:
        os.fsync(file.fileno())


def _sync_directory(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _sync_tree(root: Path) -> None:
    for path in root.rglob("*"):
        if path.is_file():
            _sync_file(path)
    _sync_directory(root)
