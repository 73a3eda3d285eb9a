"""What a hyperparameter may be: one rule, wherever it is said: in a constructor, a param group,
loaded state.

A number is an int, a float, a number of numpy's or a tensor of one element, not a bool, and finite
in FP32.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from numbers import Real
from typing import Any

from torch import Tensor

_LARGEST = 3.4028234663852886e38
"""The largest finite FP32 number."""


def as_number(value: object) -> float:
    """The number that a setting is; nan if it is none, or not finite in FP32."""
    if isinstance(value, Tensor):
        value = value.item() if value.numel() == 1 and not value.is_meta else None
    if isinstance(value, bool) or not isinstance(value, Real):
        return math.nan
    try:
        number = float(value)
    except OverflowError:
        return math.nan
    return number if abs(number) <= _LARGEST else math.nan


@dataclass(frozen=True)
class Rule:
    """A test of a number, and the same in words."""

    holds: Callable[[float], bool]
    words: str


FINITE = Rule(lambda number: True, "a finite number")
NOT_NEGATIVE = Rule(lambda number: number >= 0.0, "a finite number >= 0")
POSITIVE = Rule(lambda number: number > 0.0, "a finite number > 0")
FRACTION = Rule(lambda number: 0.0 <= number < 1.0, "in [0, 1)")
WHOLE = Rule(
    lambda number: number >= 0.0 and number == int(number), "a whole number >= 0"
)


def check_setting(name: str, value: object, rule: Rule) -> None:
    """Raise unless a setting is a number for which a rule holds.

    Raises:
        ValueError: with the setting's name, its value and the rule.
    """
    number = as_number(value)
    if math.isnan(number) or not rule.holds(number):
        raise ValueError(f"{name}={value!r}: must be {rule.words}")


def check_betas(value: Any) -> None:
    """Raise ValueError unless these are the decay rates of two moments."""
    pair = list(value) if isinstance(value, list | tuple | Tensor) else []
    numbers = [as_number(beta) for beta in pair]
    if len(pair) != 2 or not all(FRACTION.holds(number) for number in numbers):
        raise ValueError(f"betas={value!r}: must be two numbers in [0, 1)")


def check_flags(group: Mapping[str, Any], names: tuple[str, ...]) -> None:
    """Raise ValueError unless these settings are true or false."""
    for name in names:
        if not isinstance(group[name], bool | int) or group[name] not in (0, 1):
            raise ValueError(f"{name}={group[name]!r}: must be True or False")


SCHEDULED = (
    "lr",
    "weight_decay",
    "initial_lr",
    "max_lr",
    "min_lr",
    "lr_mult",
    "start_wd",
    "end_wd",
    "wd_mult",
)
"""What schedulers read and write in a param group."""


def check_schedule(group: Mapping[str, Any]) -> None:
    """Raise ValueError unless the :data:`SCHEDULED` settings that a group has can be stepped with;
    ``lr`` may not be None."""
    if "lr" in group and group["lr"] is None:
        raise ValueError(
            "lr=None: no learning rate has been set; set one, or let a scheduler do so before the "
            "first step"
        )
    for name in SCHEDULED:
        if name in group and group[name] is not None:
            check_setting(name, group[name], NOT_NEGATIVE)


NOT_HERE = {
    "amsgrad": "there is no amsgrad here",
    "maximize": "negate the loss",
    "capturable": "OptimizerConfig.optimizer_cuda_graph captures steps",
    "differentiable": "steps are not differentiable here",
}
"""Switches of torch's optimizers that rules here do not have, and what to do."""


def check_shared(group: Mapping[str, Any]) -> None:
    """The settings that all rules share.

    Raises:
        ValueError: one is out of range, or a switch of torch's optimizers is on that is not here.
    """
    check_schedule(group)
    for name, instead in NOT_HERE.items():
        if group.get(name):
            raise ValueError(
                f"{name}={group[name]!r}: {instead}, and set it to False in the param group (or in "
                "the state dict's, where it comes from one)"
            )


def check_range(group: dict[str, Any], name: str, good: bool, rule: str) -> None:
    """Raise ValueError naming the setting unless ``good``."""
    if not good:
        raise ValueError(f"{name}={group[name]!r}: must be {rule}")


def check_stable_adamw_settings(group: dict[str, Any]) -> None:
    """The settings of StableAdamW."""
    check_shared(group)
    check_betas(group["betas"])
    check_setting("eps", group["eps"], NOT_NEGATIVE)
    check_flags(group, ("bias_correction",))


def check_adam_settings(group: dict[str, Any]) -> None:
    """The settings Adam and LAMB share."""
    check_shared(group)
    check_betas(group["betas"])
    check_setting("eps", group["eps"], NOT_NEGATIVE)
    check_flags(group, ("bias_correction", "adam_w_mode"))
