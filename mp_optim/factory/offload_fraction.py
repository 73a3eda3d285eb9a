"""Choice of the smallest offload fraction that fits, for ``optimizer_offload_fraction="auto"``."""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace

import torch
from torch import nn
from torch.distributed import ProcessGroup

from mp_optim.config import OptimizerConfig
from mp_optim.core import local_tensor
from mp_optim.core.names import named_params
from mp_optim.core.param_attributes import is_expert_param
from mp_optim.factory.build import StackRequest, with_data_parallel
from mp_optim.factory.memory_plan import MemoryPlan, plan_rank, with_defaults
from mp_optim.host.accelerator import accelerator_of
from mp_optim.host.torch_types import is_dtensor
from mp_optim.process_groups.agreement import agree_on_largest

_log = logging.getLogger(__name__)


OFFLOADING = frozenset(
    (
        *("optimizer_cpu_offload", "optimizer_offload_fraction", "gpu_memory"),
        *("offload_mode", "offload_place", "stream_window_bytes"),
        *("optimizer_state_path", "release_gradients", "overlap_cpu_optimizer_d2h_h2d"),
        *("offload_bucket_bytes", "pin_cpu_grads", "pin_cpu_params"),
    )
)
"""Fields of the config that only offloading reads."""


def with_fraction(config: OptimizerConfig, fraction: float) -> OptimizerConfig:
    """Return the config with another offload fraction. The fraction 0.0 also resets all fields that
    only offloading reads.

    Args:
        config: config to change.
        fraction: share of the parameter elements to offload, 0.0 to 1.0.
    """
    if fraction == 0.0:
        return with_defaults(config, OFFLOADING)
    return replace(
        config, optimizer_cpu_offload=True, optimizer_offload_fraction=fraction, gpu_memory=None
    )


_STEPS = 64
"""The tried fractions are the multiples of 1 / 64 from 0 to 1."""


def least(
    plan_of: Callable[[OptimizerConfig], MemoryPlan], config: OptimizerConfig, gpu_memory: int
) -> MemoryPlan:
    """Return the plan with the smallest offload fraction, in 64ths, that fits.

    Args:
        plan_of: function from a config to its plan.
        config: config to change the fraction of.
        gpu_memory: bytes on the accelerator for parameters, gradients and optimizer.

    Raises:
        ValueError: no fraction fits; the message has the needed bytes and other settings.
    """
    # Try 0.0 separately. A small streamed share with large windows may need more memory than no
    # offloading.
    low, high = 0, 0
    best = plan_of(with_fraction(config, 0.0))
    if best.accelerator.total > gpu_memory:
        high, best = _STEPS, plan_of(with_fraction(config, 1.0))
    if best.accelerator.total > gpu_memory:
        if gpu_memory < 1 << 20:
            raise ValueError(
                f"gpu_memory={gpu_memory}: this is a number of bytes; write '{gpu_memory}GiB' for "
                "GiB"
            )
        advice = ""
        # Give no advice if the config refuses it as a contradiction, such as released gradients
        # with a distributed optimizer.
        with suppress(ValueError):
            offloaded = with_fraction(config, 1.0)
            plan = plan_of(replace(offloaded, offload_mode="overlap", release_gradients=True))
            released = plan.accelerator.total
            if released < best.accelerator.total:
                advice = (
                    "free gradients during backward (offload_mode='overlap', "
                    f"release_gradients=True), which needs {in_words(released)}; "
                )
        raise ValueError(
            f"gpu_memory={in_words(gpu_memory)}: with the whole optimizer on the host the "
            f"accelerator still needs {in_words(best.accelerator.total)}, "
            f"{in_words(best.accelerator.model_params)} for parameters and "
            f"{in_words(best.accelerator.grads)} for gradients; "
            f"{advice}train adapters (LoRA), because frozen weights have no gradients; keep "
            "weights in 8 bits (mp_optim.apps.float8.quantize_weights); or shard the model over "
            "more ranks"
        )
    # Bisect, because above 0.0 a larger fraction never needs more accelerator memory.
    while low < high:
        middle = (low + high) // 2
        tried = plan_of(with_fraction(config, middle / _STEPS))
        if tried.accelerator.total <= gpu_memory:
            best, high = tried, middle
        else:
            low = middle + 1
    return best


