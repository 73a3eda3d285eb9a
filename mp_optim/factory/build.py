"""Builds the optimizer stack from a config and a model."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from mp_optim.config import OptimizerConfig
from mp_optim.core import local_tensor, with_names
from mp_optim.core.param_attributes import (
    has_partition_dim,
    is_tensor_parallel,
    partition_dim,
    partition_sizes,
    partition_stride,
)
from mp_optim.core.partition import partition
from mp_optim.factory.rule_registry import construction_of, rule_of, settings_of
from mp_optim.host.calls import warn
from mp_optim.kernels import check_serves
from mp_optim.kernels.native_library import set_host_threads
from mp_optim.mixed_precision import (
    ConstantGradScaler,
    DynamicGradScaler,
    Float16OptimizerWithFloat16Params,
    FP32Optimizer,
    MegatronGradScaler,
    MegatronOptimizer,
    WrappedOptimizer,
)
from mp_optim.offload.hybrid import HybridDeviceOptimizer
from mp_optim.param_groups.overrides import (
    ParamKey,
    check_claims,
    get_param_groups,
    get_standard_config_overrides,
)
from mp_optim.process_groups.process_groups import ProcessGroups
from mp_optim.rules.rule_optimizer import RuleOptimizer
from mp_optim.zero.composite import ChainedOptimizer
from mp_optim.zero.zero import DistributedOptimizer


@dataclass(frozen=True)
class StackRequest:
    """The arguments of :func:`mp_optim.get_megatron_optimizer`, checked; chunks are a list."""

    config: OptimizerConfig
    chunks: Sequence[nn.Module]
    config_overrides: Mapping[ParamKey, Any] | None = None
    process_groups: ProcessGroups = field(default_factory=ProcessGroups)
    expert_predicate: Callable[..., bool] | None = None
    param_groups: Sequence[dict[str, Any]] | None = None

    @property
    def device(self) -> torch.device:
        """The device of the first parameter; the host if there is none."""
        params = (param for chunk in self.chunks for param in chunk.parameters())
        return next((local_tensor(param).device for param in params), torch.device("cpu"))

    def modules(self) -> Sequence[nn.Module]:
        """Return modules that hold the parameters to step: the chunks, or a container of the
        parameters of ``param_groups``, in their order."""
        if self.param_groups is None:
            return self.chunks
        return [container_of(self.param_groups)]


def container_of(groups: Iterable[Mapping[str, Any]]) -> nn.Module:
    """Return a module of the parameters of some groups, in their order, for the planner."""
    container = nn.Module()
    params = itertools.chain.from_iterable(group["params"] for group in groups)
    for index, param in enumerate(params):
        held = param if isinstance(param, nn.Parameter) else nn.Parameter(param.detach())
        container.register_parameter(f"param{index}", held)
    return container


def build(request: StackRequest) -> MegatronOptimizer:
    """Build the optimizer stack; the config's offload fraction is a number.

    Result and errors are those of :func:`mp_optim.get_megatron_optimizer`.
    """
    config, chunks, device = request.config, request.chunks, request.device
    check_serves(config.fused_backend, device)
    groups_of, param_groups = request.process_groups, request.param_groups
    if param_groups is None:
        overrides = request.config_overrides
        if overrides is None:
            overrides = get_standard_config_overrides(config)
        param_groups = get_param_groups(chunks, config, overrides, request.expert_predicate)
    check_claims(chunks, param_groups)
    _check_partitions(config, param_groups, groups_of)
    experts = [group for group in param_groups if group.get("is_expert_parallel", False)]
    dense = [group for group in param_groups if not group.get("is_expert_parallel", False)]
    scaler = _grad_scaler(config, device)
    if config.is_distributed:
        for chunk in chunks:
            if isinstance(chunk, nn.parallel.DistributedDataParallel):
                raise ValueError(
                    f"use_distributed_optimizer=True with a {type(chunk).__name__}, which reduces "
                    "gradients itself; pass its .module"
                )
        groups_of = with_data_parallel(groups_of, bool(experts))
    expert_groups = ProcessGroups(
        grad_stats=groups_of.expert_grad_stats,
        expert_tp=groups_of.expert_tp,
        dp=groups_of.expert_dp,
    )
    # A rank without parameters of a kind still takes part in that kind's reductions, with an empty
    # optimizer.
    kinds = [
        (groups, where)
        for groups, where in ((dense, groups_of), (experts, expert_groups))
        if groups or where.grad_stats is not None
    ]
    data_parallel = groups_of.dp.size() if groups_of.dp is not None else None
    members = [
        _part(config, groups, scaler, where, chunks, data_parallel)
        for groups, where in kinds or [(dense, groups_of)]
    ]
    return members[0] if len(members) == 1 else ChainedOptimizer(members)


def _check_partitions(
    config: OptimizerConfig, groups: Sequence[Mapping[str, Any]], ranks: ProcessGroups
) -> None:
    """Raise unless muon, which needs the matrices whole that plain tensor parallelism cuts, can
    gather them, and may communicate when it steps."""
    if config.optimizer != "muon" or config.muon_tp_mode == "blockwise":
        return
    for group in groups:
        tp = ranks.expert_tp if group.get("is_expert_parallel", False) else ranks.tp
        if tp is None or tp.size() == 1 or group.get("optimizer", "muon") != "muon":
            continue
        for index, param in enumerate(group["params"]):
            if is_tensor_parallel(param):
                name = (group.get("param_names") or {index: f"param{index}"})[index]
                _check_partition(config, name, param, tp.size())


def _check_partition(config: OptimizerConfig, name: str, param: Tensor, ranks: int) -> None:
    if config.may_offload and config.offload_mode == "speculative":
        raise ValueError(
            f"offload_mode='speculative': muon steps {name}, which is split over ranks, by a "
            "collective, which may not meet those of backward; use 'overlap'"
        )
    if not has_partition_dim(param):
        raise ValueError(
            f"{name} is tensor_model_parallel and has no partition_dim, so muon cannot gather it: "
            "set the attribute, or muon_tp_mode='blockwise'"
        )
    dim = partition_dim(param)
    if dim is not None:
        stride, sizes = partition_stride(param), partition_sizes(param)
        partition(name, param.shape, dim, stride=stride, sizes=sizes, rank=0, size=ranks)


def set_up_host(config: OptimizerConfig) -> None:
    """Set the threads of the process's kernels.

    NOTE: this is one number for the process, that of the last stack. A plan, which builds a stack
    to add up its memory, must not set it.
    """
    if config.host_threads is not None:
        set_host_threads(config.host_threads)


def _grad_scaler(config: OptimizerConfig, device: torch.device) -> MegatronGradScaler | None:
    if config.loss_scale is not None:  # Megatron scales by it with bf16 too
        return ConstantGradScaler(config.loss_scale, device)
    if not config.fp16:
        return None
    return DynamicGradScaler(
        config.initial_loss_scale,
        config.min_loss_scale,
        growth_factor=2.0,
        backoff_factor=0.5,
        growth_interval=config.loss_scale_window,
        hysteresis=config.hysteresis,
        device=device,
    )


def with_data_parallel(groups: ProcessGroups, has_experts: bool) -> ProcessGroups:
    """Process groups with those for data parallelism; by default all ranks hold copies of
    everything."""
    if groups.dp is None and not dist.is_initialized():
        raise ValueError(
            "use_distributed_optimizer=True: there is one process; call "
            "torch.distributed.init_process_group first (torchrun starts several), or set it to "
            "False"
        )
    stats = groups.expert_grad_stats
    if has_experts and groups.expert_dp is None and stats not in (None, groups.grad_stats):
        raise ValueError(
            "process_groups.expert_grad_stats says that ranks hold different experts, and "
            "expert_dp is None: set expert_dp to the ranks that hold the same ones (perhaps this "
            "one alone)"
        )
    dp = groups.dp or dist.group.WORLD
    expert_dp = groups.expert_dp or dp
    assert dp is not None and expert_dp is not None  # WORLD is, where there are processes
    if has_experts and expert_dp.size() < dp.size() and stats is None:
        raise ValueError(
            f"process_groups.expert_dp has {expert_dp.size()} of the {dp.size()} ranks of dp, so "
            "ranks hold different experts; set expert_grad_stats to the ranks that hold different "
            "ones, or they would disagree on the gradient norm"
        )
    return dataclasses.replace(groups, dp=dp, expert_dp=expert_dp)


def _part(
    config: OptimizerConfig,
    groups: Sequence[dict[str, Any]],
    scaler: MegatronGradScaler | None,
    process_groups: ProcessGroups,
    chunks: Sequence[nn.Module],
    data_parallel: int | None,
) -> MegatronOptimizer:
    """The optimizer for the dense or the expert parameters.

    Args:
        data_parallel: how many ranks compute gradients of the loss, by which those of experts are
            divided too: an expert's gradient adds up what the tokens of several of them
            contributed.
    """
    wrapper = Float16OptimizerWithFloat16Params if config.fp16 or config.bf16 else FP32Optimizer

    def wrapped(some: list[dict[str, Any]]) -> WrappedOptimizer:
        return wrapper(
            inner_optimizer(config, some, settings_of(config)),
            config,
            scaler,
            process_groups=process_groups,
        )

    if not config.is_distributed:
        return wrapped([with_names(group) for group in groups] or [{"params": []}])
    return DistributedOptimizer(
        groups or [{"params": []}],
        config,
        scaler,
        build=wrapped,
        model_chunks=chunks,
        process_groups=process_groups,
        divisor=data_parallel,
    )


def inner_optimizer(
    config: OptimizerConfig, groups: list[dict[str, Any]], settings: Mapping[str, Any]
) -> torch.optim.Optimizer:
    """The optimizer below the precision wrapper.

    Args:
        settings: hyperparameters of the rule, for groups that do not have their own.
    """
    rule, construction = rule_of(config), construction_of(config)
    if config.optimizer_cpu_offload and config.optimizer_offload_fraction == 0.0:
        warn("optimizer_cpu_offload=True offloads nothing with optimizer_offload_fraction=0.0")
    if not config.optimizer_cpu_offload:
        return RuleOptimizer(rule, groups, **construction, **settings)
    return HybridDeviceOptimizer(
        groups,
        offload_fraction=float(config.optimizer_offload_fraction),
        cpu_optimizer_cls=rule,
        gpu_optimizer_cls=rule,
        param_update_in_fp32=True,
        pin_cpu_grads=config.pin_cpu_grads,
        pin_cpu_params=config.pin_cpu_params,
        overlap_cpu_optimizer_d2h_h2d=config.overlap_cpu_optimizer_d2h_h2d,
        offload_mode=config.offload_mode,
        offload_place=config.offload_place,
        stream_window_bytes=config.stream_window_bytes,
        optimizer_state_path=config.optimizer_state_path,
        bucket_bytes=config.offload_bucket_bytes,
        host_threads=config.host_threads,
        sub_optimizer_kwargs=construction,
        **settings,
    )
