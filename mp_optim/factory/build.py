"""Construction of the optimizer stack from a config and a model."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from mp_optim.config import OptimizerConfig
from mp_optim.config.rules import RULES
from mp_optim.core import local_tensor, with_names
from mp_optim.core.param_attributes import is_tensor_parallel, partition_dim, partition_form
from mp_optim.core.partition import partition
from mp_optim.host.calls import warn
from mp_optim.kernels import check_serves
from mp_optim.kernels.native_library import set_host_threads
from mp_optim.kernels.state_format import StatePrecision
from mp_optim.mixed_precision import (
    ConstantGradScaler,
    DynamicGradScaler,
    Float16OptimizerWithFloat16Params,
    FP32Optimizer,
    MegatronGradScaler,
    MegatronOptimizer,
    WrappedOptimizer,
)
from mp_optim.muon.muon import MuonRule
from mp_optim.offload.hybrid import HybridDeviceOptimizer
from mp_optim.param_groups.overrides import (
    ParamKey,
    check_each_in_one_group,
    get_param_groups,
    get_standard_config_overrides,
)
from mp_optim.process_groups.process_groups import ProcessGroups
from mp_optim.rules.rule import NAMED_RULES, Rule
from mp_optim.rules.rule_optimizer import RuleOptimizer
from mp_optim.zero.composite import ChainedOptimizer
from mp_optim.zero.zero import DistributedOptimizer


@dataclass(frozen=True)
class StackRequest:
    """Checked arguments of :func:`mp_optim.get_megatron_optimizer`.

    Attributes:
        config: config of the stack.
        chunks: modules of the model.
        config_overrides: settings by :class:`ParamKey`; None for the standard overrides.
        process_groups: process groups of this rank.
        expert_predicate: ``(param, name) -> bool``, True for expert parameters; None for
            :func:`is_expert_param`.
        param_groups: param groups of the caller; None to make groups from the overrides.
    """

    config: OptimizerConfig
    chunks: Sequence[nn.Module]
    config_overrides: Mapping[ParamKey, Any] | None = None
    process_groups: ProcessGroups = field(default_factory=ProcessGroups)
    expert_predicate: Callable[..., bool] | None = None
    param_groups: Sequence[dict[str, Any]] | None = None

    @property
    def device(self) -> torch.device:
        """The device of the first parameter; the CPU if the model has no parameters."""
        params = (param for chunk in self.chunks for param in chunk.parameters())
        return next((local_tensor(param).device for param in params), torch.device("cpu"))

    def modules(self) -> Sequence[nn.Module]:
        """Return the chunks. If the request has ``param_groups``, return one module with the
        parameters of these groups."""
        if self.param_groups is None:
            return self.chunks
        return [container_of(self.param_groups)]


def container_of(groups: Iterable[Mapping[str, Any]]) -> nn.Module:
    """Return a module with the parameters of param groups in their order, for the memory planner,
    which reads modules."""
    container = nn.Module()
    params = itertools.chain.from_iterable(group["params"] for group in groups)
    for index, param in enumerate(params):
        held = param if isinstance(param, nn.Parameter) else nn.Parameter(param.detach())
        container.register_parameter(f"param{index}", held)
    return container


def build(request: StackRequest) -> MegatronOptimizer:
    """Build the optimizer stack.

    Args:
        request: checked arguments; the config's offload fraction is a number.

    Returns:
        One optimizer, or a :class:`ChainedOptimizer` of a dense and an expert optimizer.

    Raises:
        TypeError: a parameter's dtype is not supported.
        ValueError: the config does not fit the model or the process groups.
    """
    config, chunks, device = request.config, request.chunks, request.device
    check_serves(config.fused_backend, device)
    groups_of, param_groups = request.process_groups, request.param_groups
    if param_groups is None:
        overrides = request.config_overrides
        if overrides is None:
            overrides = get_standard_config_overrides(config)
        param_groups = get_param_groups(chunks, config, overrides, request.expert_predicate)
    check_each_in_one_group(chunks, param_groups)
    _check_partitions(config, param_groups, groups_of)
    experts = [group for group in param_groups if group.get("is_expert_parallel", False)]
    dense = [group for group in param_groups if not group.get("is_expert_parallel", False)]
    scaler = _grad_scaler(config, device)
    if config.is_distributed:
        for chunk in chunks:
            if isinstance(chunk, nn.parallel.DistributedDataParallel):
                raise ValueError(
                    f"use_distributed_optimizer=True: the model is a {type(chunk).__name__}, which "
                    "reduces gradients itself; pass model.module"
                )
        groups_of = with_data_parallel(groups_of, bool(experts))
    expert_groups = ProcessGroups(
        grad_stats=groups_of.expert_grad_stats,
        expert_tp=groups_of.expert_tp,
        dp=groups_of.expert_dp,
    )
    # A rank without parameters of one kind (dense, expert) needs an empty optimizer of this kind.
    # Otherwise the other ranks would wait for this rank in reductions.
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
    """Check that muon can gather the whole matrices that plain tensor parallelism shards.

    Raises:
        ValueError: a parameter has no valid partition, or the offload mode forbids collectives.
    """
    if config.optimizer != "muon" or config.muon_tp_mode == "blockwise":
        return
    for group in groups:
        tp = ranks.expert_tp if group.get("is_expert_parallel", False) else ranks.tp
        if tp is None or tp.size() == 1 or group.get("optimizer", "muon") != "muon":
            continue
        for index, param in enumerate(group["params"]):
            if not is_tensor_parallel(param):
                continue
            name = (group.get("param_names") or {index: f"param{index}"})[index]
            if config.may_offload and config.offload_mode == "speculative":
                raise ValueError(
                    f"offload_mode='speculative': {name} is split over ranks, and muon steps the "
                    "matrix with a collective, which could interleave with collectives of "
                    "backward; set offload_mode='overlap'"
                )
            if not hasattr(param, "partition_dim"):
                raise ValueError(
                    f"{name} is tensor_model_parallel and has no partition_dim, so muon cannot "
                    "gather the matrix; set partition_dim on the parameter, or "
                    "muon_tp_mode='blockwise'"
                )
            dim = partition_dim(param)
            if dim is not None:
                shape, size = param.shape, tp.size()
                partition(name, shape, dim, partition_form(param), 0, size)


def set_up_host(config: OptimizerConfig) -> None:
    """Set the number of threads of the host kernels, if the config sets ``host_threads``.

    NOTE: the number is global to the process; the last stack that is built sets it. The planner
    builds stacks only to measure memory, and must not set the number.
    """
    if config.host_threads is not None:
        set_host_threads(config.host_threads)


def _grad_scaler(config: OptimizerConfig, device: torch.device) -> MegatronGradScaler | None:
    if config.loss_scale is not None:  # A constant loss scale applies to bf16, too, as in Megatron.
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
    """Return process groups with ``dp`` and ``expert_dp`` set; their default is all ranks.

    Args:
        groups: process groups of the caller.
        has_experts: True if this rank has expert parameters.

    Raises:
        ValueError: the job has one process, or the process groups of experts contradict each other.
    """
    if groups.dp is None and not dist.is_initialized():
        raise ValueError(
            "use_distributed_optimizer=True: the job has one process; call "
            "torch.distributed.init_process_group first (torchrun starts several processes), or "
            "set use_distributed_optimizer=False"
        )
    stats = groups.expert_grad_stats
    if has_experts and groups.expert_dp is None and stats not in (None, groups.grad_stats):
        raise ValueError(
            "process_groups.expert_dp=None: expert_grad_stats is set, so ranks hold different "
            "experts; set expert_dp to the ranks that hold the same experts (or this rank alone)"
        )
    dp = groups.dp or dist.group.WORLD
    expert_dp = groups.expert_dp or dp
    # WORLD is not None, because init_process_group was called.
    assert dp is not None and expert_dp is not None
    if has_experts and expert_dp.size() < dp.size() and stats is None:
        raise ValueError(
            f"process_groups.expert_dp has {expert_dp.size()} of the {dp.size()} ranks of dp, so "
            "ranks hold different experts and would compute different gradient norms; set "
            "expert_grad_stats to the ranks that hold different experts"
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
    """Build the optimizer of the dense parameters, or of the expert parameters.

    Args:
        data_parallel: size of the group ``dp``, by which averaged gradients are divided; None
            without ``dp``. Gradients of experts are divided by it instead of the size of
            ``expert_dp``, because they are sums over the tokens of all ranks of ``dp``.
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
    """Build the optimizer inside the precision wrapper.

    Args:
        config: config with a number as offload fraction.
        groups: param groups with names.
        settings: default hyperparameters of the groups.

    Returns:
        A :class:`RuleOptimizer`, or with offloading a :class:`HybridDeviceOptimizer`.
    """
    rule, construction = rule_of(config), construction_of(config)
    if config.optimizer_cpu_offload and config.optimizer_offload_fraction == 0.0:
        warn(
            "optimizer_offload_fraction=0.0: optimizer_cpu_offload=True offloads nothing; set a "
            "fraction above 0.0"
        )
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


