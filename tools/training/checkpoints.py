"""A run's checkpoints: the newest versions of `<output_dir>/checkpoints`, which every tool takes as
it is."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn

import mp_optim

_FOLDER = "checkpoints"


def save(
    output_dir: Path,
    step: int,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    scheduler: object,
    keep: int | None = None,
) -> Path:
    """Save a version, then delete all but the `keep` newest; a crash in between leaves the previous
    one in charge. Returns its folder."""
    path, extra = output_dir / _FOLDER, {"step": step, "rng": _rng_state()}
    return mp_optim.checkpoint.save(path, model, optimizer, scheduler, extra=extra, keep=keep)


def latest(output_dir: Path) -> Path | None:
    pointer = output_dir / _FOLDER / "latest"
    if not pointer.exists():
        return None
    return pointer.parent / pointer.read_text(encoding="utf-8").strip()


def load(path: Path, model: nn.Module, optimizer: torch.optim.Optimizer, scheduler: object) -> int:
    """Load everything in place; returns the next step to run."""
    extra = mp_optim.checkpoint.load(path, model, optimizer, scheduler)
    for name, state in extra["rng"].items():
        if name == "cpu":
            torch.set_rng_state(state.cpu())
        elif torch.accelerator.is_available():
            torch.get_device_module(name).set_rng_state(state.cpu())
    return int(extra["step"])


def _rng_state() -> dict[str, torch.Tensor]:
    states = {"cpu": torch.get_rng_state()}
    device = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    if device is not None:
        states[device.type] = torch.get_device_module(device).get_rng_state()
    return states
