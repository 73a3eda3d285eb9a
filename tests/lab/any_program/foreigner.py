"""A foreign optimizer below the wrappers, which writes into its own groups."""

from __future__ import annotations

from typing import Any

import torch

from lab.any_program.setups import LOWEST_RATE, Place, Setup
from mp_optim import (
    ConstantGradScaler,
    DynamicGradScaler,
    Float16OptimizerWithFloat16Params,
    FP32Optimizer,
    HybridDeviceOptimizer,
    MegatronOptimizer,
    OptimizerConfig,
)

DEFAULTS = {"lr": 0.01, "weight_decay": 0.0, "count": 0, "rate": 1.0}


class Counting(torch.optim.Optimizer):
    """Momentum with a rate that the optimizer lowers itself. Rate and count are in its groups, as
    Prodigy's are; a group without a gradient keeps them."""

    def __init__(self, params: Any, **settings: Any) -> None:
        super().__init__(params, {**DEFAULTS, **settings})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            trained = [param for param in group["params"] if param.grad is not None]
            for param in trained:
                state = self.state[param]
                if not state:
                    state["buffer"] = torch.zeros_like(param)
                state["buffer"].mul_(0.5).add_(param.grad)
                param.sub_(state["buffer"] * (float(group["lr"]) * group["rate"]))
            if trained:
                group["count"] += 1
                rate = group["rate"] * 0.5
                group["rate"] = rate if rate > LOWEST_RATE else 1.0


def stack(
    setup: Setup, place: Place, config: OptimizerConfig, groups: list[dict[str, Any]]
) -> MegatronOptimizer:
    params = [
        {"params": list(zip(group.pop("param_names"), group.pop("params"), strict=True)), **group}
        for group in groups
    ]
    inner: torch.optim.Optimizer = Counting(params)
    if place.fraction:
        inner = HybridDeviceOptimizer(
            params,
            place.fraction,
            Counting,
            Counting,
            offload_mode="sync" if place.mode == "sync" else "overlap",
            overlap_cpu_optimizer_d2h_h2d=place.overlap,
        )
    if setup.precision == "fp32":
        return FP32Optimizer(inner, config)
    scaler = None
    if setup.precision == "fp16":
        scaler = (
            ConstantGradScaler(setup.scale)
            if setup.constant
            else DynamicGradScaler(setup.scale, 1.0, 2.0, 0.5, setup.window, setup.hysteresis)
        )
    return Float16OptimizerWithFloat16Params(inner, config, scaler)
