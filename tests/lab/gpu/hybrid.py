"""The hybrid step: device slots on the device, host slots on the host, and what that takes."""

from __future__ import annotations

import gc
from typing import Any

import torch
from torch import nn

from benchmarks.opponents import CLIP, DECAY, LR
from benchmarks.section import Section
from lab.gpu.timing import alternate
from mp_optim import MegatronOptimizer, OptimizerConfig, get_megatron_optimizer

PIECE = 1 << 22


def fractions(device: torch.device, numel: int, rounds: int) -> Section:
    """Milliseconds, bytes over the bus, and peak device memory against the formula, at offload
    fractions 0, 0.5, 1."""
    section = Section("Hybrid step: fraction on the host")
    for fraction in (0.0, 0.5, 1.0):
        section.rows[f"{fraction}"] = _one(device, numel // PIECE or 1, fraction, rounds)
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()
    return section


def filled_model(device: torch.device, numel: int) -> nn.ParameterList:
    """Parameters with gradients, in bf16, of about so many elements together."""
    params = nn.ParameterList()
    for _ in range(numel // PIECE or 1):
        size = min(PIECE, numel)
        value = torch.full((size,), 0.02, dtype=torch.bfloat16, device=device)
        param = nn.Parameter(value)
        param.grad = torch.full_like(param, 1e-3)
        params.append(param)
    return params


def optimizer_of(model: nn.Module, **settings: Any) -> MegatronOptimizer:
    """AdamW with clipping, as everywhere in these measurements."""
    config = OptimizerConfig(bf16=True, lr=LR, weight_decay=DECAY, clip_grad=CLIP, **settings)
    return get_megatron_optimizer(config, model, config_overrides={})


def _one(device: torch.device, count: int, fraction: float, rounds: int) -> dict[str, float]:
    settings: dict[str, Any] = (
        {}
        if fraction == 0.0
        else {
            "optimizer_cpu_offload": True,
            "optimizer_offload_fraction": fraction,
            "overlap_cpu_optimizer_d2h_h2d": True,
        }
    )
    cuda = device.type == "cuda"
    before = torch.cuda.memory_allocated(device) if cuda else 0
    model = filled_model(device, count * PIECE)
    optimizer = optimizer_of(model, **settings)
    optimizer.init_state()
    if cuda:
        torch.cuda.reset_peak_memory_stats(device)
    timing = alternate(device, {"step": optimizer.step}, rounds, f"hybrid {fraction}")["step"]
    peak = torch.cuda.max_memory_allocated(device) - before if cuda else 0
    on_device = sum(row.params for row in optimizer.describe().rows if row.place == "device")
    formula = count * PIECE * 4 + on_device * 12
    metrics, hosted = optimizer.metrics(), count * PIECE - on_device
    return {
        "ms": timing.median * 1e3,
        "spread": timing.spread,
        "bytes_down": metrics["bytes_down"],
        "bytes_up": metrics["bytes_up"],
        "bytes_per_host_param": (metrics["bytes_down"] + metrics["bytes_up"]) / hosted
        if hosted
        else 0.0,
        "peak_bytes": float(peak),
        "formula_bytes": float(formula),
        "peak_over_formula": peak / formula,
    }
