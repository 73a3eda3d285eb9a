"""Many plans at once, over offload fractions and forms of state, and the smallest fraction that
fits, which ``optimizer_offload_fraction="auto"`` takes.
"""

from __future__ import annotations

import dataclasses
import itertools
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from mp_optim.config import OptimizerConfig
from mp_optim.config.state_forms import MOMENT_WORDS, REMAINDERS
from mp_optim.core import local_tensor
from mp_optim.core.names import named_params
from mp_optim.core.param_attributes import is_expert_param
from mp_optim.factory.build import device_of, with_data_parallel
from mp_optim.factory.memory_plan import (
    Layout,
    MemoryPlan,
    plan,
    plan_rank,
    specs_of,
    with_defaults,
)
from mp_optim.host.accelerator import accelerator_of
from mp_optim.host.torch_types import is_dtensor
from mp_optim.param_groups.overrides import ParamKey
from mp_optim.process_groups.agreement import agree_on_largest
from mp_optim.process_groups.process_groups import ProcessGroups

_log = logging.getLogger(__name__)


OFFLOADING = frozenset(
    (
        *("optimizer_cpu_offload", "optimizer_offload_fraction", "gpu_memory"),
        *("offload_mode", "offload_place", "stream_window_bytes"),
        *("optimizer_state_path", "release_gradients", "overlap_cpu_optimizer_d2h_h2d"),
        *("offload_bucket_bytes", "pin_cpu_grads", "pin_cpu_params"),
    )
)
"""Fields that are about what is offloaded."""
FORMS: Mapping[str, Mapping[str, Any]] = {
    "FP32": {},
    **{
        f"{words} moments, remainders": {
            "use_precision_aware_optimizer": True,
            "exp_avg_dtype": dtype,
            "exp_avg_sq_dtype": dtype,
        }
        for words, dtype in (("bf16", "bfloat16"), ("8-bit", "uint8"))
    },
}
"""Forms of optimizer state by name, as fields of the config."""

_FORM = (
    "use_precision_aware_optimizer",
    "exp_avg_dtype",
    "exp_avg_sq_dtype",
    "fp32_state_below",
    "store_param_remainders",
    "param_remainder_bits",
)


def form_of(config: OptimizerConfig) -> str:
    """What a config's form of optimizer state is called in a sweep."""
    dtypes = dict.fromkeys((config.exp_avg_dtype, config.exp_avg_sq_dtype))
    moments = " and ".join(MOMENT_WORDS[dtype] for dtype in dtypes)
    if config.keeps_remainders:
        return f"{moments} moments, {REMAINDERS[config.param_remainder_bits].words}"
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
        config, optimizer_cpu_offload=True, optimizer_offload_fraction=fraction, gpu_memory=None
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
            configs[name] = config if name == own else with_defaults(config, _FORM, **form)
        except ValueError:  # the rule has no such moments
            continue
    return [
        SweepRow(name, plan(specs, with_fraction(in_form, fraction), layout))
        for name, in_form in configs.items()
        for fraction in fractions
    ]


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
    # Nothing first: a little that is streamed, in large windows, may take more.
    low, high = 0, 0
    best = plan_of(with_fraction(config, 0.0))
    if best.accelerator.total > gpu_memory:
        high, best = steps, plan_of(with_fraction(config, 1.0))
    if best.accelerator.total > gpu_memory:
        raise ValueError(
            f"gpu_memory={in_words(gpu_memory)}: with the whole optimizer on the host the "
            f"accelerator still needs {in_words(best.accelerator.total)}, "
            f"{in_words(best.accelerator.model_params)} for parameters and "
            f"{in_words(best.accelerator.grads)} for gradients; "
            f"{_way_out(plan_of, config, gpu_memory)}"
        )
    while low < high:  # beyond that, more on the host is never more on the accelerator
        middle = (low + high) // 2
        tried = plan_of(with_fraction(config, middle / steps))
        if tried.accelerator.total <= gpu_memory:
            best, high = tried, middle
        else:
            low = middle + 1
    if host_memory is not None and best.host_total > host_memory:
        raise ValueError(
            f"host_memory={in_words(host_memory)}: offloading {best.fraction:g} of the optimizer, "
            f"the least that fits {in_words(gpu_memory)} of accelerator memory, takes "
            f"{in_words(best.host_total)} of the host; keep the state in fewer bits "
            "(use_precision_aware_optimizer), or on a disk (optimizer_state_path), or shard it "
            "over more ranks"
        )
    return best


def in_words(size: int) -> str:
    """Return a number of bytes in the largest unit of which there is one."""
    for unit, name in ((1 << 30, "GiB"), (1 << 20, "MiB")):
        if size >= unit:
            return f"{size / unit:.2f} {name}"
    return f"{size} bytes"


