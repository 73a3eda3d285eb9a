"""Where a run's checkpoints lie: `<output_dir>/checkpoints/step-00000100`, and `latest` naming the
newest whole one."""

from __future__ import annotations

import os
from pathlib import Path

import torch
from torch import nn

import mp_optim
from training import ranks


def save(
    output_dir: Path,
    step: int,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    scheduler: object,
) -> Path:
    """Save, then point `latest` at it; a crash in between leaves the previous checkpoint in
    charge."""
    folder = output_dir / "checkpoints"
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"step-{step:08d}"
    extra = {"step": step, "rng": _rng_state()}
    mp_optim.checkpoint.save(path, model, optimizer, scheduler, extra=extra)
    if ranks.rank() == 0:
        pointer = folder / "latest.tmp"
        pointer.write_text(path.name, encoding="utf-8")
        os.replace(pointer, folder / "latest")
    return path


def latest(output_dir: Path) -> Path | None:
    """The newest whole checkpoint of a run, or None."""
    pointer = output_dir / "checkpoints" / "latest"
    return (
        pointer.parent / pointer.read_text(encoding="utf-8").strip()
        if pointer.exists()
        else None
    )


def load(
    path: Path, model: nn.Module, optimizer: torch.optim.Optimizer, scheduler: object
) -> int:
    """Load everything in place; returns the next step to run."""
    extra = mp_optim.checkpoint.load(path, model, optimizer, scheduler)
    for name, state in extra["rng"].items():
        if name == "cpu":
            torch.set_rng_state(state.cpu())
        elif torch.accelerator.is_available():
            torch.get_device_module(name).set_rng_state(state.cpu())
    return int(extra["step"])


def _rng_state() -> dict[str, torch.Tensor]:
    """By device type: the model may draw random numbers on the host and on the accelerator."""
    states = {"cpu": torch.get_rng_state()}
    device = (
        torch.accelerator.current_accelerator()
        if torch.accelerator.is_available()
        else None
    )
    if device is not None:
        states[device.type] = torch.get_device_module(device).get_rng_state()
    return states