def in_words(size: int) -> str:
    """Return a number of bytes as text, in GiB, MiB or bytes."""
    for unit, name in ((1 << 30, "GiB"), (1 << 20, "MiB")):
        if size >= unit:
            return f"{size / unit:.2f} {name}"
    return f"{size} bytes"


_SHARE = 0.75
"""Default share of an accelerator's memory for parameters, gradients and optimizer."""


def with_chosen_fraction(request: StackRequest) -> OptimizerConfig:
    """Return the config with the smallest offload fraction, in 64ths, that fits the accelerator.

    Ranks that hold shards of one parameter (of a distributed optimizer, or DTensors) agree on the
    largest fraction that any of them needs. The limit is ``gpu_memory``, or three quarters of the
    accelerator. A model on the CPU without ``gpu_memory`` has fraction 0.

    Args:
        request: arguments of the stack, with ``optimizer_offload_fraction="auto"``.

    Raises:
        ValueError: fraction 1.0 does not fit on this rank or on a rank with the same parameters;
            the message has the needed bytes.
    """
    config = request.config
    limit, accelerator = config.gpu_memory, accelerator_of(request.device)
    if limit is None and accelerator is not None:
        limit = int(_SHARE * accelerator.memory_bytes(request.device))
    if limit is None:
        _log.info("optimizer_offload_fraction='auto': 0, the model is on the host")
        return with_fraction(config, 0.0)
    plan_of, sharing = rank_planner(request)
    fraction = agree_on_largest(
        sharing,
        "agreeing on optimizer_offload_fraction",
        lambda: least(plan_of, config, limit).fraction,
    )
    found = plan_of(with_fraction(config, fraction))
    _log.info(
        "optimizer_offload_fraction='auto': %g, the least that keeps parameters, gradients and "
        "optimizer within %.2f GiB: %.2f GiB on the accelerator, %.2f GiB on the host",
        found.fraction,
        limit / 2**30,
        found.accelerator.total / 2**30,
        found.host_total / 2**30,
    )
    return with_fraction(config, found.fraction)


def rank_planner(
    request: StackRequest,
) -> tuple[Callable[[OptimizerConfig], MemoryPlan], list[ProcessGroup]]:
    """Return a function from a config to this rank's memory plan, and the process groups that shard
    parameters.

    The config of the request decides whether the optimizer is distributed.
    """
    is_expert = request.expert_predicate or is_expert_param
    # Frozen parameters are included, because the accelerator stores them.
    held = list(named_params(request.modules()))
    metas = {}
    for _, param in held:
        values = torch.empty_like(local_tensor(param), device="meta")
        meta = metas[id(param)] = nn.Parameter(values, requires_grad=param.requires_grad)
        for name, value in vars(param).items():
            if not name.startswith("_"):
                setattr(meta, name, value)
    named = [(name, metas[id(param)]) for name, param in held]
    experts = {name for name, param in held if is_expert(param, name)}
    groups, process_groups = request.param_groups, request.process_groups
    if groups is not None:
        # request.modules() made one module, which has the parameters in the order of the groups.
        own = iter(metas.values())
        groups = [{**each, "params": [next(own) for _ in each["params"]]} for each in groups]
    if request.config.is_distributed:
        process_groups = with_data_parallel(process_groups, bool(experts))
    dp, expert_dp = process_groups.dp, process_groups.expert_dp
    ranks, expert_ranks = (1 if group is None else group.size() for group in (dp, expert_dp))

    def plan_of(chosen: OptimizerConfig) -> MemoryPlan:
        overrides = request.config_overrides
        return plan_rank(named, experts, chosen, ranks, expert_ranks, overrides, groups)

    mesh = next((param.device_mesh for _, param in held if is_dtensor(param)), None)
    is_distributed = request.config.is_distributed
    sharing = [dp] if is_distributed else [] if mesh is None else mesh.get_all_groups()
    return plan_of, [group for group in sharing if group is not None]
