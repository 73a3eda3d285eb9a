"""What is measured: each function returns the rows of one table."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import torch

from benchmarks import megatron, opponents
from benchmarks.contenders import PIECE, Contenders, tensors
from benchmarks.opponents import Composite
from benchmarks.ours import (
    ADAM_BYTES,
    KINDS,
    OURS,
    STEP_BYTES,
    our_kernel,
    our_optimizer,
    our_step,
    threads,
)
from benchmarks.probe import Probe
from benchmarks.section import Section
from benchmarks.timing import Timing, alternate, ratio
from mp_optim import MegatronOptimizer

FEW = 4
"""Pieces for contenders that are slow, and for those compared with them."""


def update_kernels(numel: int, rounds: int, probe: Probe) -> Section:
    count = numel // PIECE
    mains, grads = (tensors(PIECE, count, torch.float32), tensors(PIECE, count, torch.float32))
    half_grads, outputs = (
        tensors(PIECE, count, torch.bfloat16),
        tensors(PIECE, count, torch.bfloat16),
    )
    field_ = Contenders()
    field_.add(
        f"{OURS}, bf16 gradient in, bf16 param out",
        lambda: our_kernel([main.clone() for main in mains], half_grads, outputs),
    )
    field_.add(
        f"{OURS}, FP32 gradient", lambda: our_kernel([main.clone() for main in mains], grads, None)
    )
    field_.add(
        "torch AdamW fused",
        lambda: opponents.torch_adamw([m.clone() for m in mains], grads, fused=True),
    )
    field_.add(
        "torch AdamW foreach",
        lambda: opponents.torch_adamw([m.clone() for m in mains], grads, foreach=True),
    )
    field_.add(
        "DeepSpeedCPUAdam", lambda: opponents.deepspeed_cpu_adam([m.clone() for m in mains], grads)
    )
    timings = probe.alternate(field_.steps, rounds, "update")
    section = Section("Update kernels alone, FP32 states", missing=field_.missing)
    total = count * PIECE
    section.take(
        timings,
        of_limit=lambda name, t: t.share(ADAM_BYTES * total),
        gparams=lambda name, t: total / t.median / 1e9,
    )
    return section


_OF_TORCH = {
    "usual_bf16": "torch, bf16: upcast, clip_grad_norm_, fused AdamW, downcast",
    "usual_fp16": "torch, fp16: upcast, unscale, clip_grad_norm_, fused AdamW, downcast",
    "best_torch": "torch, bf16: norm, upcast, fused AdamW with grad_scale, downcast",
}


def full_step(numel: int, rounds: int, probe: Probe) -> Section:
    count = numel // PIECE
    section = Section("Full mixed-precision step, clipping on")
    for dtype, names in (
        (torch.bfloat16, ("usual_bf16", "best_torch")),
        (torch.float16, ("usual_fp16",)),
    ):
        params, grads = tensors(PIECE, count, dtype), tensors(PIECE, count, dtype)
        ours = f"{OURS}, {str(dtype).removeprefix('torch.')}"
        composite = Composite([param.clone() for param in params], grads)
        steps = {
            ours: our_step(params, grads),
            **{_OF_TORCH[name]: getattr(composite, name) for name in names},
        }
        timings = probe.alternate(steps, rounds, "full step")
        section.take(
            timings,
            of_limit=lambda name, t: t.share(STEP_BYTES * count * PIECE),
            times_ours=lambda name, t, ours=ours, timings=timings: ratio(t, timings[ours]),
        )  # type: ignore[misc]
        del composite, params, grads, steps
        gc.collect()
    with megatron.job_ended():
        _add_megatron(section, numel, rounds, probe)
    return section


def _add_megatron(section: Section, numel: int, rounds: int, probe: Probe) -> None:
    count = numel // PIECE
    params, grads = (tensors(PIECE, count, torch.bfloat16) for _ in range(2))
    ours = our_step([param.clone() for param in params], grads)
    for name, fused, dtype in (
        ("as built", False, torch.bfloat16),
        ("AdamW fused", True, torch.bfloat16),
        ("AdamW fused, FP32 main_grad", True, torch.float32),
    ):
        field_ = Contenders()
        field_.add(
            f"Megatron-core, {name}",
            lambda fused=fused, dtype=dtype: megatron.megatron_step(  # type: ignore[misc]
                [param.clone() for param in params], [grad.to(dtype) for grad in grads], fused=fused
            ),
        )
        section.missing |= field_.missing
        if field_.steps:
            steps = {OURS: ours, **field_.steps}
            timings = probe.alternate(steps, rounds, "Megatron-core")
            first = timings.pop(OURS)
            section.take(
                timings,
                of_limit=lambda _, t: t.share(STEP_BYTES * count * PIECE),
                times_ours=lambda _, t, first=first: ratio(t, first),
            )  # type: ignore[misc]
        del field_
        gc.collect()


def compact_states(numel: int, rounds: int) -> Section:
    count = numel // PIECE
    params, grads = (tensors(PIECE, count, torch.bfloat16) for _ in range(2))
    optimizers: dict[str, MegatronOptimizer] = {}
    field_ = Contenders()

    def build(name: str, kind: dict[str, Any]) -> Callable[[], object]:
        optimizers[name] = our_optimizer([param.clone() for param in params], grads, **kind)
        return optimizers[name].step

    for kind_name, kind in KINDS.items():
        name = f"{OURS}, {kind_name}"
        field_.add(name, lambda name=name, kind=kind: build(name, kind))  # type: ignore[misc]
    timings = alternate(field_.steps, rounds, "compact")
    section = Section("Compact states: the full step", missing=field_.missing)
    first = next(iter(timings.values()))
    section.take(
        timings,
        speedup=lambda name, t: ratio(first, t),
        state_bytes=lambda name, t: _state_bytes(optimizers[name]),
    )
    return section


def _state_bytes(optimizer: MegatronOptimizer) -> float:
    rows = optimizer.describe().rows
    return sum(row.bytes for row in rows) / sum(row.params for row in rows)


LOW_BIT = (
    ("torchao AdamW8bit", "FP32"),
    ("torchao AdamWFp8", "FP32"),
    ("torchao AdamW4bit", "FP32"),
    ("bitsandbytes AdamW8bit", "FP32"),
    ("torchao AdamW8bit", "bf16"),
    ("torchao AdamWFp8", "bf16"),
    ("torchao _AdamW", "bf16"),
    ("bitsandbytes AdamW8bit", "bf16"),
)
"""Optimizers of others and the dtype of the params they step; ``_AdamW`` has moments of the dtype
of the params."""


def eight_bit(numel: int, rounds: int) -> Section:
    count = max(1, min(numel // PIECE, FEW))
    mains, grads = (tensors(PIECE, count, torch.float32), tensors(PIECE, count, torch.float32))
    half_mains, half_grads = (
        tensors(PIECE, count, torch.bfloat16),
        tensors(PIECE, count, torch.bfloat16),
    )
    field_ = Contenders()
    for name, dtype in (("8-bit", torch.uint8), ("bf16", torch.bfloat16), ("FP32", torch.float32)):
        field_.add(
            f"{OURS}, {name} moments",
            lambda dtype=dtype: our_kernel(  # type: ignore[misc]
                [main.clone() for main in mains],
                half_grads,
                [half.clone() for half in half_mains],
                exp_avg_dtype=dtype,
                exp_avg_sq_dtype=dtype,
            ),
        )
    pairs = {"FP32": (mains, grads), "bf16": (half_mains, half_grads)}
    for kind, label in LOW_BIT:
        field_.add(
            f"{kind}, {label} params",
            lambda kind=kind, pair=pairs[label]: opponents.low_bit_adam(  # type: ignore[misc]
                kind, [param.clone() for param in pair[0]], pair[1]
            ),
        )
    timings = alternate(field_.steps, max(3, min(rounds, 5)), "eight bit")
    section = Section("8-bit and other compact moments, the update alone", missing=field_.missing)
    columns: dict[str, Callable[[str, Timing], float]] = {
        "gparams": lambda _, t: count * PIECE / t.median / 1e9
    }
    if (ours := timings.get(f"{OURS}, 8-bit moments")) is not None:
        columns["of_ours"] = lambda _, t: ratio(ours, t)
    section.take(timings, **columns)
    return section


def many_tensors(total: int, rounds: int) -> Section:
    small = total // 10_000
    moe = [total // 4, total // 4] + [total // 512] * 256
    sizes = {"1 tensor": [total], f"10,000 of {small:,}": [small] * 10_000, "MoE mix": moe}
    section = Section("Many tensors: ms, and how many times one tensor's")
    for name, build in {
        "full step, " + OURS: our_step,
        "update, " + OURS: None,
        "update, torch fused": None,
        "update, DeepSpeedCPUAdam": None,
    }.items():
        field_ = Contenders()
        for label, numels in sizes.items():
            field_.add(
                label, lambda name=name, build=build, numels=numels: _of_sizes(name, build, numels)
            )  # type: ignore[misc]
        timings = alternate(field_.steps, max(3, rounds // 2), name)
        section.missing |= {f"{name}, {label}": why for label, why in field_.missing.items()}
        for label, timing in timings.items():
            section.rows[f"{name}: {label}"] = {
                "ms": timing.median * 1e3,
                "spread": timing.spread,
                "times_one": ratio(timing, timings["1 tensor"]),
            }
        del field_
        gc.collect()
    return section


def _of_sizes(name: str, build: Any, numels: list[int]) -> Callable[[], object]:
    if build is not None:
        params = [torch.full((n,), 0.02, dtype=torch.bfloat16) for n in numels]
        return build(params, [torch.full_like(param, 1e-3) for param in params])  # type: ignore[no-any-return]
    mains, grads = (
        [torch.full((n,), 0.02) for n in numels],
        [torch.full((n,), 1e-3) for n in numels],
    )
    if OURS in name:
        return our_kernel(mains, grads, None)
    return (
        opponents.torch_adamw(mains, grads, fused=True)
        if "torch" in name
        else opponents.deepspeed_cpu_adam(mains, grads)
    )


def thread_scaling(numel: int, rounds: int, most: int) -> Section:
    params, grads = (tensors(PIECE, numel // PIECE, torch.bfloat16) for _ in range(2))
    step = our_step(params, grads)
    section = Section("Threads: the full step")
    for count in sorted({1, 2, most} | {2**k for k in range(1, 7) if 2**k <= most}):
        if count <= most:
            with threads(count):
                timing = alternate({str(count): step}, rounds, f"{count} threads")[str(count)]
            first = section.rows.get("1", {"ms": timing.median * 1e3})["ms"]
            section.rows[str(count)] = {
                "ms": timing.median * 1e3,
                "spread": timing.spread,
                "speedup": first / (timing.median * 1e3),
            }
    return section
