"""The package's door to the accelerator, every function of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from benchmarks.section import Section
from mp_optim.host.accelerator import Accelerator, accelerator_of
from mp_optim.host.host_memory import REGISTERED_FROM, page_locked
from mp_optim.host.transfer import transfer_for


def door(device: torch.device) -> Section:
    accelerator = accelerator_of(device)
    if accelerator is None:
        raise RuntimeError(f"nothing here runs {device}")
    section = Section(f"The door to {accelerator.type}: 1 is yes")
    tries: dict[str, Callable[[], Any]] = {
        "the device is current within its block": lambda: _is_current(accelerator, device),
        "an event is reached": lambda: _is_reached(accelerator, device),
        "bytes go there and back on streams of their own": lambda: _comes_back(device),
        "host memory is registered": lambda: page_locked(REGISTERED_FROM, device).numel() > 0,
        "its memory is known": lambda: accelerator.memory_bytes(device) > 0,
    }
    for name, work in tries.items():
        try:
            section.rows[name] = {"works": float(work())}
        except Exception as error:
            section.missing[name] = f"{type(error).__name__}: {error}"[:200]
    return section


def _is_current(accelerator: Accelerator, device: torch.device) -> bool:
    with accelerator.on(device):
        return accelerator.current() == device or device.index is None


def _is_reached(accelerator: Accelerator, device: torch.device) -> bool:
    with accelerator.on(device):
        event = accelerator.event(sleeps=True)
        event.record(accelerator.current_stream())
        event.synchronize()
        return bool(event.query())


def _comes_back(device: torch.device) -> bool:
    transfer, values = transfer_for(device), torch.arange(256, dtype=torch.uint8)
    here, there = transfer.empty_host(256, True), torch.zeros(256, dtype=torch.uint8, device=device)
    transfer.wait(transfer.upload([there], [values]))
    transfer.join()
    transfer.wait(transfer.download([here], [there]))
    return bool(here.equal(values))
