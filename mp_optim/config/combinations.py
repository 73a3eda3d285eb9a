"""What the fields of a config may be together: contradictions, and fields that do something only in
company."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import fields
from typing import Any

import torch

from mp_optim.config.fields import ConfigFields, check_fields
from mp_optim.config.rules import (
    CAUTIONS,
    FIRST_DTYPE,
    FIRST_MOMENT_DTYPES,
    RULE_FIELDS,
    RULES,
    SCALAR_OPTIMIZERS,
    SECOND_DTYPE,
    SECOND_MOMENT_DTYPES,
    audit_refusal,
    caution_refusal,
    coefficients,
    refusal,
)
from mp_optim.config.setting_checks import SettingError
from mp_optim.config.state_forms import AVERAGE_FORMS, CODED, FIRST_FORMS, REMAINDERS

Holds = Callable[[ConfigFields], bool]


def check_config(config: ConfigFields) -> None:
    """Raise if a value is out of range, contradictory or without effect.

    Raises:
        ValueError: naming field and value.
    """
    check_fields(config)
    for low, high in _FLOORS:
        floor, top = getattr(config, low), getattr(config, high)
        if floor is not None and top is not None and floor > top:
            _fail(config, low, f"must not exceed {high}={top!r}")
    _check_table(config, _CONTRADICTIONS)
    try:
        coefficients(config.muon_coefficient_type, config.muon_num_ns_steps)
    except ValueError as error:
        raise ValueError(f"muon_{error}") from None
    _check_precision(config)
    _check_cautions(config)
    if config.audit_rate > 0.0:
        why = audit_refusal(config.optimizer, config.fused_backend)
        if why is not None:
            _fail(config, "audit_rate", why)
    if config.optimizer_cuda_graph:
        _check_table(config, _NOT_CAPTURED)
    for name, needed in inert_fields(config).items():
        default = {field.name: field.default for field in fields(config)}[name]
        _fail(config, name, f"has no effect without {needed}; set that, or leave it at {default!r}")


def _fail(config: Any, name: str, why: str) -> None:
    raise SettingError(name, getattr(config, name), why)


# -- contradictions -------------------------------------------------------------------------------

_FLOORS = (
    ("min_lr", "lr"),
    ("decoupled_min_lr", "decoupled_lr"),
    ("min_loss_scale", "initial_loss_scale"),
)
_CONTRADICTIONS: tuple[tuple[str, Holds, str], ...] = (
    (
        "muon_moment2_method",
        lambda c: c.muon_moment2_method is not None and c.muon_tp_mode == "blockwise",
        "is of rows of whole matrices; set muon_tp_mode='duplicated'",
    ),
    (
        "optimizer_cuda_graph",
        lambda c: c.optimizer_cuda_graph and c.is_distributed,
        "a step that reduces over data-parallel ranks is not captured; set it to False, or "
        "use_distributed_optimizer=False",
    ),
    (
        "data_parallel_sharding_strategy",
        lambda c: (
            c.use_layer_wise_distributed_optimizer
            and c.data_parallel_sharding_strategy == "no_shard"
        ),
        "contradicts use_layer_wise_distributed_optimizer=True",
    ),
    (
        "release_gradients",
        lambda c: c.release_gradients and c.is_distributed,
        "gradients of a distributed optimizer lie in its own buckets; set it to False",
    ),
    (
        "release_gradients",
        lambda c: c.release_gradients and c.fused_backend in ("apex", "transformer_engine"),
        "released gradients are measured on the host, where sums of squares have other bits than "
        "those of fused_backend={config.fused_backend!r}; choose another, or set "
        "release_gradients=False",
    ),
)
_NOT_CAPTURED: tuple[tuple[str, Holds, str], ...] = (
    (
        "optimizer_cuda_graph",
        lambda c: not RULES[c.optimizer].has_kernels,
        "{config.optimizer}'s step is not captured; set optimizer_cuda_graph=False",
    ),
    (
        "optimizer_cuda_graph",
        lambda c: c.fused_backend not in ("auto", "triton"),
        "steps by fused_backend={config.fused_backend!r} cannot be captured; choose 'triton' or "
        "'auto', or set optimizer_cuda_graph=False",
    ),
    (
        "optimizer_cuda_graph",
        lambda c: c.may_offload,
        "a host part cannot be captured; set optimizer_cpu_offload=False, or "
        "optimizer_cuda_graph=False",
    ),
    (
        "log_update_ratios_interval",
        lambda c: c.log_update_ratios_interval > 0,
        "a step of a CUDA graph is not watched; set it to 0, or optimizer_cuda_graph=False",
    ),
    (
        "audit_rate",
        lambda c: c.audit_rate > 0.0,
        "each step repeats other elements, and a step of a CUDA graph is always the same; set it "
        "to 0.0, or optimizer_cuda_graph=False",
    ),
    (
        "optimizer_cuda_graph",
        lambda c: c.timers is not None,
        "timers have nothing to be called between in a graph; set timers=None, or "
        "optimizer_cuda_graph=False",
    ),
)


def _check_table(config: ConfigFields, table: tuple[tuple[str, Holds, str], ...]) -> None:
    for name, holds, why in table:
        if holds(config):
            _fail(config, name, why.format(config=config))


_ROUNDS_AVERAGES = (
    "rounded to nearest, an average in bfloat16 would not move; set stochastic_rounding=True, or "
    "leave it at torch.float32"
)
_ROUNDS_PARAMS = (
    "rounded to nearest, a bfloat16 parameter stands still under steps below 2^-9 of it; set "
    "stochastic_rounding=True, or param_remainder_bits=16"
)
_STATE_DTYPES = {
    FIRST_DTYPE: FIRST_MOMENT_DTYPES,
    SECOND_DTYPE: SECOND_MOMENT_DTYPES,
    "ema_dtype": tuple(form.name for form in AVERAGE_FORMS),
}


def _check_precision(config: ConfigFields) -> None:
    if config.fp16 and config.bf16:
        raise ValueError("fp16=True and bf16=True: set the one that matches the model's dtype")
    half = torch.float16 if config.fp16 else torch.bfloat16 if config.bf16 else torch.float32
    if config.params_dtype not in (half, torch.float32):
        _fail(
            config,
            "params_dtype",
            f"contradicts fp16={config.fp16!r}, bf16={config.bf16!r}; set the flag that matches "
            "the model",
        )
    for name in ("main_grads_dtype", "main_params_dtype"):
        if getattr(config, name) != torch.float32:
            _fail(config, name, "must be torch.float32 in this version")
    check_state_forms(config)
    refused = refusal(
        config.fused_backend,
        config.elementwise_rule,
        [getattr(config, name) for name in (FIRST_DTYPE, SECOND_DTYPE)],
        config.param_remainder_bits if config.keeps_remainders else None,
        config.stochastic_rounding,
    )
    if refused is not None:
        _fail(config, *refused)


def check_state_forms(settings: Any) -> None:
    """Check how state is to be stored.

    Args:
        settings: a config, or what a rule is constructed with: the config's fields that are about
            it, and ``has_no_main_params``.

    Raises:
        ValueError: naming field and value.
    """
    for name, choices in _STATE_DTYPES.items():
        if getattr(settings, name) not in choices:
            _fail(settings, name, f"must be one of {list(choices)}")
    if settings.has_no_main_params and not settings.stochastic_rounding:
        _fail(settings, "param_remainder_bits", _ROUNDS_PARAMS)
    if settings.ema_dtype == torch.bfloat16 and not settings.stochastic_rounding:
        _fail(settings, "ema_dtype", _ROUNDS_AVERAGES)


def _check_cautions(config: ConfigFields) -> None:
    why = caution_refusal(config.fused_backend)
    reads_decoupling = "adam_w_mode" in RULES[config.elementwise_rule].defaults
    for name in CAUTIONS:
        if getattr(config, name) and why:
            _fail(config, name, why)
        if getattr(config, name) and reads_decoupling and not config.decoupled_weight_decay:
            _fail(config, name, "needs decoupled_weight_decay=True: else decay is in the gradient")


# -- company --------------------------------------------------------------------------------------

Need = tuple[str, Holds]
"""What a field needs in order to do something, and whether a config has it."""


def _either(rules: list[str]) -> str:
    return f"optimizer={' or '.join(map(repr, rules))}"


def _rule_that_reads(name: str) -> Need:
    rules = [rule.name for rule in RULES.values() if name in rule.fields]
    tuned = {rule: RULES[rule].hyperparameters for rule in SCALAR_OPTIMIZERS}
    beside_muon = [
        rule
        for rule, own in tuned.items()
        if any(each.per_group and name in each.fields for each in own)
    ]
    words = ", ".join([_either(rules), *[f"or muon with {rule}" for rule in beside_muon]])
    return (
        words,
        lambda c: (
            c.optimizer in rules
            or (c.optimizer == "muon" and c.muon_scalar_optimizer in beside_muon)
        ),
    )


_SECOND_MOMENT = [
    rule.name
    for rule in RULES.values()
    if any(moment.dtype_field == SECOND_DTYPE for moment in rule.moments)
]


_ROUNDED = {form.name for form in FIRST_FORMS if form.is_rounded}


def _has_rounded_state(config: ConfigFields) -> bool:
    """Whether moments, remainders or averages may be rounded stochastically."""
    dtypes = {config.exp_avg_dtype, config.exp_avg_sq_dtype}
    is_rounded = not dtypes.isdisjoint(_ROUNDED)
    has_any = is_rounded or REMAINDERS[config.param_remainder_bits].is_rounded
    return config.ema_dtype == torch.bfloat16 or (config.use_precision_aware_optimizer and has_any)


_DISTRIBUTED: Need = "use_distributed_optimizer=True", lambda c: c.is_distributed
_OFFLOAD: Need = "optimizer_cpu_offload=True", lambda c: c.optimizer_cpu_offload
_OFFLOADED: Need = (
    "optimizer_cpu_offload=True and optimizer_offload_fraction > 0",
    lambda c: c.may_offload,
)
_STEPPED_IN_MEMORY: Need = (
    "optimizer_cpu_offload=True and offload_place='host' or 'auto', without optimizer_state_path",
    lambda c: c.optimizer_cpu_offload and c.has_buckets,
)
_STAGED: Need = (
    f"{_STEPPED_IN_MEMORY[0]}; or with offload_mode='overlap' or 'speculative'",
    lambda c: c.optimizer_cpu_offload and (c.has_buckets or c.offload_mode != "sync"),
)
_DYNAMIC_SCALE: Need = ("fp16=True without loss_scale", lambda c: c.fp16 and c.loss_scale is None)
_COMPACT: Need = ("use_precision_aware_optimizer=True", lambda c: c.use_precision_aware_optimizer)
_NEEDS: dict[str, Need] = {
    "optimizer_offload_fraction": _OFFLOAD,
    "overlap_cpu_optimizer_d2h_h2d": _STEPPED_IN_MEMORY,
    "offload_mode": (
        f"{_OFFLOADED[0]} (where offload_place='streamed', also release_gradients=True or "
        "optimizer_state_path)",
        lambda c: (
            c.may_offload
            and (
                c.offload_place != "streamed"
                or c.release_gradients
                or c.optimizer_state_path is not None
            )
        ),
    ),
    "release_gradients": (
        "offload_mode='overlap' or 'speculative'",
        lambda c: c.may_offload and c.offload_mode != "sync",
    ),
    "gpu_memory": (
        "optimizer_offload_fraction='auto'",
        lambda c: c.optimizer_offload_fraction == "auto",
    ),
    "offload_place": _OFFLOADED,
    "optimizer_state_path": _OFFLOADED,
    "stream_window_bytes": (
        "offload_place='streamed' or 'auto', or optimizer_state_path",
        lambda c: c.may_offload and c.has_windows,
    ),
    "offload_streamed_fraction": (
        "offload_place='auto'",
        lambda c: c.may_offload and c.offload_place == "auto",
    ),
    "offload_bucket_bytes": _STAGED,
    "pin_cpu_grads": _STAGED,
    "pin_cpu_params": _OFFLOAD,
    "loss_scale": ("fp16=True or bf16=True", lambda c: c.fp16 or c.bf16),
    "initial_loss_scale": _DYNAMIC_SCALE,
    "min_loss_scale": _DYNAMIC_SCALE,
    "loss_scale_window": _DYNAMIC_SCALE,
    "hysteresis": _DYNAMIC_SCALE,
    **{name: _rule_that_reads(name) for name in RULE_FIELDS},
    "muon_beta2": (
        "optimizer='muon' and muon_moment2_method='normuon'",
        lambda c: c.optimizer == "muon" and c.muon_moment2_method is not None,
    ),
    "decoupled_min_lr": ("decoupled_lr", lambda c: c.decoupled_lr is not None),
    "exp_avg_dtype": _COMPACT,
    "exp_avg_sq_dtype": (
        f"{_COMPACT[0]} and {_either(_SECOND_MOMENT)}",
        lambda c: c.use_precision_aware_optimizer and c.elementwise_rule in _SECOND_MOMENT,
    ),
    "fp32_state_below": (
        f"{_COMPACT[0]} and moments in 8 or 4 bits",
        lambda c: (
            c.use_precision_aware_optimizer
            and not CODED.isdisjoint((c.exp_avg_dtype, c.exp_avg_sq_dtype))
        ),
    ),
    "store_param_remainders": _COMPACT,
    "param_remainder_bits": (
        f"{_COMPACT[0]}, store_param_remainders=True and bf16=True",
        lambda c: c.keeps_remainders,
    ),
    "ema_dtype": ("ema_decay", lambda c: c.ema_decay is not None),
    "stochastic_rounding": (
        f"{_COMPACT[0]} and bfloat16 or 8-bit state, or ema_dtype=torch.bfloat16",
        _has_rounded_state,
    ),
    "stochastic_rounding_seed": ("stochastic_rounding=True", lambda c: c.stochastic_rounding),
    "data_parallel_sharding_strategy": _DISTRIBUTED,
    "overlap_grad_reduce": _DISTRIBUTED,
    "overlap_param_gather": (
        f"{_DISTRIBUTED[0]} and data_parallel_sharding_strategy='optim' or 'optim_grads'",
        lambda c: c.is_distributed and c.data_parallel_sharding_strategy != "no_shard",
    ),
    "grad_reduce_in_fp32": _DISTRIBUTED,
    "grad_reduce_op": _DISTRIBUTED,
    "reduce_scatter_with_fp32_accumulation": _DISTRIBUTED,
    "bucket_size": (
        f"{_DISTRIBUTED[0]} without use_layer_wise_distributed_optimizer",
        lambda c: c.is_distributed and not c.use_layer_wise_distributed_optimizer,
    ),
    "skip_step_rolling_interval_length": (
        "a finite skip_step_sigma_factor",
        lambda c: math.isfinite(c.skip_step_sigma_factor),
    ),
    "audit_action": ("audit_rate > 0.0", lambda c: c.audit_rate > 0.0),
    "barrier_with_L1_time": ("timers", lambda c: c.timers is not None),
}
"""Fields that do something only in company."""


def inert_fields(config: ConfigFields) -> dict[str, str]:
    """The fields that are set and have no effect, with what each needs to have one."""
    defaults = {field.name: field.default for field in fields(config)}
    return {
        name: needed
        for name, (needed, has) in _NEEDS.items()
        if getattr(config, name) != defaults[name] and not has(config)
    }
