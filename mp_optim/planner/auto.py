"""``optimizer_offload_fraction="auto"``: as little on the host as the accelerator's memory
allows."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor

from mp_optim.config import OptimizerConfig
from mp_optim.factory import device_of, with_data_parallel
from mp_optim.groups.overrides import ParamKey
from mp_optim.planner.memory import MemoryPlan, plan_rank
from mp_optim.planner.sweep import least, with_fraction
from mp_optim.ranks.missing_ranks import call, naming_missing_ranks
from mp_optim.ranks.process_groups import ProcessGroups
from mp_optim.slots import local_tensor
from mp_optim.slots.names import named_params
from mp_optim.slots.param_attributes import is_expert_param

SHARE = 0.75
"""What parameters, gradients and optimizer may take of an accelerator whose ``gpu_memory`` is not
given."""

_log = logging.getLogger(__name__)


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
    limit = _limit(config, device_of(chunks))
    if limit is None:
        _log.info("optimizer_offload_fraction='auto': 0, the model is on the host")
        return with_fraction(config, 0.0)
    is_expert = expert_predicate or is_expert_param
    held = list(named_params(chunks))  # frozen ones too
    named = [(name, _on_meta(param)) for name, param in held]
    experts = {name for name, param in held if is_expert(param, name)}
    if config.is_distributed:
        process_groups = with_data_parallel(process_groups, bool(experts))
    ranks = (_size(process_groups.dp), _size(process_groups.expert_dp))

    def plan_of(chosen: OptimizerConfig) -> MemoryPlan:
        return plan_rank(named, experts, chosen, *ranks, config_overrides)

    sharing = (
        [process_groups.dp]
        if config.is_distributed
        else _mesh_groups(param for _, param in held)
    )
    fraction = _agreed(
        lambda: least(plan_of, config, gpu_memory=limit).fraction, sharing
    )
    found = plan_of(with_fraction(config, fraction))
    _log.info(
        "optimizer_offload_fraction='auto': %g, the least that keeps parameters, gradients and "
        "optimizer within "
        "%.2f GiB: %.2f GiB there, %.2f GiB on the host",
        found.fraction,
        limit / 2**30,
        found.accelerator.total / 2**30,
        found.host_total / 2**30,
    )
    return with_fraction(config, found.fraction)


def _limit(config: OptimizerConfig, device: torch.device) -> int | None:
    if config.gpu_memory is not None or device.type != "cuda":
        return config.gpu_memory
    return int(SHARE * torch.cuda.get_device_properties(device).total_memory)


def _agreed(
    choose: Callable[[], float], groups: Iterable[ProcessGroup | None]
) -> float:
    """The largest of the ranks' choices; one that fails, fails on all."""
    own, trouble = 1.0, ""
    try:
        own = choose()
    except ValueError as error:
        trouble = str(error)
    for group in filter(None, groups):
        choices: list[Any] = [None] * group.size()
        mine = own, trouble
        with naming_missing_ranks(group)("agreeing on optimizer_offload_fraction"):
            call(group, partial(dist.all_gather_object, choices, mine, group=group))
        own = max(fraction for fraction, _ in choices)
        trouble = next((text for _, text in choices if text), "")
    if trouble:
        raise ValueError(trouble)
    return own


def _mesh_groups(params: Iterable[Tensor]) -> list[ProcessGroup]:
    """The groups of the first mesh that a parameter is spread over."""
    mesh = next(
        (param.device_mesh for param in params if isinstance(param, DTensor)), None
    )
    return [] if mesh is None else mesh.get_all_groups()


def _on_meta(param: Tensor) -> nn.Parameter:
    """What this rank holds of a parameter, without data, and what is written on it (is it shared,
    what is it for)."""
    values = torch.empty_like(local_tensor(param), device="meta")
    meta = nn.Parameter(values, requires_grad=param.requires_grad)
    for name, value in vars(param).items():
        if not name.startswith("_"):
            setattr(meta, name, value)
    return meta


def _size(group: ProcessGroup | None) -> int:
    return 1 if group is None else group.size()
