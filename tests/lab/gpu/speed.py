"""Kernels and full steps on the device, next to the device's copy rate and other libraries."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import torch

from benchmarks import megatron
from benchmarks.ours import ADAM_BYTES, OURS, STEP_BYTES, our_kernel, our_optimizer
from benchmarks.section import Section, Step, tensors
from benchmarks.timing import alternate, ratio
from lab.gpu.opponents import Opponent, opponents
from mp_optim.kernels import choose_backend

BACKENDS = ("triton", "transformer_engine", "apex", "torch", "reference")
LARGE = 1 << 26
"""Elements of the tensors that a large model is made of here."""


@dataclass
class Rate:
    """The device, and the best rate at which it reads and writes in place, measured once."""

    device: torch.device

    @cached_property
    def limit(self) -> float:
        """Bytes per second."""
        rows = rates(self, 5).rows.items()
        return max(row["gbs"] for name, row in rows if name != "fill") * 1e9


def rates(rate: Rate, rounds: int) -> Section:
    numel = 1 << (28 if rate.device.type == "cuda" else 22)
    flat, other = (torch.zeros(numel, device=rate.device), torch.zeros(numel, device=rate.device))
    probes: dict[str, tuple[Callable[[], object], int]] = {
        "x *= c": (lambda: flat.mul_(1.0001), 2 * flat.nbytes),
        "copy": (lambda: other.copy_(flat), 2 * flat.nbytes),
        "x += y": (lambda: flat.add_(other), 3 * flat.nbytes),
        "fill": (lambda: flat.zero_(), flat.nbytes),
    }
    runs = {name: run for name, (run, _) in probes.items()}
    section = Section("Memory of the device: GB/s of bytes asked for")
    section.take(
        alternate(runs, rounds, "rates", rate.device),
        gbs=lambda name, timing: probes[name][1] / timing.median / 1e9,
    )
    return section


def sizes_of(numel: int, kind: str) -> list[int]:
    if kind == "large":
        return [min(LARGE, numel)] * max(1, numel // LARGE)
    if kind == "small":
        return [max(1, numel // 10_000)] * min(10_000, numel)
    experts = [max(1, numel // 512)] * min(256, numel)
    return [max(1, numel // 4)] * 2 + experts


def _kernel(rate: Rate, backend: str, sizes: list[int], **precision: Any) -> Step:
    choose_backend(backend, rate.device)
    remainders = precision.get("store_param_remainders", False)
    main_dtype = torch.bfloat16 if remainders else torch.float32
    mains = tensors(sizes, main_dtype, 0.02, rate.device)
    grads = tensors(sizes, torch.bfloat16, 1e-3, rate.device)
    outputs = None if remainders else tensors(sizes, torch.bfloat16, 0.0, rate.device)
    return our_kernel(mains, grads, outputs, backend, **precision)


def full_step(rate: Rate, backend: str, sizes: list[int], wide: bool = False) -> Step:
    """Return our whole mixed-precision step, clipping on.

    Args:
        wide: read FP32 ``main_grad`` instead of bf16 gradients.
    """
    params = tensors(sizes, torch.bfloat16, 0.02, rate.device)
    grads = tensors(sizes, torch.float32 if wide else torch.bfloat16, 1e-3, rate.device)
    return our_optimizer(params, grads, fused_backend=backend).step


def _measure(rate: Rate, backend: str, sizes: list[int]) -> Step:
    grads = tensors(sizes, torch.bfloat16, 1e-3, rate.device)
    chosen = choose_backend(backend, rate.device)[0]
    return lambda: chosen.sum_of_squares(grads)


def kernels(rate: Rate, numel: int, rounds: int) -> Section:
    section, sizes = Section("Kernels alone, large tensors"), sizes_of(numel, "large")
    contenders: dict[str, tuple[Callable[[], Step], int]] = {}
    for backend in BACKENDS:
        update = partial(_kernel, rate, backend, sizes)
        contenders[f"{backend}: update"] = update, ADAM_BYTES
        contenders[f"{backend}: measure"] = partial(_measure, rate, backend, sizes), 2
    for name, dtype, num_bytes in (
        ("bf16 moments, remainder", torch.bfloat16, 18),
        ("8-bit moments, remainder", torch.uint8, 14),
    ):
        form = {"exp_avg_dtype": dtype, "exp_avg_sq_dtype": dtype, "store_param_remainders": True}
        update = partial(_kernel, rate, "triton", sizes, **form)
        contenders[f"triton: update, {name}"] = update, num_bytes
    for name, (build, num_bytes) in contenders.items():
        steps = section.built({name: build})
        total = num_bytes * sum(sizes)
        section.take(
            alternate(steps, rounds, name, rate.device),
            of_limit=lambda _, timing, size=total: size / timing.median / rate.limit,
        )
        del steps
        clean(rate.device)
    return section


def clean(device: torch.device) -> None:
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def steps(
    rate: Rate, numel: int, rounds: int, against: Iterable[Opponent] | None = None
) -> Section:
    """Time our full step in turn with each opponent that is installed.

    Args:
        against: the opponents; all of :func:`~lab.gpu.opponents.opponents` by default.
    """
    section = Section("Full mixed-precision step, large tensors, clipping on")
    with megatron.job_ended():
        for opponent in opponents() if against is None else against:
            _add_steps(section, rate, opponent, sizes_of(numel, "large"), rounds)
            clean(rate.device)
    return section


def _add_steps(
    section: Section, rate: Rate, opponent: Opponent, sizes: list[int], rounds: int
) -> None:
    params = tensors(sizes, torch.bfloat16, 0.02, rate.device)
    grads = tensors(sizes, torch.bfloat16, 1e-3, rate.device)
    contenders = section.built({opponent.name: lambda: opponent.build(params, grads)})
    if not contenders:
        return
    backend = ours(rate.device)
    name = f"{OURS}, {backend}, next to {opponent.name}"
    contenders[name] = full_step(rate, backend, sizes, opponent.wide)
    num_bytes = (STEP_BYTES + (4 if opponent.wide else 0)) * sum(sizes)
    for behind in (False, True):
        label = ", behind other work" if behind else ""
        found = alternate(contenders, rounds, f"steps{label}", rate.device, behind)
        section.take(
            {f"{each}{label}": timing for each, timing in found.items()},
            of_limit=lambda _, timing: num_bytes / timing.median / rate.limit,
            times_ours=lambda _, timing, o=found[name]: ratio(timing, o),
        )


def ours(device: torch.device) -> str:
    return "triton" if device.type == "cuda" else "auto"


def many(rate: Rate, numel: int, rounds: int) -> Section:
    section = Section("Many tensors: the full step, relative to large tensors")
    for backend in ("triton", "torch") if rate.device.type == "cuda" else ("auto",):
        kinds = {f"{backend}: {kind}": sizes_of(numel, kind) for kind in ("large", "small", "moe")}
        builds = {name: partial(full_step, rate, backend, sizes) for name, sizes in kinds.items()}
        timings = alternate(section.built(builds), rounds, f"many, {backend}", rate.device)
        first = timings.get(f"{backend}: large")
        times = {"times_one": lambda _, timing, one=first: ratio(timing, one)} if first else {}
        section.take(timings, **times)
        clean(rate.device)
    return section
