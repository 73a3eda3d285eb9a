"""The smallest offload fraction that fits this rank, for ``optimizer_offload_fraction="auto"``."""

from __future__ import annotations

import dataclasses
import itertools
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from mp_optim.config import OptimizerConfig
from mp_optim.core import local_tensor
from mp_optim.core.names import named_params
from mp_optim.core.param_attributes import is_expert_param
from mp_optim.factory.build import device_of, with_data_parallel
from mp_optim.factory.memory_plan import MemoryPlan, plan_rank, with_defaults
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


def with_fraction(config: OptimizerConfig, fraction: float) -> OptimizerConfig:
    """The config with another share of the optimizer on the host; fields that then do nothing are
    as by default."""
    if fraction == 0.0:
        return with_defaults(config, OFFLOADING)
    return dataclasses.replace(
        config, optimizer_cpu_offload=True, optimizer_offload_fraction=fraction, gpu_memory=None
    )


def least(
    plan_of: Callable[[OptimizerConfig], MemoryPlan],
    config: OptimizerConfig,
    gpu_memory: int,
    steps: int = 64,
) -> MemoryPlan:
    """Return the plan with the smallest offload fraction, in ``steps``-ths, that fits.

    Args:
        plan_of: returns the plan of a config.
        gpu_memory: bytes on the accelerator for parameters, gradients and optimizer.

    Raises:
        ValueError: none fits, with the bytes that are missing.
    """
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
        lambda: least(plan_of, config, limit).fraction,
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
