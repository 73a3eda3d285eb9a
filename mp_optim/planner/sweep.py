"""Many plans at once: over offload fractions and forms of state, and the smallest fraction that
fits."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mp_optim.config import OptimizerConfig
from mp_optim.planner.layout import Layout
from mp_optim.planner.memory import MemoryPlan, plan
from mp_optim.planner.params import specs_of
from mp_optim.planner.sharded import with_defaults

_COMPACT = {"use_precision_aware_optimizer": True}
_OFFLOADING = (
    "optimizer_cpu_offload",
    "optimizer_offload_fraction",
    "overlap_cpu_optimizer_d2h_h2d",
    "offload_mode",
    "offload_place",
    "offload_streamed_fraction",
    "stream_window_bytes",
    "optimizer_state_path",
    "release_gradients",
    "offload_bucket_bytes",
    "pin_cpu_grads",
    "pin_cpu_params",
    "gpu_memory",
)
FORMS: Mapping[str, Mapping[str, Any]] = {
    "FP32": {},
    "bf16 moments, remainders": {
        **_COMPACT,
        "exp_avg_dtype": "bfloat16",
        "exp_avg_sq_dtype": "bfloat16",
    },
    "8-bit moments, remainders": {
        **_COMPACT,
        "exp_avg_dtype": "uint8",
        "exp_avg_sq_dtype": "uint8",
    },
}
"""Forms of optimizer state by name, as fields of the config."""


@dataclass(frozen=True)
class SweepRow:
    """One plan of a sweep."""

    form: str
    plan: MemoryPlan


def with_fraction(config: OptimizerConfig, fraction: float) -> OptimizerConfig:
    """The config with another share of the optimizer on the host; fields that then do nothing are
    as by default."""
    if fraction == 0.0:
        return with_defaults(config, _OFFLOADING)
    return dataclasses.replace(
        config,
        optimizer_cpu_offload=True,
        optimizer_offload_fraction=fraction,
        gpu_memory=None,
    )


def sweep(
    source: Any,
    config: OptimizerConfig,
    layout: Layout | None = None,
    *,
    fractions: Sequence[float] = (0.0, 0.25, 0.5, 0.75, 1.0),
    forms: Mapping[str, Mapping[str, Any]] = FORMS,
) -> list[SweepRow]:
    """A plan for every form of state and every fraction, in this order."""
    specs = specs_of(source)
    rows = []
    for name, form in forms.items():
        in_form = dataclasses.replace(config, **form)
        for fraction in fractions:
            chosen = with_fraction(in_form, fraction)
            rows.append(SweepRow(name, plan(specs, chosen, layout)))
    return rows


def smallest_fraction(
    source: Any,
    config: OptimizerConfig,
    layout: Layout | None = None,
    *,
    gpu_memory: int,
    host_memory: int | None = None,
    steps: int = 64,
) -> MemoryPlan:
    """The plan with the smallest offload fraction, in ``steps``-ths, that fits.

    Args:
        gpu_memory: bytes on the accelerator for parameters, gradients and optimizer.
        host_memory: bytes on the host, if that is limited.

    Raises:
        ValueError: none fits, saying what is missing.
    """
    specs = specs_of(source)
    return least(
        lambda fraction: plan(specs, with_fraction(config, fraction), layout),
        gpu_memory=gpu_memory,
        host_memory=host_memory,
        steps=steps,
    )


def _way_out(gpu_memory: int) -> str:
    if gpu_memory < 1 << 20:
        return f"it is a number of bytes: write '{gpu_memory}GiB' if you meant GiB"
    return "shard the model over more ranks"


def least(
    plan_at: Callable[[float], MemoryPlan],
    *,
    gpu_memory: int,
    host_memory: int | None = None,
    steps: int = 64,
) -> MemoryPlan:
    """The same for any way to plan a fraction."""
    # Nothing first: a little that is streamed, in large windows, may take more.
    low, high = 0, 0
    best = plan_at(0.0)
    if best.accelerator.total > gpu_memory:
        high, best = steps, plan_at(1.0)
    if best.accelerator.total > gpu_memory:
        raise ValueError(
            f"gpu_memory={gpu_memory}: with the whole optimizer on the host the accelerator still "
            f"needs {best.accelerator.total} bytes; {_way_out(gpu_memory)}"
        )
    while low < high:  # beyond that, more on the host is never more on the accelerator
        middle = (low + high) // 2
        tried = plan_at(middle / steps)
        if tried.accelerator.total <= gpu_memory:
            best, high = tried, middle
        else:
            low = middle + 1
    if host_memory is not None and best.host_total > host_memory:
        raise ValueError(
            f"host_memory={host_memory}: offloading {best.fraction:g} of the optimizer, the least "
            "that "
            f"fits {gpu_memory} bytes of accelerator memory, takes {best.host_total} bytes of the "
            "host; "
            "keep the state in fewer bits (use_precision_aware_optimizer) or shard it over more "
            "ranks"
        )
    return best
