"""State in host memory, stepped there or streamed, next to the predicted rates."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from benchmarks.ours import our_optimizer
from benchmarks.section import Section, tensors
from benchmarks.timing import alternate
from lab.gpu.speed import Rate, clean, sizes_of
from mp_optim.apps.fit.step_time import Form, Machine, on_host, streamed
from mp_optim.host.transfer import Transfer, transfer_for

BYTES = 256 << 20
"""Of what is copied to measure a rate; also of a window."""
SCALES = 2 * 4 / 256
"""Bytes a parameter: two 8-bit moments have an FP32 scale for each block of 256."""
FORMS = (
    Form("FP32", 12, reads_param=False),
    Form("8-bit moments, 16-bit remainder", 4 + SCALES, reads_param=True),
)
COMPACT = {"use_precision_aware_optimizer": True}
SETTINGS: Mapping[str, dict[str, Any]] = {
    FORMS[0].name: {},
    FORMS[1].name: {**COMPACT, "exp_avg_dtype": "uint8", "exp_avg_sq_dtype": "uint8"},
}
MODELS: Mapping[str, Callable[[Machine, Form, int], float]] = {
    "host": on_host,
    "streamed": streamed,
}


def places(rate: Rate, numel: int, rounds: int) -> Section:
    machine, numel = machine_of(rate, rounds), sum(sizes_of(numel, "large"))
    section = Section("State in host memory: stepped there, or streamed")
    section.rows["rates, GB/s"] = {
        "up": machine.up / 1e9,
        "down": machine.down / 1e9,
        "host": machine.host / 1e9,
        "device": machine.device / 1e9,
    }
    for form in FORMS:
        for place in MODELS:
            row = _measured(rate.device, SETTINGS[form.name], place, numel, rounds)
            modelled = numel / MODELS[place](machine, form, numel) / 1e9
            row["modelled_gparams"] = modelled
            row["of_model"] = row["gparams"] / modelled
            section.rows[f"{form.name}, {place}"] = row
    return section


def _measured(
    device: torch.device, form: dict[str, Any], place: str, numel: int, rounds: int
) -> dict[str, float]:
    pipelined = {} if place == "streamed" else {"overlap_cpu_optimizer_d2h_h2d": True}
    offload = {"optimizer_cpu_offload": True, "optimizer_offload_fraction": 1.0}
    sizes = sizes_of(numel, "large")
    optimizer = our_optimizer(
        tensors(sizes, torch.bfloat16, 0.02, device),
        tensors(sizes, torch.bfloat16, 1e-3, device),
        offload_place=place,
        **offload,
        **pipelined,
        **form,
    )
    optimizer.step()
    timing = alternate({place: optimizer.step}, rounds, place, device)[place]
    row = {
        "ms": timing.median * 1e3,
        "spread": timing.spread,
        "gparams": numel / timing.median / 1e9,
    }
    del optimizer
    clean(device)
    return row


# -- rates ----------------------------------------------------------------------------------------


def machine_of(rate: Rate, rounds: int) -> Machine:
    size = BYTES if rate.device.type == "cuda" else BYTES >> 4
    transfer = transfer_for(rate.device)
    away = [torch.zeros(size, dtype=torch.uint8, device=rate.device) for _ in range(2)]
    here = [transfer.empty_host(size, True) for _ in range(2)]
    floats = torch.zeros(size, dtype=torch.float32)
    contenders: dict[str, Callable[[], object]] = {
        "bus": lambda: _both_ways(transfer, away, here),
        "host": lambda: floats.mul_(1.0001),
    }
    timings = alternate(contenders, rounds, "rates", rate.device)
    bus = size / timings["bus"].median
    host = 2 * floats.nbytes / timings["host"].median
    return Machine("this one", bus, bus, host, rate.limit)


def _both_ways(transfer: Transfer, away: list[Tensor], here: list[Tensor]) -> None:
    down = transfer.download([here[0]], [away[0]])
    transfer.upload([away[1]], [here[1]])
    transfer.wait(down)
    transfer.join()
