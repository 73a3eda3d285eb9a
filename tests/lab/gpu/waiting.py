"""Host synchronizations in a step, with the verdict on the device and on the host."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import nn

from benchmarks.section import Section
from lab.gpu.speed import ours
from mp_optim import MegatronOptimizer, OptimizerConfig, get_megatron_optimizer

CASES: dict[str, dict[str, Any]] = {
    "bf16": {"bf16": True},
    "bf16, no clipping": {"bf16": True, "clip_grad": 0.0},
    "fp16, dynamic scale": {"fp16": True},
    "LAMB": {"bf16": True, "optimizer": "lamb"},
    "Lion": {"bf16": True, "optimizer": "lion"},
    "zeros counted": {"bf16": True, "log_num_zeros_in_grad": True},
    "8-bit moments, remainders": {
        "bf16": True,
        "use_precision_aware_optimizer": True,
        "exp_avg_dtype": "uint8",
        "exp_avg_sq_dtype": "uint8",
    },
}


def with_host_verdict(optimizer: MegatronOptimizer) -> MegatronOptimizer:
    """Make an optimizer read the verdict on the host in every step."""
    for mains in optimizer.all_mains():
        mains.executor.verdict_device = lambda: None  # type: ignore[method-assign]
    return optimizer


def synchronisations(device: torch.device) -> Section:
    """Count how often five steps make the host wait for the device, by torch's sync debug mode.

    An overflow among the steps is a skipped step that nothing expects: the optimizer looks for the
    gradient to blame. Without a GPU the cases run and nothing can be counted.
    """
    section = Section("Host synchronisations in five steps")
    ways = {"count": {}, "with_overflow": {"overflow": True}, "verdict_on_host": {"on_host": True}}
    for name, settings in CASES.items():
        try:
            counted = {way: _waits(device, settings, **given) for way, given in ways.items()}
        except ValueError as error:
            section.missing[name] = str(error)[:120]
            continue
        if device.type == "cuda":
            section.rows[name] = counted
        else:
            section.missing[name] = "ran; only a GPU can count waits"
    return section


def _waits(
    device: torch.device, settings: dict[str, Any], on_host: bool = False, overflow: bool = False
) -> float:
    torch.manual_seed(0)
    dtype = torch.float16 if settings.get("fp16") else torch.bfloat16
    model = nn.Sequential(nn.Linear(96, 160), nn.Linear(160, 64)).to(device, dtype)
    next(iter(model.parameters())).grad_norm_group = "first"  # type: ignore[attr-defined]
    config = OptimizerConfig(lr=1e-3, fused_backend=ours(device), **settings)
    optimizer = get_megatron_optimizer(config, model)
    if on_host:
        with_host_verdict(optimizer)
    for param in model.parameters():
        param.grad = torch.full_like(param, 1e-3)

    def steps(count: int) -> None:
        first = next(iter(model.parameters())).grad
        assert first is not None
        for number in range(count):
            first.fill_(float("inf") if overflow and number == 2 and count == 5 else 1e-3)
            optimizer.scale_loss(torch.ones((), device=device))
            optimizer.step()

    steps(4)  # makes tables, compiles kernels
    if device.type != "cuda":
        steps(5)
        return 0.0
    torch.cuda.synchronize(device)
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            steps(5)
        return float(sum("synchroniz" in str(warning.message) for warning in caught))
    finally:
        torch.cuda.set_sync_debug_mode("default")
