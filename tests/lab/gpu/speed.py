"""Kernels and full steps on the device, against the device's copy rate and against what else there
is."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks import megatron
from benchmarks.contenders import Contenders
from benchmarks.opponents import BETAS, CLIP, DECAY, EPS, LR
from benchmarks.ours import ADAM_BYTES, OURS, STEP_BYTES
from benchmarks.section import Section
from benchmarks.timing import ratio
from lab.gpu.opponents import Opponent, opponents
from lab.gpu.timing import alternate
from mp_optim import FusedAdam, OptimizerConfig, get_megatron_optimizer
from mp_optim.core import Slot, SlotUpdate, SlotUpdates
from mp_optim.kernels import choose_backend

BACKENDS = ("triton", "transformer_engine", "apex", "torch", "reference")
LARGE = 1 << 26
"""Elements of the tensors that a large model is made of here."""


class Rate:
    """The device and the best rate at which it reads and writes in place, measured once, bytes per
    second."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._limit: float | None = None

    @property
    def limit(self) -> float:
        if self._limit is None:
            rates(self, 5)
        assert self._limit is not None
        return self._limit

    @limit.setter
    def limit(self, value: float) -> None:
        self._limit = value


def rates(rate: Rate, rounds: int) -> Section:
    numel = 1 << (28 if rate.device.type == "cuda" else 22)
    flat, other = (torch.zeros(numel, device=rate.device), torch.zeros(numel, device=rate.device))
    probes: dict[str, tuple[Callable[[], object], int]] = {
        "x *= c": (lambda: flat.mul_(1.0001), 2 * flat.nbytes),
        "copy": (lambda: other.copy_(flat), 2 * flat.nbytes),
        "x += y": (lambda: flat.add_(other), 3 * flat.nbytes),
        "fill": (lambda: flat.zero_(), flat.nbytes),
    }
    timings = alternate(
        rate.device, {name: run for name, (run, _) in probes.items()}, rounds, "rates"
    )
    section = Section("Memory of the device: GB/s of bytes asked for")
    section.take(timings, gbs=lambda name, timing: probes[name][1] / timing.median / 1e9)
    rate.limit = max(row["gbs"] for name, row in section.rows.items() if name != "fill") * 1e9
    return section


