"""What each field of a config may be by itself: one table, which :mod:`mp_optim.config.rules` adds
the fields of the rules to."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from mp_optim.config.capabilities import BACKENDS
from mp_optim.config.field_kinds import (
    OPTIONAL_RATE,
    RATE,
    Check,
    Choice,
    Number,
    Size,
    Whole,
    as_bool,
    as_cores,
    as_dtype,
    as_folder,
    as_fraction,
    as_timers,
)
from mp_optim.config.rules import OPTIMIZERS, RULE_FIELDS, rules_in_words

_SCALE_LIMIT = 2.0**126
"""Loss scales and their reciprocals are normal FP32 numbers."""
_MOST_THREADS = 1024
_INT32 = 2**31 - 1
_SCALE_SAID = "must be positive and at most 2**126, at least 2**-126"
_SCALE = Number(1 / _SCALE_LIMIT, _SCALE_LIMIT, said=_SCALE_SAID)
_STEPS = Whole(1, _INT32, "must be a whole number of steps >= 1, below 2**31")
_NO_RULE = f"optimizer is {rules_in_words()}"
_MOMENTS_IN_8_BITS = (
    "8-bit moments are use_precision_aware_optimizer=True with exp_avg_dtype='uint8' and "
    "exp_avg_sq_dtype='uint8'"
)
_OTHER_RULES = (
    ("shampoo", _NO_RULE),
    ("soap", _NO_RULE),
    ("adamw8bit", _MOMENTS_IN_8_BITS),
    ("adam8bit", _MOMENTS_IN_8_BITS),
    ("adamw_8bit", _MOMENTS_IN_8_BITS),
    ("adamw_torch", "'adam' is AdamW"),
    ("adamw_torch_fused", "'adam' is AdamW"),
)

CHECKS: dict[str, Check] = {
    "optimizer": Choice(OPTIMIZERS, _OTHER_RULES),
    **RULE_FIELDS,
    **dict.fromkeys(
        ("lr", "min_lr", "decoupled_lr", "decoupled_min_lr"), OPTIONAL_RATE
    ),
    "weight_decay": RATE,
    **dict.fromkeys(
        (
            "params_dtype",
            "main_grads_dtype",
            "main_params_dtype",
            "exp_avg_dtype",
            "exp_avg_sq_dtype",
            "ema_dtype",
        ),
        as_dtype,
    ),
    "param_remainder_bits": Whole(8, 16, "must be 16 or 8"),
    "stochastic_rounding_seed": Whole(
        0, 2**32 - 1, "must be a whole number in [0, 2**32)"
    ),
    "ema_decay": Number(
        0.0, 1.0, open_high=True, optional=True, said="must be in [0, 1), or None"
    ),
    "loss_scale": Number(
        1 / _SCALE_LIMIT, _SCALE_LIMIT, optional=True, said=_SCALE_SAID
    ),
    "initial_loss_scale": _SCALE,
    "min_loss_scale": _SCALE,
    "loss_scale_window": _STEPS,
    "hysteresis": _STEPS,
    "clip_grad": Number(),
    "grad_norm_skip_threshold": Number(
        0.0, open_low=True, may_be_infinite=True, said="must be > 0 (inf: never skip)"
    ),
    "skip_step_sigma_factor": Number(
        0.0, open_low=True, may_be_infinite=True, said="must be > 0 (inf: never skip)"
    ),
    "skip_step_rolling_interval_length": Whole(
        4, 2**20, "must be a whole number of steps >= 4, at most 2**20"
    ),
    "log_param_grad_norms": Whole(
        0, _INT32, "must be a whole number of parameters >= 0"
    ),
    "log_update_ratios_interval": Whole(
        0, _INT32, "must be a whole number of steps >= 0 (0: never)"
    ),
    "optimizer_offload_fraction": as_fraction,
    "gpu_memory": Size(
        1,
        2**62,
        "must be a whole number of bytes >= 1, or text with a unit such as '60GiB'",
        optional=True,
    ),
    "offload_mode": Choice(("sync", "overlap", "speculative")),
    "offload_place": Choice(("host", "streamed", "auto")),
    "offload_streamed_fraction": Number(
        0.0, 1.0, said="must be between 0 and 1", optional=True
    ),
    "stream_window_bytes": Size(
        4096,
        2**62,
        "must be a whole number of bytes >= 4096, or text such as '256MiB'",
    ),
    "optimizer_state_path": as_folder,
    "offload_bucket_bytes": Size(
        1, 2**62, "must be a whole number of bytes >= 1, or text such as '64MiB'"
    ),
    "data_parallel_sharding_strategy": Choice(("no_shard", "optim", "optim_grads")),
    "grad_reduce_op": Choice(("avg", "sum")),
    "bucket_size": Whole(
        1, 2**62, "must be a whole number of elements >= 1", optional=True
    ),
    "fused_backend": Choice(tuple(BACKENDS)),
    "host_threads": Whole(
        1,
        _MOST_THREADS,
        f"must be a whole number >= 1, at most {_MOST_THREADS}",
        optional=True,
    ),
    "host_cores": as_cores,
    "timers": as_timers,
}
"""Fields that are not switches, and what they may be."""


def check_field(name: str, value: Any) -> Any:
    """A field's value in the form in which it is kept.

    Raises:
        ValueError: naming field and value.
    """
    check: Check = CHECKS.get(name, as_bool)
    try:
        return check(value)
    except ValueError as error:
        raise ValueError(f"{name}={_shown(value)}: {error}") from None


def check_fields(config: Any) -> None:
    """Check every field of a config by itself, and keep each in its form.

    Raises:
        ValueError: naming field and value.
    """
    for spec in fields(config):
        value = getattr(config, spec.name)
        kept = check_field(spec.name, value)
        if kept is not value:
            setattr(config, spec.name, kept)


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:60]}... ({len(text)} characters)"
