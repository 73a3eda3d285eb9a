"""What each field of a config may be by itself: one table, one rule. A value is finite unless the
field says otherwise, in range, and of the field's kind; numpy's scalars count as Python's, a bool
is no number, text is no number.
"""

from __future__ import annotations

import difflib
import inspect
import math
import numbers
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch

from mp_optim.config.capabilities import BACKENDS, OPTIMIZERS
from mp_optim.config.muon import (
    COEFFICIENT_TYPES,
    MATMUL_PRECISIONS,
    SCALAR_OPTIMIZERS,
    SCALE_MODES,
    TP_MODES,
)

__all__ = ["LARGEST", "check_field", "check_fields", "nearest"]

LARGEST = 1e10
"""Of a rate, a decay or a factor: far beyond use, and their products still fit FP32."""
_SCALE_LIMIT = 2.0**126
"""Loss scales and their reciprocals are normal FP32 numbers."""
_MOST_THREADS = 1024
_INT32 = 2**31 - 1

Check = Callable[[Any], Any]
"""Takes a value and returns it in the form in which it is kept. Raises ValueError with a rule, in
words."""


def nearest(name: str, known: Sequence[str], cutoff: float = 0.4) -> str:
    """A question whether the most similar of the known names was meant; empty if none is
    similar."""
    found = difflib.get_close_matches(name, known, n=1, cutoff=cutoff)
    return f"; did you mean {found[0]!r}?" if found else ""


# -- kinds of fields ------------------------------------------------------------------------------


@dataclass(frozen=True)
class Number:
    """A real number between two limits, which belong to it unless they are ``open``."""

    low: float = 0.0
    high: float = math.inf
    open_low: bool = False
    open_high: bool = False
    may_be_infinite: bool = False
    optional: bool = False
    said: str = "must be a finite number >= 0"

    def __call__(self, value: Any) -> Any:
        if value is None and self.optional:
            return None
        kind = "float | None" if self.optional else "float"
        if not _is_number(value):
            raise ValueError(_wrong_kind(value, kind))
        try:
            number = float(value)
        except OverflowError:
            raise ValueError(self.said) from None
        low = number > self.low if self.open_low else number >= self.low
        high = number < self.high if self.open_high else number <= self.high
        if not (low and high) or (math.isinf(number) and not self.may_be_infinite):
            raise ValueError(self.said)
        return value if isinstance(value, (int, float)) and not _is_numpys(value) else number


@dataclass(frozen=True)
class Whole:
    """A whole number between two limits; one written as a float counts."""

    low: int
    high: int
    said: str
    optional: bool = False

    def __call__(self, value: Any) -> Any:
        if value is None and self.optional:
            return None
        kind = "int | None" if self.optional else "int"
        if not _is_number(value):
            raise ValueError(_wrong_kind(value, kind))
        try:
            whole = int(float(value)) if not isinstance(value, numbers.Integral) else int(value)
        except (ValueError, OverflowError):  # nan, inf
            raise ValueError(self.said) from None
        if whole != value or not self.low <= whole <= self.high:
            raise ValueError(self.said)
        return whole


@dataclass(frozen=True)
class Choice:
    """One of some words."""

    choices: tuple[str, ...]
    elsewhere: tuple[tuple[str, str], ...] = ()
    """Words that are not supported, and why."""

    def __call__(self, value: Any) -> Any:
        if isinstance(value, str) and value in self.choices:
            return str(value)
        why = dict(self.elsewhere).get(value.lower() if isinstance(value, str) else "")
        hint = f"; {why}" if why else nearest(str(value), self.choices)
        raise ValueError(f"must be one of {list(self.choices)}{hint}")


def _is_number(value: object) -> bool:
    return isinstance(value, numbers.Real) and not isinstance(value, bool)


def _is_numpys(value: object) -> bool:
    return type(value).__module__ == "numpy"


def _bool(value: Any) -> bool:
    if isinstance(value, bool):
        return value
    if _is_numpys(value) and type(value).__name__ in ("bool", "bool_"):
        return bool(value)
    raise ValueError(_wrong_kind(value, "bool"))