def sizes_of(numel: int, kind: str) -> list[int]:
    if kind == "large":
        return [min(LARGE, numel)] * max(1, numel // LARGE)
    if kind == "small":
        return [max(1, numel // 10_000)] * min(10_000, numel)
    experts = [max(1, numel // 512)] * min(256, numel)
    return [max(1, numel // 4)] * 2 + experts


def _tensors(
    device: torch.device, sizes: list[int], dtype: torch.dtype, value: float
) -> list[Tensor]:
    return [torch.full((size,), value, dtype=dtype, device=device) for size in sizes]


def _kernel(rate: Rate, backend: str, sizes: list[int], **precision: Any) -> Callable[[], object]:
    choose_backend(backend, rate.device)
    remainders = precision.get("store_param_remainders", False)
    mains = _tensors(rate.device, sizes, torch.bfloat16 if remainders else torch.float32, 0.02)
    optimizer = FusedAdam(
        mains, lr=LR, betas=BETAS, eps=EPS, weight_decay=DECAY, backend=backend, **precision
    )
    found = optimizer.executor.backend_for(rate.device)[0].name
    if found != backend:
        raise RuntimeError(f"stepped by {found}")
    grads = _tensors(rate.device, sizes, torch.bfloat16, 1e-3)
    outputs = (
        [None] * len(sizes) if remainders else _tensors(rate.device, sizes, torch.bfloat16, 0.0)
    )
    updates = SlotUpdates.of(
        [
            SlotUpdate(Slot(0, index), grad, 0.5, output)
            for index, (grad, output) in enumerate(zip(grads, outputs, strict=True))
        ]
    )
    return lambda: optimizer.step_slots(updates)


def full_step(
    rate: Rate, backend: str, sizes: list[int], wide: bool = False, **settings: Any
) -> Callable[[], object]:
    """Return our whole mixed-precision step, clipping on.

    Args:
        wide: read FP32 ``main_grad`` instead of bf16 gradients.
    """
    config = OptimizerConfig(
        bf16=True,
        lr=LR,
        adam_beta1=BETAS[0],
        adam_beta2=BETAS[1],
        adam_eps=EPS,
        weight_decay=DECAY,
        clip_grad=CLIP,
        fused_backend=backend,
        **settings,
    )
    model = nn.ParameterList(
        [nn.Parameter(p) for p in _tensors(rate.device, sizes, torch.bfloat16, 0.02)]
    )
    optimizer = get_megatron_optimizer(config, model, config_overrides={})
    for param in model:
        if wide:
            param.main_grad = torch.full_like(param, 1e-3, dtype=torch.float32)  # type: ignore[attr-defined]
        else:
            param.grad = torch.full_like(param, 1e-3)
    return optimizer.step


def _measure(rate: Rate, backend: str, sizes: list[int]) -> Callable[[], object]:
    grads = _tensors(rate.device, sizes, torch.bfloat16, 1e-3)
    chosen = choose_backend(backend, rate.device)[0]
    return lambda: chosen.sum_of_squares(grads)


def kernels(rate: Rate, numel: int, rounds: int) -> Section:
    section, sizes = Section("Kernels alone, large tensors"), sizes_of(numel, "large")
    total = sum(sizes)
    for backend in BACKENDS:
        for label, size, build in (
            ("update", ADAM_BYTES, lambda b=backend: _kernel(rate, b, sizes)),
            ("measure", 2, lambda b=backend: _measure(rate, b, sizes)),
        ):
            _add(section, rate, {f"{backend}: {label}": (build, size * total)}, rounds)
    compact = {
        "bf16 moments, remainder": ("bfloat16", 18),
        "8-bit moments, remainder": ("uint8", 14),
    }
    for name, (dtype, size) in compact.items():
        moments = {
            "exp_avg_dtype": getattr(torch, dtype),
            "exp_avg_sq_dtype": getattr(torch, dtype),
        }
        _add(
            section,
            rate,
            {
                f"triton: update, {name}": (
                    lambda m=moments: _kernel(
                        rate, "triton", sizes, store_param_remainders=True, **m
                    ),
                    size * total,
                )
            },
            rounds,
        )
    return section


def _add(
    section: Section, rate: Rate, builds: dict[str, tuple[Callable[[], Any], int]], rounds: int
) -> None:
    field = Contenders()
    for name, (build, _) in builds.items():
        field.add(name, build)
    timings = alternate(rate.device, field.steps, rounds, ", ".join(builds))
    section.missing |= field.missing
    section.take(
        timings, of_limit=lambda name, timing: builds[name][1] / timing.median / rate.limit
    )
    del field
    clean(rate.device)


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
    backend, field = ours(rate.device), Contenders()
    params = _tensors(rate.device, sizes, torch.bfloat16, 0.02)
    field.add(opponent.name, lambda: opponent.build(params))
    section.missing |= field.missing
    if not field.steps:
        return
    name = f"{OURS}, {backend}, next to {opponent.name}"
    field.steps[name] = full_step(rate, backend, sizes, opponent.wide)
    num_bytes = (STEP_BYTES + (4 if opponent.wide else 0)) * sum(sizes)
    for behind in (False, True):
        label = ", behind other work" if behind else ""
        found = alternate(rate.device, field.steps, rounds, f"steps{label}", behind)
        section.take(
            {f"{each}{label}": timing for each, timing in found.items()},
            of_limit=lambda _, timing: num_bytes / timing.median / rate.limit,
            times_ours=lambda _, timing, o=found[name]: ratio(timing, o),
        )


def ours(device: torch.device) -> str:
    return "triton" if device.type == "cuda" else "auto"


def many(rate: Rate, numel: int, rounds: int) -> Section:
    section = Section("Many tensors: the full step, and how many times large tensors'")
    for backend in ("triton", "torch") if rate.device.type == "cuda" else ("auto",):
        field = Contenders()
        for kind in ("large", "small", "moe"):
            field.add(
                f"{backend}: {kind}",
                lambda k=kind, b=backend: full_step(rate, b, sizes_of(numel, k)),
            )
        timings = alternate(rate.device, field.steps, rounds, f"many, {backend}")
        section.missing |= field.missing
        first = timings.get(f"{backend}: large")
        section.take(
            timings,
            **({"times_one": lambda name, timing, f=first: ratio(timing, f)} if first else {}),
        )
        del field
        clean(rate.device)
    return section
