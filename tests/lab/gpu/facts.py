"""GPU, driver and versions of a measurement."""

from __future__ import annotations

import importlib.metadata
import platform
import subprocess
from datetime import date
from typing import Any

import torch

import mp_optim


def machine(device: torch.device) -> dict[str, Any]:
    found: dict[str, Any] = {
        "device": torch.cuda.get_device_name(device)
        if device.type == "cuda"
        else platform.machine(),
        "driver": _driver() if device.type == "cuda" else None,
        "cuda": torch.version.cuda,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "mp_optim": mp_optim.__version__,
        "date": date.today().isoformat(),
    }
    for name in ("triton", "apex", "transformer-engine"):
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = None
    return found


def _driver() -> str | None:
    try:
        command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        return subprocess.run(
            command, capture_output=True, text=True, timeout=30, check=True
        ).stdout.split()[0]
    except (OSError, subprocess.SubprocessError, IndexError):
        return None
