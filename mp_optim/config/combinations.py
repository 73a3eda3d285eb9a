"""What the fields of a config may be together: contradictions, and fields that do something only in
company."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import fields

import torch

from mp_optim.config.capabilities import refusal
from mp_optim.config.field_checks import check_fields
from mp_optim.config.fields import ConfigFields
from mp_optim.config.muon import SCALAR_OPTIMIZERS, coefficients
from mp_optim.config.rules import (
    FIRST_MOMENT_DTYPES,
    RULE_FIELDS,
    RULES,
    SECOND_DTYPE,
    SECOND_MOMENT_DTYPES,
    UINT4,
    RuleSpec,
    fields_beside_muon,
    rules_of_field,
)


def check_config(config: ConfigFields) -> None:
    """Raise if a value is out of range, contradictory or without effect.

    Raises:
        ValueError: naming field and value.
    """
    for check in (
        check_fields,
        _check_together,
        _check_precision,
        _check_graph,
        _check_inert,
    ):
        check(config)


def _fail(config: ConfigFields, name: str, rule: str) -> None:
    raise ValueError(f"{name}={getattr(config, name)!r}: {rule}")


def _check_together(config: ConfigFields) -> None:
    """Fields that contradict each other."""
    for low, high in (
        ("min_lr", "lr"),
        ("decoupled_min_lr", "decoupled_lr"),
        ("min_loss_scale", "initial_loss_scale"),
    ):
        floor, top = getattr(config, low), getattr(config, high)
        if floor is not None and top is not None and floor > top:
            _fail(config, low, f"must not exceed {high}={top!r}")
    if config.optimizer_cuda_graph and config.is_distributed:
        _fail(
            config,
            "optimizer_cuda_graph",
            "a step that reduces over data-parallel ranks is not captured; set it to "
            "False, or use_distributed_optimizer=False",
        )
    if (
        config.use_layer_wise_distributed_optimizer
        and config.data_parallel_sharding_strategy == "no_shard"
    ):
        _fail(
            config,
            "data_parallel_sharding_strategy",
            "contradicts use_layer_wise_distributed_optimizer=True",
        )
    _check_release(config)
    _check_streamed(config)
    _check_on_disk(config)
    try:
        coefficients(config.muon_coefficient_type, config.muon_num_ns_steps)
    except ValueError as error:
        raise ValueError(f"muon_{error}") from None


def _check_release(config: ConfigFields) -> None:
    if not config.release_gradients:
        return
    if config.is_distributed:
        _fail(
            config,
            "release_gradients",
            "gradients of a distributed optimizer lie in its own buckets; set it to False",
        )
    if config.fused_backend in ("apex", "transformer_engine"):
        _fail(
            config,
            "release_gradients",
            "released gradients are measured on the host, where sums of squares have other bits "
            f"than those of fused_backend={config.fused_backend!r}; choose another, or set "
            "release_gradients=False",
        )


def _check_streamed(config: ConfigFields) -> None:
    if config.offload_place == "host":
        return
    if config.offload_place == "streamed" and config.offload_mode != "sync":
        _fail(
            config,
            "offload_mode",
            "with offload_place='streamed' the host steps nothing; use 'sync', or "
            "offload_place='auto'",
        )


def _check_on_disk(config: ConfigFields) -> None:
    if config.optimizer_state_path is None:
        return
    if config.offload_place == "auto":
        _fail(
            config,
            "offload_place",
            "with optimizer_state_path all of it is stepped in one place; use 'host' or 'streamed'",
        )
    if config.offload_mode != "sync":
        _fail(
            config,
            "offload_mode",
            "with optimizer_state_path the state is on the disk between steps; use 'sync'",
        )


ROUNDS_AVERAGES = (
    "rounded to nearest, an average in bfloat16 would not move; set stochastic_rounding=True, or "
    "leave it at torch.float32"
)
"""What is said of averages in bfloat16."""
_STATE_DTYPES = {
    "main_grads_dtype": (torch.float32,),
    "main_params_dtype": (torch.float32,),
    "exp_avg_dtype": FIRST_MOMENT_DTYPES,
    "exp_avg_sq_dtype": SECOND_MOMENT_DTYPES,
    "ema_dtype": (torch.float32, torch.bfloat16),
}


def _check_precision(config: ConfigFields) -> None:
    if config.fp16 and config.bf16:
        raise ValueError(
            "fp16=True and bf16=True: set the one that matches the model's dtype"
        )
    half = (
        torch.float16
        if config.fp16
        else torch.bfloat16
        if config.bf16
        else torch.float32
    )
    if config.params_dtype not in (half, torch.float32):
        _fail(
            config,
            "params_dtype",
            f"contradicts fp16={config.fp16!r}, bf16={config.bf16!r}; set the flag that "
            "matches the model",
        )
    for name, choices in _STATE_DTYPES.items():
        value = getattr(config, name)
        if value not in choices:
            _fail(config, name, f"must be one of {list(choices)} in this version")
    moments = [
        dtype
        for dtype in (config.exp_avg_dtype, config.exp_avg_sq_dtype)
        if isinstance(dtype, torch.dtype)
    ]
    refused = refusal(
        config.fused_backend,
        config.elementwise_rule,
        moments,
        config.param_remainder_bits if config.keeps_remainders else None,
        config.stochastic_rounding,
    )
    if refused is not None:
        _fail(config, *refused)
    if config.param_remainder_bits not in (8, 16):
        _fail(config, "param_remainder_bits", "must be 16 or 8")
    if config.ema_dtype == torch.bfloat16 and not config.stochastic_rounding:
        _fail(config, "ema_dtype", ROUNDS_AVERAGES)


_DISTRIBUTED: tuple[str, Callable[[ConfigFields], bool]] = (
    "use_distributed_optimizer=True",
    lambda c: c.is_distributed,
)


def _either(rules: list[str]) -> str:
    return f"optimizer={' or '.join(map(repr, rules))}"


def _needed_rule(name: str) -> tuple[str, Callable[[ConfigFields], bool]]:
    """What a field that only some rules read needs, and whether a config has it."""
    rules = [rule.name for rule in rules_of_field(name)]
    beside_muon = [
        rule for rule in SCALAR_OPTIMIZERS if name in fields_beside_muon(rule)
    ]

    def has(config: ConfigFields) -> bool:
        is_beside = (
            config.optimizer == "muon" and config.muon_scalar_optimizer in beside_muon
        )
        return is_beside or config.optimizer in rules

    return ", ".join(
        [_either(rules), *[f"or muon with {rule}" for rule in beside_muon]]
    ), has


_RULE_NEEDS = {name: _needed_rule(name) for name in RULE_FIELDS}


def _has_second_moment(rule: RuleSpec) -> bool:
    return SECOND_DTYPE in [moment.dtype_field for moment in rule.moments]


_SECOND_MOMENT = [rule.name for rule in RULES.values() if _has_second_moment(rule)]


def _has_rounded_state(config: ConfigFields) -> bool:
    """Whether moments or remainders may be rounded stochastically."""
    dtypes = {config.exp_avg_dtype, config.exp_avg_sq_dtype}
    is_rounded = not dtypes.isdisjoint({torch.bfloat16, torch.uint8, UINT4})
    has_any = is_rounded or config.param_remainder_bits == 8
    return config.use_precision_aware_optimizer and has_any


_STEPPED_ON_HOST: tuple[str, Callable[[ConfigFields], bool]] = (
    "optimizer_cpu_offload=True and offload_place='host' or 'auto', without optimizer_state_path",
    lambda c: c.optimizer_cpu_offload and c.has_buckets,
)

_NEEDS: dict[str, tuple[str, Callable[[ConfigFields], bool]]] = {
    "optimizer_offload_fraction": (
        "optimizer_cpu_offload=True",
        lambda c: c.optimizer_cpu_offload,
    ),
    "overlap_cpu_optimizer_d2h_h2d": _STEPPED_ON_HOST,
    "offload_mode": (
        "optimizer_cpu_offload=True and optimizer_offload_fraction > 0",
        lambda c: c.may_offload,
    ),
    "release_gradients": (
        "offload_mode='overlap' or 'speculative'",
        lambda c: c.may_offload and c.offload_mode != "sync",
    ),
    "gpu_memory": (
        "optimizer_offload_fraction='auto'",
        lambda c: c.optimizer_offload_fraction == "auto",
    ),
    "offload_place": (
        "optimizer_cpu_offload=True and optimizer_offload_fraction > 0",
        lambda c: c.may_offload,
    ),
    "optimizer_state_path": (
        "optimizer_cpu_offload=True and optimizer_offload_fraction > 0",
        lambda c: c.may_offload,
    ),
    "stream_window_bytes": (
        "offload_place='streamed' or 'auto', or optimizer_state_path",
        lambda c: c.may_offload and c.has_windows,
    ),
    "offload_streamed_fraction": (
        "offload_place='auto'",
        lambda c: c.may_offload and c.offload_place == "auto",
    ),
    "offload_bucket_bytes": _STEPPED_ON_HOST,
    "pin_cpu_grads": _STEPPED_ON_HOST,
    "pin_cpu_params": ("optimizer_cpu_offload=True", lambda c: c.optimizer_cpu_offload),
    "loss_scale": ("fp16=True or bf16=True", lambda c: c.fp16 or c.bf16),
    "initial_loss_scale": (
        "fp16=True without loss_scale",
        lambda c: c.fp16 and c.loss_scale is None,
    ),
    "min_loss_scale": (
        "fp16=True without loss_scale",
        lambda c: c.fp16 and c.loss_scale is None,
    ),
    "loss_scale_window": (
        "fp16=True without loss_scale",
        lambda c: c.fp16 and c.loss_scale is None,
    ),
    "hysteresis": (
        "fp16=True without loss_scale",
        lambda c: c.fp16 and c.loss_scale is None,
    ),
    **_RULE_NEEDS,
    "decoupled_min_lr": ("decoupled_lr", lambda c: c.decoupled_lr is not None),
    "exp_avg_dtype": (
        "use_precision_aware_optimizer=True",
        lambda c: c.use_precision_aware_optimizer,
    ),
    "exp_avg_sq_dtype": (
        f"use_precision_aware_optimizer=True and {_either(_SECOND_MOMENT)}",
        lambda c: (
            c.use_precision_aware_optimizer and c.elementwise_rule in _SECOND_MOMENT
        ),
    ),
    "store_param_remainders": (
        "use_precision_aware_optimizer=True",
        lambda c: c.use_precision_aware_optimizer,
    ),
    "param_remainder_bits": (
        "use_precision_aware_optimizer=True, store_param_remainders=True and bf16=True",
        lambda c: c.keeps_remainders,
    ),
    "ema_dtype": ("ema_decay", lambda c: c.ema_decay is not None),
    "stochastic_rounding": (
        "use_precision_aware_optimizer=True and bfloat16 or 8-bit state, or "
        "ema_dtype=torch.bfloat16",
        lambda c: c.ema_dtype == torch.bfloat16 or _has_rounded_state(c),
    ),
    "stochastic_rounding_seed": (
        "stochastic_rounding=True",
        lambda c: c.stochastic_rounding,
    ),
    "data_parallel_sharding_strategy": _DISTRIBUTED,
    "overlap_grad_reduce": _DISTRIBUTED,
    "overlap_param_gather": (
        "use_distributed_optimizer=True and data_parallel_sharding_strategy='optim' or "
        "'optim_grads'",
        lambda c: c.is_distributed and c.data_parallel_sharding_strategy != "no_shard",
    ),
    "grad_reduce_in_fp32": _DISTRIBUTED,
    "grad_reduce_op": _DISTRIBUTED,
    "reduce_scatter_with_fp32_accumulation": _DISTRIBUTED,
    "bucket_size": (
        "use_distributed_optimizer=True without use_layer_wise_distributed_optimizer",
        lambda c: c.is_distributed and not c.use_layer_wise_distributed_optimizer,
    ),
    "skip_step_rolling_interval_length": (
        "a finite skip_step_sigma_factor",
        lambda c: math.isfinite(c.skip_step_sigma_factor),
    ),
    "barrier_with_L1_time": ("timers", lambda c: c.timers is not None),
}
"""Fields that do something only in company: what they need, and whether a config has it."""


def _check_graph(config: ConfigFields) -> None:
    if not config.optimizer_cuda_graph:
        return
    if not RULES[config.optimizer].has_kernels:
        _fail(
            config,
            "optimizer_cuda_graph",
            f"{config.optimizer}'s step is not captured; set optimizer_cuda_graph=False",
        )
    if config.fused_backend not in ("auto", "triton"):
        _fail(
            config,
            "optimizer_cuda_graph",
            f"steps by fused_backend={config.fused_backend!r} cannot be captured; "
            "choose 'triton' or 'auto', or set optimizer_cuda_graph=False",
        )
    if config.may_offload:
        _fail(
            config,
            "optimizer_cuda_graph",
            "a host part cannot be captured; set optimizer_cpu_offload=False, or "
            "optimizer_cuda_graph=False",
        )
    if config.log_update_ratios_interval:
        _fail(
            config,
            "log_update_ratios_interval",
            "a step of a CUDA graph is not watched; set it to 0, or "
            "optimizer_cuda_graph=False",
        )
    if config.timers is not None:
        _fail(
            config,
            "optimizer_cuda_graph",
            "timers have nothing to be called between in a graph; set timers=None, "
            "or optimizer_cuda_graph=False",
        )


def inert_fields(config: ConfigFields) -> dict[str, str]:
    """The fields that are set and have no effect, with what each needs to have one."""
    defaults = {field.name: field.default for field in fields(config)}
    return {
        name: needed
        for name, (needed, has) in _NEEDS.items()
        if getattr(config, name) != defaults[name] and not has(config)
    }


def _check_inert(config: ConfigFields) -> None:
    for name, needed in inert_fields(config).items():
        default = {field.name: field.default for field in fields(config)}[name]
        _fail(
            config,
            name,
            f"has no effect without {needed}; set that, or leave it at {default!r}",
        )
