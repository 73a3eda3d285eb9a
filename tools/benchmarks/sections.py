"""The measurements of the host: each function returns the rows of one table."""

from __future__ import annotations

import gc
from collections.abc import Callable
from functools import partial

import torch

from benchmarks import megatron
from benchmarks.opponents import Composite, deepspeed_cpu_adam, low_bit_adam, torch_adamw
from benchmarks.ours import ADAM_BYTES, KINDS, OURS, STEP_BYTES, our_kernel, our_optimizer, threads
from benchmarks.probe import Probe
from benchmarks.section import PIECE, Section, Step, clones, pieces, tensors
from benchmarks.timing import Timing, alternate, ratio
from mp_optim import MegatronOptimizer

FEW = 4
"""Pieces for contenders that are slow, and for those compared with them."""


def update_kernels(numel: int, rounds: int, probe: Probe) -> Section:
    section, sizes = Section("Update kernels alone, FP32 states"), pieces(numel)
    mains, grads = (tensors(sizes, torch.float32) for _ in range(2))
    halves, outputs = (tensors(sizes, torch.bfloat16) for _ in range(2))
    steps = section.built(
        {
            f"{OURS}, bf16 gradient in, bf16 param out": lambda: our_kernel(
                clones(mains), halves, outputs
            ),
            f"{OURS}, FP32 gradient": lambda: our_kernel(clones(mains), grads, None),
            "torch AdamW fused": lambda: torch_adamw(clones(mains), grads, fused=True),
            "torch AdamW foreach": lambda: torch_adamw(clones(mains), grads, foreach=True),
            "DeepSpeedCPUAdam": lambda: deepspeed_cpu_adam(clones(mains), grads),
        }
    )
    section.take(
        probe.alternate(steps, rounds, "update"),
        of_limit=lambda _, timing: timing.share(ADAM_BYTES * sum(sizes)),
        gparams=lambda _, timing: sum(sizes) / timing.median / 1e9,
    )
    return section


def full_step(numel: int, rounds: int, probe: Probe) -> Section:
    section, sizes = Section("Full mixed-precision step, clipping on"), pieces(numel)
    for dtype, label in ((torch.bfloat16, "bfloat16"), (torch.float16, "float16")):
        params, grads = (tensors(sizes, dtype) for _ in range(2))
        composite = Composite(clones(params), grads)
        steps: dict[str, Step] = {f"{OURS}, {label}": our_optimizer(params, grads).step}
        if dtype == torch.bfloat16:
            steps |= {
                "torch, bf16: upcast, clip_grad_norm_, fused AdamW, downcast": composite.usual,
                "torch, bf16: norm, upcast, fused AdamW with grad_scale, downcast": (
                    composite.best_torch
                ),
            }
        else:
            name = "torch, fp16: upcast, unscale, clip_grad_norm_, fused AdamW, downcast"
            steps[name] = partial(composite.usual, checks=True)
        _add_steps(section, probe, steps, rounds, sum(sizes))
        del composite, params, grads, steps
        gc.collect()
    with megatron.job_ended():
        params, grads = (tensors(sizes, torch.bfloat16) for _ in range(2))
        ours = our_optimizer(clones(params), grads).step
        for name, fused, dtype in (
            ("as built", False, torch.bfloat16),
            ("AdamW fused", True, torch.bfloat16),
            ("AdamW fused, FP32 main_grad", True, torch.float32),
        ):
            main_grads = [grad.to(dtype) for grad in grads]
            build = partial(megatron.megatron_step, clones(params), main_grads, fused=fused)
            if steps := section.built({f"Megatron-core, {name}": build}):
                _add_steps(section, probe, {OURS: ours, **steps}, rounds, sum(sizes))
                del section.rows[OURS]
            del build, steps
            gc.collect()
    return section


def _add_steps(
    section: Section, probe: Probe, steps: dict[str, Step], rounds: int, numel: int
) -> None:
    """Time steps in turn, and add their rows. The first step is ours."""
    timings = probe.alternate(steps, rounds, "full step")
    ours = timings[next(iter(steps))]
    section.take(
        timings,
        of_limit=lambda _, timing: timing.share(STEP_BYTES * numel),
        times_ours=lambda _, timing: ratio(timing, ours),
    )


