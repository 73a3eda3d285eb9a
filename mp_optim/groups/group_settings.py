"""The settings that a param group and an override may have."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from mp_optim.config import OptimizerConfig
from mp_optim.config.field_kinds import LARGEST, nearest
from mp_optim.config.rules import RULES
from mp_optim.config.setting_checks import SCHEDULED, as_number

OF_THE_STACK = ("optimizer", "optimizer_cpu_offload", "fp16", "bf16")
"""What one stack has one of."""
_INSTEAD = {"lr": "max_lr", "weight_decay": "wd_mult, start_wd and end_wd"}
"""What schedules set, and what of an override they set it from."""
_SETTINGS_OF_ANY = (
    "params",
    "param_names",
    "is_expert_parallel",
    "is_decoupled_lr",
    "optimizer",
    *SCHEDULED,
)
_AS_ELSEWHERE = {
    "learning_rate": "lr",
    "wd": "weight_decay",
    "decay": "weight_decay",
    "beta1": "betas",
    "beta2": "betas",
    "epsilon": "eps",
    "adam_eps": "eps",
    "adam_betas": "betas",
}
_RATES = [name for name in SCHEDULED if name != "initial_lr"]
_LIMITS: dict[str, tuple[float, str]] = {
    **dict.fromkeys((*_RATES, "eps"), (LARGEST, f"a number from 0 to {LARGEST:g}")),
    "momentum": (1.0, "a number from 0 to 1"),
}


def checked_override(
    config: OptimizerConfig, override: Mapping[str, Any]
) -> dict[str, Any]:
    """An override with lists as tuples.

    Raises:
        ValueError: a setting is unknown or would do nothing.
    """
    known = [*_RATES, *RULES[config.optimizer].overrides, *OF_THE_STACK]
    for name, value in override.items():
        if name in _INSTEAD:
            raise ValueError(
                f"override {name}={value!r}: schedules set {name}; use {_INSTEAD[name]}"
            )
        if name not in known:
            raise ValueError(
                f"override {name}={value!r}: no setting of a param group of "
                f"{config.optimizer!r}{nearest(name, known)}"
            )
    check_group_settings("override", override, config.optimizer)
    top = override.get("max_lr", config.lr)
    floor = override.get("min_lr", config.min_lr)
    if top is not None and floor is not None and floor > top:
        raise ValueError(
            f"override max_lr={top!r}: below min_lr={floor!r}; override min_lr too"
        )
    return {
        name: tuple(value) if isinstance(value, list) else value
        for name, value in override.items()
    }


def check_group_settings(where: str, group: Mapping[str, Any], rule: str) -> None:
    """Raise if a setting of a param group is misspelt or out of range. Keys of the caller's own,
    which resemble none of ours, are left alone.

    Raises:
        ValueError: naming the group and the key.
    """
    known = [*_SETTINGS_OF_ANY, *RULES[rule].overrides]
    for name, value in group.items():
        hint = nearest(name, known, 0.8)
        if name in _AS_ELSEWHERE:
            hint = f"; did you mean {_AS_ELSEWHERE[name]!r}?"
        if name not in known and hint:
            raise ValueError(
                f"{where}: {name}={value!r} is no setting of a param group{hint}"
            )
        most, words = _LIMITS.get(name, (math.inf, ""))
        is_pair = isinstance(
            RULES[rule].settings.get(name), tuple
        )  # the rule checks it
        if name in _LIMITS and not (
            is_pair or isinstance(value, Tensor) or _within(value, most)
        ):
            raise ValueError(f"{where}: {name}={value!r} must be {words}")
        if name == "betas" and not (
            isinstance(value, (tuple, list))
            and len(value) == 2
            and all(_within(beta, math.nextafter(1.0, 0.0)) for beta in value)
        ):
            raise ValueError(f"{where}: betas={value!r} must be two numbers in [0, 1)")


def _within(value: Any, most: float) -> bool:
    return not isinstance(value, Tensor) and 0.0 <= as_number(value) <= most