def _dtype(value: Any) -> torch.dtype:
    """A dtype from itself or its name, with or without ``torch.``; ``bf16``, ``fp16`` and ``fp32``
    are understood."""
    if isinstance(value, torch.dtype):
        return value
    short = str(value).removeprefix("torch.")
    known = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}.get(short, short)
    dtype = getattr(torch, known, None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(
            "not a torch dtype or the name of "
            f"one{nearest(short, ['float32', 'bfloat16', 'float16'])}"
        )
    return dtype


def _fraction(value: Any) -> Any:
    if isinstance(value, str) and value == "auto":
        return "auto"
    text = "must be between 0 and 1, or 'auto'"
    if isinstance(value, str):
        raise ValueError(text)
    return Number(0.0, 1.0, said=text)(value)


def _cores(value: Any) -> tuple[int, ...] | None:
    if value is None:
        return None
    rule = "must name at least one core, each once, as whole numbers >= 0 in a tuple or list"
    if not isinstance(value, (tuple, list, range)) or not value:
        raise ValueError(rule)
    check = Whole(0, 2**20, rule)
    cores = tuple(check(core) for core in value)
    if len(set(cores)) != len(cores):
        raise ValueError(rule)
    return cores


def _timers(value: Any) -> Any:
    if value is None:
        return None
    rule = "must be callable as timers(name, log_level=1), or None"
    if not callable(value):
        raise ValueError(rule)
    try:
        inspect.signature(value).bind("optimizer-inner-step", log_level=1)
    except (TypeError, ValueError):  # it takes something else, or does not say what
        raise ValueError(rule) from None
    return value


def _wrong_kind(value: Any, kind: str) -> str:
    text = f"must be a {kind}, not a {type(value).__name__}"
    if isinstance(value, str) and "bool" not in kind:
        try:
            number = float(value)
        except ValueError:
            return text
        digits, exponent = f"{number:e}".split("e") if math.isfinite(number) else ("", "0")
        written = f"{digits.rstrip('0').ljust(3, '0')}e{int(exponent):+d}"
        why = (
            f"YAML reads {value} as text, write {written}"
            if "e" in value.lower()
            else "leave the quotes away"
        )
        return f"{text}: {why}"
    if isinstance(value, torch.Tensor):
        return f"{text}; give a number (value.item())"
    return text


# -- the table ------------------------------------------------------------------------------------

_RATE = Number(0.0, LARGEST, said=f"must be a finite number >= 0, at most {LARGEST:g}")
_OPTIONAL_RATE = Number(0.0, LARGEST, optional=True, said=_RATE.said)
_BETA = Number(0.0, 1.0, open_high=True, said="must be in [0, 1)")
_SCALE_SAID = "must be positive and at most 2**126, at least 2**-126"
_SCALE = Number(1 / _SCALE_LIMIT, _SCALE_LIMIT, said=_SCALE_SAID)
_STEPS = Whole(1, _INT32, "must be a whole number of steps >= 1, below 2**31")
_NO_RULE = "optimizer is adam, sgd, lamb, lion or muon"
_MOMENTS_IN_8_BITS = (
    "8-bit moments are use_precision_aware_optimizer=True with exp_avg_dtype='uint8' and "
    "exp_avg_sq_dtype='uint8'"
)
_OTHER_RULES = (
    ("adafactor", _NO_RULE),
    ("shampoo", _NO_RULE),
    ("soap", _NO_RULE),
    ("adamw8bit", _MOMENTS_IN_8_BITS),
    ("adam8bit", _MOMENTS_IN_8_BITS),
    ("adamw_8bit", _MOMENTS_IN_8_BITS),
    ("adamw_torch", "'adam' is AdamW"),
    ("adamw_torch_fused", "'adam' is AdamW"),
)

CHECKS: dict[str, Check] = {
    "optimizer": Choice(tuple(OPTIMIZERS), _OTHER_RULES),
    **dict.fromkeys(("lr", "min_lr", "decoupled_lr", "decoupled_min_lr"), _OPTIONAL_RATE),
    **dict.fromkeys(("weight_decay", "adam_eps"), _RATE),
    **dict.fromkeys(
        ("adam_beta1", "adam_beta2", "lion_beta1", "lion_beta2", "muon_momentum"), _BETA
    ),
    "sgd_momentum": Number(0.0, 1.0, said="must be a finite number >= 0, at most 1"),
    **dict.fromkeys(
        (
            "params_dtype",
            "main_grads_dtype",
            "main_params_dtype",
            "exp_avg_dtype",
            "exp_avg_sq_dtype",
        ),
        _dtype,
    ),
    "param_remainder_bits": Whole(8, 16, "must be 16 or 8"),
    "stochastic_rounding_seed": Whole(0, 2**32 - 1, "must be a whole number in [0, 2**32)"),
    "loss_scale": Number(1 / _SCALE_LIMIT, _SCALE_LIMIT, optional=True, said=_SCALE_SAID),
    "initial_loss_scale": _SCALE,
    "min_loss_scale": _SCALE,
    "loss_scale_window": _STEPS,
    "hysteresis": _STEPS,
    "muon_scale_mode": Choice(tuple(SCALE_MODES)),
    "muon_coefficient_type": Choice(tuple(COEFFICIENT_TYPES)),
    "muon_fp32_matmul_prec": Choice(
        tuple(MATMUL_PRECISIONS), (("high", "TF32 is not to be had on the host"),)
    ),
    "muon_tp_mode": Choice(
        tuple(TP_MODES),
        (("distributed", "it adds up products in an order that depends on the ranks"),),
    ),
    "muon_scalar_optimizer": Choice(tuple(SCALAR_OPTIMIZERS)),
    "muon_extra_scale_factor": Number(
        0.0, LARGEST, open_low=True, said=f"must be a finite number > 0, at most {LARGEST:g}"
    ),
    "muon_num_ns_steps": Whole(1, 100, "must be a whole number >= 1, at most 100"),
    "clip_grad": Number(),
    "grad_norm_skip_threshold": Number(
        0.0, open_low=True, may_be_infinite=True, said="must be > 0 (inf: never skip)"
    ),
    "optimizer_offload_fraction": _fraction,
    "gpu_memory": Whole(
        1, 2**62, "must be a whole number of bytes >= 1 (60 GiB is 60 * 2**30)", optional=True
    ),
    "offload_mode": Choice(("sync", "overlap", "speculative")),
    "data_parallel_sharding_strategy": Choice(("no_shard", "optim", "optim_grads")),
    "grad_reduce_op": Choice(("avg", "sum")),
    "bucket_size": Whole(1, 2**62, "must be a whole number of elements >= 1", optional=True),
    "fused_backend": Choice(tuple(BACKENDS)),
    "host_threads": Whole(
        1, _MOST_THREADS, f"must be a whole number >= 1, at most {_MOST_THREADS}", optional=True
    ),
    "host_cores": _cores,
    "timers": _timers,
}
"""Fields that are not switches, and what they may be."""


def check_field(name: str, value: Any) -> Any:
    """A field's value in the form in which it is kept.

    Raises:
        ValueError: naming field and value.
    """
    check: Check = CHECKS.get(name, _bool)
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
