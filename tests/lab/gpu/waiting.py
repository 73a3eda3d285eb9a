"""What the host spends in a step, and whether it waits: the verdict on the device and on the
host."""

from __future__ import annotations

import statistics
import time
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.opponents import CLIP, DECAY, LR
from benchmarks.section import Section
from lab.gpu.speed import Rate, clean, ours, sizes_of
from lab.gpu.timing import alternate
from mp_optim import MegatronOptimizer, OptimizerConfig, get_megatron_optimizer

Step = Callable[[], object]


def with_host_verdict(optimizer: MegatronOptimizer) -> MegatronOptimizer:
    """The same optimizer, made to read the verdict on the host in every step."""
    optimizer.verdict_device = lambda: None  # type: ignore[method-assign]
    return optimizer


def _build(device: torch.device, sizes: list[int]) -> MegatronOptimizer:
    model = nn.ParameterList(
        [
            nn.Parameter(torch.full((size,), 0.02, dtype=torch.bfloat16, device=device))
            for size in sizes
        ]
    )
    config = OptimizerConfig(
        bf16=True, lr=LR, weight_decay=DECAY, clip_grad=CLIP, fused_backend=ours(device)
    )
    optimizer = get_megatron_optimizer(config, model, config_overrides={})
    for param in model:
        param.grad = torch.full_like(param, 1e-3)
    return optimizer


def verdicts(rate: Rate, numel: int, rounds: int) -> Section:
    """Milliseconds of a step by the device's clock, and until ``step()`` returns, for large and for
    many tensors."""
    section, device = (
        Section("Who waits: ms of a step, and host_ms until step() returns"),
        rate.device,
    )
    for kind in ("large", "small", "moe"):
        steps: dict[str, Step] = {}
        for label in ("verdict on the host", "verdict on the device"):
            name = f"{kind}: {label}"
            optimizer = _build(device, sizes_of(numel, kind))
            steps[name] = (
                with_host_verdict(optimizer) if label.endswith("host") else optimizer
            ).step
            for _ in range(4):
                steps[name]()
            if optimizer.verdict_device() is None and label == "verdict on the device":
                section.missing[name] = f"backend {ours(device)} needs it on the host"
                del steps[name]
        timings = alternate(device, steps, rounds, f"who waits, {kind}")
        section.take(timings, host_ms=lambda name, timing, s=steps: _host_ms(device, s[name]))
        del steps, optimizer
        clean(device)
    return section


def _host_ms(device: torch.device, step: Step) -> float:
    took = []
    for _ in range(5):
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        started = time.perf_counter()
        step()
        took.append(time.perf_counter() - started)
    return statistics.median(took) * 1e3


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


def synchronisations(device: torch.device) -> Section:
    """How often five steps made the host wait for the device, as torch's sync debug mode counts it;
    beside it the same with the verdict read by the host, and with an overflow among them: a skipped
    step that nothing expects is warned of, and who is to blame is looked for. Without a GPU nobody
    can tell: they only run."""
    section = Section("Host synchronisations in five steps")
    for name, settings in CASES.items():
        try:
            counted = {"count": _five(device, settings, False)}
            counted["with_overflow"] = _five(device, settings, False, overflow=True)
            counted["verdict_on_host"] = _five(device, settings, True)
        except ValueError as error:
            section.missing[name] = str(error)[:120]
            continue
        if device.type == "cuda":
            section.rows[name] = {key: float(value) for key, value in counted.items()}
        else:
            section.missing[name] = "ran; only a GPU tells who waits"
    return section


def _five(
    device: torch.device, settings: dict[str, Any], on_host: bool, overflow: bool = False
) -> int:
    torch.manual_seed(0)
    dtype = torch.float16 if settings.get("fp16") else torch.bfloat16
    model = nn.Sequential(nn.Linear(96, 160), nn.Linear(160, 64)).to(device, dtype)
    next(iter(model.parameters())).grad_norm_group = "first"  # type: ignore[attr-defined]
    optimizer = get_megatron_optimizer(
        OptimizerConfig(lr=1e-3, fused_backend=ours(device), **settings), model
    )
    if on_host:
        with_host_verdict(optimizer)
    grads: list[Tensor] = []
    for param in model.parameters():
        param.grad = torch.full_like(param, 1e-3)
        grads.append(param.grad)
    for _ in range(4):  # makes tables, compiles kernels
        optimizer.scale_loss(torch.ones((), device=device))
        optimizer.step()

    def steps() -> None:
        for number in range(5):
            grads[0].fill_(float("inf") if overflow and number == 2 else 1e-3)
            optimizer.scale_loss(torch.ones((), device=device))
            optimizer.step()

    return _count(device, steps)


def _count(device: torch.device, work: Step) -> int:
    if device.type != "cuda":
        work()
        return 0
    torch.cuda.synchronize(device)
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            work()
        return sum("synchroniz" in str(warning.message) for warning in caught)
    finally:
        torch.cuda.set_sync_debug_mode("default")
