"""Checks of combinations of a config's fields: contradictions, and fields without effect."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from typing import Any

import torch

from mp_optim.config.fields import ConfigFields, check_field
from mp_optim.config.rules import (
    FIRST_DTYPE,
    RULE_FIELDS,
    RULES,
    SECOND_DTYPE,
    audit_refusal,
    cautious_decay_refusal,
    coefficients,
    refusal,
)
from mp_optim.config.setting_checks import SettingError
from mp_optim.config.state_forms import AVERAGE_FORMS, CODED, FIRST_FORMS, SECOND_FORMS

Holds = Callable[[ConfigFields], bool]


def check_config(config: ConfigFields) -> None:
    """Check all fields of a config, and convert their values in place.

    Raises:
        ValueError: a value is out of range, or conflicts with another value.
    """
    for spec in fields(config):
        setattr(config, spec.name, check_field(spec.name, getattr(config, spec.name)))
    for low, high in _FLOORS:
        floor, top = getattr(config, low), getattr(config, high)
        if floor is not None and top is not None and floor > top:
            _fail(config, low, f"must not exceed {high}={top!r}")
    for name, holds, reason in _CONTRADICTIONS:
        if holds(config):
            _fail(config, name, reason.format(config=config))
    try:
        coefficients(config.muon_coefficient_type, config.muon_num_ns_steps)
    except ValueError as error:
        text = str(error).replace("coefficient_type=", "muon_coefficient_type=")
        raise ValueError(f"muon_{text}") from None
    _check_precision(config)
    if config.cautious_wd:
        if refused := cautious_decay_refusal(config.fused_backend):
            _fail(config, "cautious_wd", refused)
        reads_decoupling = "adam_w_mode" in RULES[config.elementwise_rule].defaults
        if reads_decoupling and not config.decoupled_weight_decay:
            _fail(
                config,
                "cautious_wd",
                "needs decoupled_weight_decay=True, because otherwise the gradient includes the "
                "decay; set decoupled_weight_decay=True",
            )
    if config.audit_rate > 0.0:
        unaudited = audit_refusal(config.optimizer, config.fused_backend)
        if unaudited is not None:
            _fail(config, "audit_rate", unaudited)
    for name, why in inert_fields(config).items():
        _fail(config, name, why)


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
        "needs the rows of whole matrices, and muon_tp_mode='blockwise' has only shards; set "
        "muon_tp_mode='duplicated'",
    ),
    (
        "data_parallel_sharding_strategy",
        lambda c: (
            c.use_layer_wise_distributed_optimizer
            and c.data_parallel_sharding_strategy == "no_shard"
        ),
        "contradicts use_layer_wise_distributed_optimizer=True; set one of them to its default",
    ),
    (
        "release_gradients",
        lambda c: c.release_gradients and c.is_distributed,
        "gradients of a distributed optimizer are stored in buckets, which are not released; set "
        "release_gradients=False",
    ),
    (
        "release_gradients",
        lambda c: c.release_gradients and c.fused_backend in ("apex", "transformer_engine"),
        "norms of released gradients are computed on the host, with other bits than "
        "fused_backend={config.fused_backend!r}; set fused_backend='auto', or "
        "release_gradients=False",
    ),
)


_ROUNDS_AVERAGES = (
    "rounding to nearest would leave an average in bfloat16 unchanged; set "
    "stochastic_rounding=True, or leave the dtype at torch.float32"
)
_ROUNDS_PARAMS = (
    "rounding to nearest leaves a bfloat16 parameter unchanged by steps below 2^-9 of it; set "
    "stochastic_rounding=True, or param_remainder_bits=16"
)
_FORMS = {FIRST_DTYPE: FIRST_FORMS, SECOND_DTYPE: SECOND_FORMS, "ema_dtype": AVERAGE_FORMS}


def _check_precision(config: ConfigFields) -> None:
    if config.fp16 and config.bf16:
        raise ValueError(
            "fp16=True and bf16=True: only one of them may be True; set the one that matches the "
            "model's dtype"
        )
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
    """Check the settings for the storage formats of state.

    Args:
        settings: a config, or an object with ``has_no_main_params`` and the config's fields for
            dtypes and stochastic rounding.

    Raises:
        SettingError: a format is not supported, or needs ``stochastic_rounding``.
    """
    for name, forms in _FORMS.items():
        choices = [form.name for form in forms]
        if getattr(settings, name) not in choices:
            _fail(settings, name, f"must be one of {choices}")
    if settings.has_no_main_params and not settings.stochastic_rounding:
        _fail(settings, "param_remainder_bits", _ROUNDS_PARAMS)
    if settings.ema_dtype == torch.bfloat16 and not settings.stochastic_rounding:
        _fail(settings, "ema_dtype", _ROUNDS_AVERAGES)


# -- fields without effect ------------------------------------------------------------------------

_NEEDS: tuple[tuple[str, str, Holds], ...] = (
    ("optimizer_offload_fraction", "optimizer_cpu_offload=True", lambda c: c.optimizer_cpu_offload),
    (
        "offload_mode offload_place optimizer_state_path",
        "optimizer_offload_fraction > 0",
        lambda c: c.may_offload,
    ),
    (
        "gpu_memory",
        "optimizer_offload_fraction='auto'",
        lambda c: c.optimizer_offload_fraction == "auto",
    ),
    (
        "release_gradients",
        "offload_mode='overlap' or 'speculative'",
        lambda c: c.may_offload and c.offload_mode != "sync",
    ),
    (
        "exp_avg_dtype exp_avg_sq_dtype store_param_remainders",
        "use_precision_aware_optimizer=True",
        lambda c: c.use_precision_aware_optimizer,
    ),
    (
        "param_remainder_bits",
        "use_precision_aware_optimizer=True, store_param_remainders=True and bf16=True",
        lambda c: c.keeps_remainders,
    ),
    (
        "fp32_state_below",
        "exp_avg_dtype of 8 or 4 bits",
        lambda c: not CODED.isdisjoint((c.exp_avg_dtype, c.exp_avg_sq_dtype)),
    ),
    (
        "data_parallel_sharding_strategy overlap_grad_reduce overlap_param_gather "
        "grad_reduce_in_fp32 grad_reduce_op",
        "use_distributed_optimizer=True",
        lambda c: c.is_distributed,
    ),
)
"""For each row: names of fields, the settings that these fields need (as text of an error), and a
function that returns True if a config has these settings. Fields without these settings are
refused. If they were ignored, a run would need more memory, or its replicas would diverge."""


def inert_fields(config: ConfigFields) -> dict[str, str]:
    """Return the fields that are set without effect, each with a reason and a remedy.

    A field has no effect if the config lacks its settings in :data:`_NEEDS`, or if only rules that
    the config does not use read the field. Other fields without effect are accepted, as in
    Megatron.
    """
    rule, tuned = RULES[config.optimizer], RULES[config.elementwise_rule].hyperparameters
    read = {*rule.fields, *(name for own in tuned if own.per_group for name in own.fields)}
    words = f"has no effect with optimizer={config.optimizer!r}"
    if config.optimizer == "muon":
        words += f" and muon_scalar_optimizer={config.muon_scalar_optimizer!r}"
    inert = dict.fromkeys({*RULE_FIELDS} - read, f"{words}; choose another optimizer")
    for names, needed, has in _NEEDS:
        if not has(config):
            inert |= dict.fromkeys(names.split(), f"has no effect without {needed}; set both")
    default = {field.name: field.default for field in fields(config)}
    return {
        name: f"{why}, or leave {name} at {default[name]!r}"
        for name, why in inert.items()
        if getattr(config, name) != default[name]
    }
