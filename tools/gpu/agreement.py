"""What has to be exactly so: no waiting for the device, and the same bits in every place."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from benchmarks.sections import Section
from torch import Tensor, nn

from mp_optim import FusedAdam, FusedLAMB, Lion, OptimizerConfig, get_megatron_optimizer

STEPS = 50


def _model(device: torch.device) -> nn.Sequential:
    torch.manual_seed(0)
    layers = [nn.Embedding(64, 96), nn.Linear(96, 160), nn.GELU(), nn.Linear(160, 64)]
    return nn.Sequential(*layers).to(torch.bfloat16).to(device)


def _train(device: torch.device, fraction: float, **settings: Any) -> tuple[list[float], list[Tensor]]:
    if fraction > 0.0:
        settings |= {"optimizer_cpu_offload": True, "optimizer_offload_fraction": fraction}
    model = _model(device)
    optimizer = get_megatron_optimizer(OptimizerConfig(bf16=True, lr=1e-2, clip_grad=1.0, **settings), model)
    losses = []
    for step in range(STEPS):
        tokens = torch.randint(0, 64, (32,), generator=torch.Generator().manual_seed(step)).to(device)
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(tokens[:-1]).float(), tokens[1:])
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, [param.detach().cpu() for param in model.parameters()]


def _equal(a: tuple[list[float], list[Tensor]], b: tuple[list[float], list[Tensor]]) -> bool:
    return a[0] == b[0] and all(torch.equal(x, y) for x, y in zip(a[1], b[1], strict=True))


def bits(device: torch.device) -> Section:
    """1 where two runs have the same bits: offload fractions on the device, and one stream of gradients on both."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    section = Section("The same bits: 1 is yes")
    kinds: dict[str, dict[str, Any]] = {
        "FP32 states": {}, "8-bit moments, remainders": {
            "use_precision_aware_optimizer": True, "exp_avg_dtype": "uint8", "exp_avg_sq_dtype": "uint8"}}
    for kind, settings in kinds.items():
        expected = _train(device, 0.0, **settings)
        for fraction in (0.5, 1.0):
            same = _equal(_train(device, fraction, **settings), expected)
            section.rows[f"{kind}: {STEPS} steps, fraction {fraction} as 0"] = {"same": float(same)}
    for rule in (FusedAdam, FusedLAMB, Lion):
        ours, theirs = (_stream(rule, where) for where in (device, torch.device("cpu")))
        same = all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))
        section.rows[f"{rule.__name__}: one stream of gradients, device as CPU"] = {"same": float(same)}
    torch.use_deterministic_algorithms(False)
    return section


def _stream(rule: Any, device: torch.device) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    params = [nn.Parameter(torch.randn(size, generator=generator).to(device)) for size in (1, 1000, 300_001)]
    optimizer = rule(params, lr=1e-2, weight_decay=0.1)
    for _ in range(20):
        for param in params:
            param.grad = torch.randn(param.shape, generator=generator).to(device)
        optimizer.step()
    return [param.detach().cpu() for param in params]


def synchronisations(device: torch.device) -> Section:
    """How often ``step()`` made the host wait for the device, as torch's sync debug mode counts it."""
    section = Section("Host synchronisations in a step")
    for name, settings in {"bf16": {}, "bf16, no clipping": {"clip_grad": 0.0}}.items():
        model = _model(device)
        optimizer = get_megatron_optimizer(OptimizerConfig(bf16=True, lr=1e-3, **settings), model)
        for param in model.parameters():
            param.grad = torch.full_like(param, 1e-3)
        for _ in range(3):
            optimizer.step()
        section.rows[name] = {"count": float(_count(device, optimizer.step))}
    return section


def _count(device: torch.device, step: Any) -> int:
    if device.type != "cuda":
        return 0
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            step()
        return sum("synchroniz" in str(warning.message) for warning in caught)
    finally:
        torch.cuda.set_sync_debug_mode("default")