def compact_states(numel: int, rounds: int) -> Section:
    section = Section("Compact states: the full step")
    params, grads = (tensors(pieces(numel), torch.bfloat16) for _ in range(2))
    optimizers: dict[str, MegatronOptimizer] = {}

    def build(name: str) -> Step:
        kind = KINDS[name.removeprefix(f"{OURS}, ")]
        optimizers[name] = our_optimizer(clones(params), grads, **kind)
        return optimizers[name].step

    def state_bytes(name: str, _: Timing) -> float:
        rows = optimizers[name].describe().rows
        return sum(row.bytes for row in rows) / sum(row.params for row in rows)

    names = [f"{OURS}, {kind}" for kind in KINDS]
    steps = section.built({name: partial(build, name) for name in names})
    timings = alternate(steps, rounds, "compact")
    first = next(iter(timings.values()))
    section.take(timings, speedup=lambda _, timing: ratio(first, timing), state_bytes=state_bytes)
    return section


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
    section = Section("8-bit and other compact moments, the update alone")
    sizes = [PIECE] * max(1, min(numel // PIECE, FEW))
    dtypes = {"FP32": torch.float32, "bf16": torch.bfloat16}
    pairs = {name: [tensors(sizes, dtype) for _ in range(2)] for name, dtype in dtypes.items()}

    def ours(dtype: torch.dtype) -> Step:
        halves, grads = pairs["bf16"]
        kind = {"exp_avg_dtype": dtype, "exp_avg_sq_dtype": dtype}
        return our_kernel(clones(pairs["FP32"][0]), grads, clones(halves), **kind)

    def theirs(kind: str, dtype: str) -> Step:
        return low_bit_adam(kind, clones(pairs[dtype][0]), pairs[dtype][1])

    moments = {"8-bit": torch.uint8, **{name: dtypes[name] for name in ("bf16", "FP32")}}
    builds = {f"{OURS}, {name} moments": partial(ours, each) for name, each in moments.items()}
    builds |= {f"{kind}, {dtype} params": partial(theirs, kind, dtype) for kind, dtype in LOW_BIT}
    timings = alternate(section.built(builds), max(3, min(rounds, 5)), "eight bit")
    columns: dict[str, Callable[[str, Timing], float]] = {
        "gparams": lambda _, timing: sum(sizes) / timing.median / 1e9
    }
    if (first := timings.get(f"{OURS}, 8-bit moments")) is not None:
        columns["of_ours"] = lambda _, timing: ratio(first, timing)
    section.take(timings, **columns)
    return section


def many_tensors(total: int, rounds: int) -> Section:
    section, small = Section("Many tensors: ms, and how many times one tensor's"), total // 10_000
    moe = [total // 4, total // 4] + [total // 512] * 256
    sizes = {"1 tensor": [total], f"10,000 of {small:,}": [small] * 10_000, "MoE mix": moe}
    contenders: dict[str, tuple[torch.dtype, Callable[..., Step]]] = {
        f"full step, {OURS}": (torch.bfloat16, lambda *both: our_optimizer(*both).step),
        f"update, {OURS}": (torch.float32, lambda *both: our_kernel(*both, None)),
        "update, torch fused": (torch.float32, partial(torch_adamw, fused=True)),
        "update, DeepSpeedCPUAdam": (torch.float32, deepspeed_cpu_adam),
    }
    for name, (dtype, build) in contenders.items():
        # The tensors are made when the contender is built, and freed after its rows.
        builds: dict[str, Callable[[], Step]] = {
            f"{name}: {label}": lambda of=numels, make=build, kind=dtype: make(
                tensors(of, kind, 0.02), tensors(of, kind, 1e-3)
            )
            for label, numels in sizes.items()
        }
        timings = alternate(section.built(builds), max(3, rounds // 2), name)
        if timings:
            first = timings[f"{name}: 1 tensor"]
            section.take(timings, times_one=lambda _, timing, one=first: ratio(timing, one))
        gc.collect()
    return section


def thread_scaling(numel: int, rounds: int, most: int) -> Section:
    section = Section("Threads: the full step")
    step = our_optimizer(*(tensors(pieces(numel), torch.bfloat16) for _ in range(2))).step
    for count in sorted({most} | {2**k for k in range(7) if 2**k <= most}):
        with threads(count):
            section.take(alternate({str(count): step}, rounds, f"{count} threads"))
        row = section.rows[str(count)]
        row["speedup"] = section.rows["1"]["ms"] / row["ms"]
    return section