def _way_out(
    plan_of: Callable[[OptimizerConfig], MemoryPlan], config: OptimizerConfig, gpu_memory: int
) -> str:
    """What to do where parameters and gradients alone do not fit."""
    if gpu_memory < 1 << 20:
        return f"it is a number of bytes: write '{gpu_memory}GiB' if you meant GiB"
    released: dict[str, Any] = {"offload_mode": "overlap", "release_gradients": True}
    ways = [
        "train adapters (LoRA), whose frozen weights have no gradients",
        "keep weights in 8 bits (mp_optim.core.quantized.quantize_weights)",
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
            f"offload_mode='overlap'): {in_words(held)}, which {fits}",
        )
    return "; or ".join(ways)


SHARE = 0.75
"""What parameters, gradients and optimizer may take of an accelerator whose ``gpu_memory`` is not
given."""


def with_chosen_fraction(
    config: OptimizerConfig,
    chunks: Sequence[nn.Module],
    config_overrides: Mapping[ParamKey, Any] | None,
    process_groups: ProcessGroups,
    expert_predicate: Callable[..., bool] | None,
) -> OptimizerConfig:
    """The config with the smallest fraction, in 64ths, that leaves the accelerator within its
    limit.

    Ranks that share out a parameter (a distributed optimizer's, or a DTensor's) take the largest of
    theirs. A model on the host with no ``gpu_memory`` has nothing to be moved out of: 0.

    Raises:
        ValueError: it does not fit with everything on the host, on this rank or one of those,
            saying what is missing.
    """
    limit, device = config.gpu_memory, device_of(chunks)
    accelerator = accelerator_of(device)
    if limit is None and accelerator is not None:
        limit = int(SHARE * accelerator.memory_bytes(device))
    if limit is None:
        _log.info("optimizer_offload_fraction='auto': 0, the model is on the host")
        return with_fraction(config, 0.0)
    plan_of, sharing = rank_planner(
        config, chunks, config_overrides, process_groups, expert_predicate
    )
    fraction = agree_on_largest(
        sharing,
        "agreeing on optimizer_offload_fraction",
        lambda: least(plan_of, config, gpu_memory=limit).fraction,
    )
    found = plan_of(with_fraction(config, fraction))
    _log.info(
        "optimizer_offload_fraction='auto': %g, the least that keeps parameters, gradients and "
        "optimizer within %.2f GiB: %.2f GiB there, %.2f GiB on the host",
        found.fraction,
        limit / 2**30,
        found.accelerator.total / 2**30,
        found.host_total / 2**30,
    )
    return with_fraction(config, found.fraction)


def rank_planner(
    config: OptimizerConfig,
    chunks: Sequence[nn.Module],
    config_overrides: Mapping[ParamKey, Any] | None,
    process_groups: ProcessGroups,
    expert_predicate: Callable[..., bool] | None,
    param_groups: Sequence[Mapping[str, Any]] | None = None,
) -> tuple[Callable[[OptimizerConfig], MemoryPlan], list[ProcessGroup]]:
    """Return the plan of this rank's memory as a function of the config, and the process groups
    that share out its parameters.

    Args:
        config: decides whether the optimizer is distributed.
        param_groups: the groups of which ``chunks`` is the one :func:`container_of`, to be used
            instead of those made from the overrides.
    """
    is_expert = expert_predicate or is_expert_param
    held = list(named_params(chunks))  # frozen ones too
    metas = {id(param): _on_meta(param) for _, param in held}
    named = [(name, metas[id(param)]) for name, param in held]
    experts = {name for name, param in held if is_expert(param, name)}
    groups = None
    if param_groups is not None:
        own = iter(metas.values())  # of a module made by container_of, in the order of its groups
        groups = [{**each, "params": [next(own) for _ in each["params"]]} for each in param_groups]
    if config.is_distributed:
        process_groups = with_data_parallel(process_groups, bool(experts))
    dp, expert_dp = process_groups.dp, process_groups.expert_dp
    ranks, expert_ranks = (1 if group is None else group.size() for group in (dp, expert_dp))

    def plan_of(chosen: OptimizerConfig) -> MemoryPlan:
        return plan_rank(named, experts, chosen, ranks, expert_ranks, config_overrides, groups)

    mesh = next((param.device_mesh for _, param in held if is_dtensor(param)), None)
    sharing = [dp] if config.is_distributed else [] if mesh is None else mesh.get_all_groups()
    return plan_of, [group for group in sharing if group is not None]


def container_of(groups: Iterable[Mapping[str, Any]]) -> nn.Module:
    """Return a module of the parameters of some groups, in their order, for the planner."""
    container = nn.Module()
    params = itertools.chain.from_iterable(group["params"] for group in groups)
    for index, param in enumerate(params):
        held = param if isinstance(param, nn.Parameter) else nn.Parameter(param.detach())
        container.register_parameter(f"param{index}", held)
    return container


def _on_meta(param: Tensor) -> nn.Parameter:
    """What this rank holds of a parameter, without data, with the attributes that were set."""
    values = torch.empty_like(local_tensor(param), device="meta")
    meta = nn.Parameter(values, requires_grad=param.requires_grad)
    for name, value in vars(param).items():
        if not name.startswith("_"):
            setattr(meta, name, value)
    return meta
