"""DeepSpeed's universal checkpoints: ``<folder>/zero/<name>/{fp32,exp_avg,exp_avg_sq,step}.pt`` and
``zero/optimizer_state.pt``, as its ``ds_to_universal.py`` writes and ``load_universal`` reads
them."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mp_optim.checkpoint.foreign.state import MASTER, STEP, ForeignGroup, ForeignState

_FILES = {"fp32": MASTER, "exp_avg": "exp_avg", "exp_avg_sq": "exp_avg_sq"}
_VALUE = "param"
_GLOBAL = "optimizer_state.pt"
_VERSION = "0.16.0"
"""The oldest that the layout written here is that of; DeepSpeed refuses state without a version."""


def from_deepspeed(
    folder: str | os.PathLike[str], *, step: float | None = None
) -> ForeignState:
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
    names = sorted(
        path.parent.relative_to(root).as_posix() for path in root.glob("**/fp32.pt")
    )
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
    state = {name: _state(root / name, step) for name in names}
    return ForeignState((ForeignGroup(tuple(names)),), state)


def _state(folder: Path, step: float | None) -> dict[str, Tensor]:
    """A parameter's state from its folder."""
    values = {key: _value(folder / f"{file}.pt") for file, key in _FILES.items()}
    return {STEP: _step(folder, step), **values}


def _value(path: Path) -> Tensor:
    content = torch.load(path, map_location="cpu", weights_only=True)
    if isinstance(content, dict):
        content = content.get(_VALUE)
    if not isinstance(content, Tensor):
        raise ValueError(f"{path} holds no tensor under {_VALUE!r}")
    return content


def _step(folder: Path, step: float | None) -> Tensor:
    path = folder / "step.pt"
    if path.is_file():
        return torch.as_tensor(
            torch.load(path, map_location="cpu", weights_only=True),
            dtype=torch.float32,
            device="cpu",
        ).reshape(())
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
    """Write the optimizer's part of a universal checkpoint; the model states beside it are
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
            torch.save(
                {_VALUE: _whole(foreign.state[name][key])}, root / name / f"{file}.pt"
            )
        torch.save(_whole(foreign.state[name][STEP]), root / name / "step.pt")
    settings = {
        name: group.settings for group in foreign.groups for name in group.names
    }
    index_of = {name: index for index, name in enumerate(foreign.names)}
    param_groups = []
    for names in groups or [group.names for group in foreign.groups]:
        if names:
            indices = [index_of[name] for name in names]
            param_groups.append({**_adams(settings[names[0]]), "params": indices})
    torch.save({"ds_version": _VERSION, "param_groups": param_groups}, root / _GLOBAL)
    return root


def _whole(tensor: Tensor) -> Tensor:
    """On the CPU, with memory of its own: a view would take its whole storage along."""
    return tensor.detach().to("cpu", copy=True).contiguous()


def _adams(settings: Any) -> dict[str, Any]:
    """What DeepSpeed's Adam has as settings; the rest would replace what its config says."""
    return {
        key: settings[key]
        for key in ("lr", "betas", "eps", "weight_decay", "bias_correction")
        if key in settings
    }