# -- the rule of a config -------------------------------------------------------------------------


def rule_of(config: OptimizerConfig) -> Rule:
    """Return the rule that the config's ``optimizer`` names."""
    if config.optimizer == MuonRule.name:
        return MuonRule(config.muon_scalar_optimizer)
    return NAMED_RULES[config.optimizer]


def settings_of(config: OptimizerConfig) -> dict[str, Any]:
    """Return learning rate, weight decay and hyperparameters of the config's rule, by name."""
    rule, scalar = RULES[config.optimizer], RULES[config.elementwise_rule]
    sources = dict(rule.settings)
    if scalar is not rule:
        sources |= {name: scalar.settings[name] for name in scalar.overrides}
    settings: dict[str, Any] = {"lr": config.lr, "weight_decay": config.weight_decay, **rule.fixed}
    for name, source in sources.items():
        if isinstance(source, str):
            settings[name] = getattr(config, source)
        else:
            settings[name] = tuple(getattr(config, part) for part in source)
    return settings


def construction_of(config: OptimizerConfig) -> dict[str, Any]:
    """Return the arguments of the rule's optimizer that are not hyperparameters: storage
    formats, backend, audits, seed."""
    same = [spec.name for spec in dataclasses.fields(StatePrecision) if spec.name != "seed"]
    return {
        **{name: getattr(config, name) for name in same},
        "store_param_remainders": config.keeps_remainders,
        "seed": config.stochastic_rounding_seed,
        "backend": config.fused_backend,
        "audit_rate": config.audit_rate,
        "audit_action": config.audit_action,
    }
