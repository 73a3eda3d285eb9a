"""Many plans at once: over offload fractions and forms of state, and the smallest fraction that
fits."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from mp_optim.config import OptimizerConfig
from mp_optim.config.rules import UINT4
from mp_optim.planner.layout import Layout
from mp_optim.planner.memory import MemoryPlan, plan
from mp_optim.planner.params import specs_of
from mp_optim.planner.sharded import with_defaults

_COMPACT = {"use_precision_aware_optimizer": True}
OFFLOADING = frozenset(
    (
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
)
"""Fields that are about what is offloaded."""
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

_FORM = (
    "use_precision_aware_optimizer",
    "exp_avg_dtype",
    "exp_avg_sq_dtype",
    "store_param_remainders",
    "param_remainder_bits",
)
_BITS: Mapping[Any, str] = {
    torch.float32: "FP32",
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.uint8: "8-bit",
    UINT4: "4-bit",
}


def form_of(config: OptimizerConfig) -> str:
    """What a config's form of optimizer state is called in a sweep."""
    dtypes = dict.fromkeys((config.exp_avg_dtype, config.exp_avg_sq_dtype))
    moments = " and ".join(_BITS[dtype] for dtype in dtypes)
    if config.keeps_remainders:
        eight = "8-bit " if config.param_remainder_bits == 8 else ""
        return f"{moments} moments, {eight}remainders"
    return "FP32" if moments == "FP32" else f"{moments} moments"


@dataclass(frozen=True)
class SweepRow:
    """One plan of a sweep."""

    form: str
    plan: MemoryPlan


def with_fraction(config: OptimizerConfig, fraction: float) -> OptimizerConfig:
    """The config with another share of the optimizer on the host; fields that then do nothing are
    as by default."""
    if fraction == 0.0:
        return with_defaults(config, OFFLOADING)
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
    """A plan for every form of state and every fraction, in this order: first the config's own
    form, if it is none of these, and without those that the config's rule does not have."""
    specs = specs_of(source)
    own = form_of(config)
    configs = {} if own in forms else {own: config}
    for name, form in forms.items():
        try:
            configs[name] = config if name == own else with_form(config, form)
        except ValueError:  # the rule has no such moments
            continue
    return [
        SweepRow(name, plan(specs, with_fraction(in_form, fraction), layout))
        for name, in_form in configs.items()
        for fraction in fractions
    ]


def with_form(config: OptimizerConfig, form: Mapping[str, Any]) -> OptimizerConfig:
    """The config with its state in another form, one of :data:`FORMS`.

    Raises:
        ValueError: its rule has no such state.
    """
    specs = [spec for spec in dataclasses.fields(config) if spec.name in _FORM]
    plain: dict[str, Any] = {spec.name: spec.default for spec in specs}
    return dataclasses.replace(config, **{**plain, **form})


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
        lambda chosen: plan(specs, chosen, layout),
        config,
        gpu_memory=gpu_memory,
        host_memory=host_memory,
        steps=steps,
    )


def least(
    plan_of: Callable[[OptimizerConfig], MemoryPlan],
    config: OptimizerConfig,
    *,
    gpu_memory: int,
    host_memory: int | None = None,
    steps: int = 64,
) -> MemoryPlan:
    """The same for any way to plan a config."""

    def plan_at(fraction: float) -> MemoryPlan:
        return plan_of(with_fraction(config, fraction))

    # Nothing first: a little that is streamed, in large windows, may take more.
    low, high = 0, 0
    best = plan_at(0.0)
    if best.accelerator.total > gpu_memory:
        high, best = steps, plan_at(1.0)
    if best.accelerator.total > gpu_memory:
        raise ValueError(
            f"gpu_memory={_words(gpu_memory)}: with the whole optimizer on the host the "
            f"accelerator still needs {_words(best.accelerator.total)}, "
            f"{_words(best.accelerator.model_params)} for parameters and "
            f"{_words(best.accelerator.grads)} for gradients; "
            f"{_way_out(plan_of, config, gpu_memory)}"
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
            f"host_memory={_words(host_memory)}: offloading {best.fraction:g} of the optimizer, "
            f"the least that fits {_words(gpu_memory)} of accelerator memory, takes "
            f"{_words(best.host_total)} of the host; keep the state in fewer bits "
            "(use_precision_aware_optimizer), or on a disk (optimizer_state_path), or shard it "
            "over more ranks"
        )
    return best


def _words(size: int) -> str:
    return f"{size / 2**30:.2f} GiB" if size >= 2**24 else f"{size} bytes"


def _way_out(
    plan_of: Callable[[OptimizerConfig], MemoryPlan],
    config: OptimizerConfig,
    gpu_memory: int,
) -> str:
    """What to do where parameters and gradients alone do not fit."""
    if gpu_memory < 1 << 20:
        return f"it is a number of bytes: write '{gpu_memory}GiB' if you meant GiB"
    released: dict[str, Any] = {"offload_mode": "overlap", "release_gradients": True}
    ways = [
        "train adapters (LoRA), whose frozen weights have no gradients",
        "keep weights in 8 bits (mp_optim.quantized.quantize_weights)",
        "shard the model over more ranks",
    ]
    try:
        offloaded = with_fraction(config, 1.0)
        held = plan_of(dataclasses.replace(offloaded, **released)).accelerator.total
    except ValueError:  # not with a distributed optimizer, or with what is streamed
        return "; or ".join(ways)
    if not config.release_gradients:
        fits = "fits" if held <= gpu_memory else "is still too much"
        ways.insert(
            0,
            "let gradients leave during backward (release_gradients=True with "
            f"offload_mode='overlap'): {_words(held)}, which {fits}",
        )
    return "; or ".join(ways)
