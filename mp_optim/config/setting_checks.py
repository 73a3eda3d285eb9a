"""What a setting may be: a field of the config, which is kept in the form of its kind; and a
hyperparameter, wherever it is given: in a constructor, a param group, loaded state.

Numbers are finite unless a field says otherwise, and a bool is no number. Numpy's scalars count as
Python's. A field also takes text that spells a number (PyYAML reads 1e-3 as text), a hyperparameter
also a tensor of one element.
"""

from __future__ import annotations

import difflib
import inspect
import math
import operator
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import partial
from numbers import Integral, Real
from typing import Any

import torch
from torch import Tensor

LARGEST = 1e10
"""Of a rate, a decay or a factor: far beyond use, and their products still fit FP32."""
_LARGEST_FP32 = 3.4028234663852886e38


def nearest(name: str, known: Sequence[str], cutoff: float = 0.4) -> str:
    """A question whether the most similar of the known names was meant; empty if none is
    similar."""
    close = difflib.get_close_matches(name, known, n=1, cutoff=cutoff)
    return f"; did you mean {close[0]!r}?" if close else ""


class SettingError(ValueError):
    """A setting that is refused, in parts for callers that call it by another name.

    Attributes:
        name: the setting's name.
        value: the value that was given.
        reason: a fact about the value, and how to mend it.
    """

    def __init__(self, name: str, value: object, reason: str) -> None:
        super().__init__(name, value, reason)
        self.name, self.value, self.reason = name, value, reason

    def __str__(self) -> str:
        text = repr(self.value)
        shown = text if len(text) <= 80 else f"{text[:60]}... ({len(text)} characters)"
        return f"{self.name}={shown}: {self.reason}"


# -- fields ---------------------------------------------------------------------------------------

Check = Callable[[Any], Any]
"""Takes a value and returns it in the form in which it is kept. Raises ValueError with what it must
be, in words."""


@dataclass(frozen=True)
class Number:
    """A number between two limits, which belong to it unless they are ``open``.

    Attributes:
        whole: only whole numbers; one that is written as a float counts.
        in_bytes: text with a unit counts too: ``"60GB"``, ``"1.5GiB"``.
    """

    low: float = 0.0
    high: float = math.inf
    open_low: bool = False
    open_high: bool = False
    may_be_infinite: bool = False
    optional: bool = False
    whole: bool = False
    in_bytes: bool = False

    @property
    def said(self) -> str:
        """The end of an error."""
        kind = "a number" if self.may_be_infinite else "a finite number"
        kind = "a whole number" if self.whole else kind
        low = f" {'>' if self.open_low else '>='} {self.low:g}"
        if self.low == -_LARGEST_FP32:
            low = ""
        elif self.high < (2**53 if self.whole else _LARGEST_FP32):
            ends = "(" if self.open_low else "[", ")" if self.open_high else "]"
            low = f" in {ends[0]}{self.low:g}, {self.high:.12g}{ends[1]}"
        unit = ", or text with a unit such as '64MiB'" if self.in_bytes else ""
        return f"must be {kind}{low}{unit}{', or None' if self.optional else ''}"

    def __call__(self, value: Any) -> Any:
        if value is None and self.optional:
            return None
        if self.in_bytes and isinstance(value, str) and (match := _SIZE.fullmatch(value)):
            value = int(Fraction(match["number"]) * _UNITS[match["unit"].lower()])
        value = _from_text(value)
        if not _is_real(value):
            kind = "int" if self.whole else "float"
            raise ValueError(_wrong_kind(value, f"{kind} | None" if self.optional else kind))
        if not self.holds(value):
            raise ValueError(self.said)
        if self.whole:
            return int(value) if isinstance(value, Integral) else int(float(value))
        return value if isinstance(value, int | float) and not _is_numpys(value) else float(value)

    def holds(self, value: Any) -> bool:
        """True if a value is a number between the limits."""
        if not _is_real(value):
            return False
        try:
            number = float(value)
        except OverflowError:
            return False
        low = number > self.low if self.open_low else number >= self.low
        high = number < self.high if self.open_high else number <= self.high
        is_finite = self.may_be_infinite or not math.isinf(number)
        return low and high and is_finite and (number.is_integer() or not self.whole)


whole = partial(Number, whole=True)


@dataclass(frozen=True)
class Choice:
    """One of some words.

    Attributes:
        elsewhere: words that are not supported, and why.
    """

    choices: tuple[str | None, ...]
    elsewhere: tuple[tuple[str, str], ...] = ()

    def __call__(self, value: Any) -> Any:
        if isinstance(value, str | None) and value in self.choices:
            return None if value is None else str(value)
        why = dict(self.elsewhere).get(value.lower() if isinstance(value, str) else "")
        hint = f"; {why}" if why else nearest(str(value), [*filter(None, self.choices)])
        raise ValueError(f"must be one of {list(self.choices)}{hint}")


_NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?")
_SIZE = re.compile(r"(?P<number>\d+(\.\d+)?) ?(?P<unit>[kmgt]i?b)", re.IGNORECASE)
_UNITS = {
    **{unit: 1000**power for power, unit in enumerate(("kb", "mb", "gb", "tb"), 1)},
    **{unit: 1024**power for power, unit in enumerate(("kib", "mib", "gib", "tib"), 1)},
}


def _from_text(value: Any) -> Any:
    """The number that text spells; anything else as it is."""
    if not (isinstance(value, str) and len(value) <= 40 and _NUMBER.fullmatch(value)):
        return value
    return int(value) if value.isdigit() else float(value)


def _is_real(value: Any) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool)


def _wrong_kind(value: Any, kind: str) -> str:
    way_out = "; give a number (value.item())" if isinstance(value, Tensor) else ""
    return f"must be a {kind}, not a {type(value).__name__}{way_out}"


def _is_numpys(value: object) -> bool:
    return type(value).__module__ == "numpy"


def plain_setting(value: Any) -> Any:
    """Return a setting as plain data: numpy's numbers and arrays as Python's numbers and lists,
    other sequences (OmegaConf's ListConfig) as lists. Plain values are returned themselves."""
    if _is_numpys(value) and hasattr(value, "tolist"):
        return value.tolist()
    if not isinstance(value, Sequence) or isinstance(value, str | bytes | range):
        return value
    items = [*map(plain_setting, value)]
    if type(value) is list or isinstance(value, tuple):
        is_plain = all(map(operator.is_, items, value))
        return value if is_plain else tuple(items) if isinstance(value, tuple) else items
    return items


def as_bool(value: Any) -> bool:
    if isinstance(value, bool):
        return value
    if _is_numpys(value) and type(value).__name__ in ("bool", "bool_"):
        return bool(value)
    raise ValueError(_wrong_kind(value, "bool"))


def as_dtype(value: Any) -> torch.dtype:
    """A dtype from itself or its name, with or without ``torch.``; ``bf16``, ``fp16`` and ``fp32``
    are understood."""
    if isinstance(value, torch.dtype):
        return value
    short = str(value).removeprefix("torch.")
    known = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}.get(short, short)
    dtype = getattr(torch, known, None)
    if not isinstance(dtype, torch.dtype):
        hint = nearest(short, ["float32", "bfloat16", "float16"])
        raise ValueError(f"not a torch dtype or the name of one{hint}")
    return dtype


def as_fraction(value: Any) -> Any:
    if isinstance(value, str) and value == "auto":
        return "auto"
    value = _from_text(value)
    if UP_TO_1.holds(value):
        return UP_TO_1(value)
    hint = ""
    if isinstance(value, bool):
        hint = f", not a bool; give {float(value)}"
    elif _is_real(value) and 2 <= value <= 100:
        hint = f"; give {value / 100:g} for {value:g} %"
    raise ValueError(f"must be between 0 and 1, or 'auto'{hint}")


def as_folder(value: Any) -> str | None:
    if value is None:
        return None
    if not isinstance(value, (str, os.PathLike)) or not os.fspath(value):
        raise ValueError("must be the path of a folder, or None")
    return os.fsdecode(value)


def as_timers(value: Any) -> Any:
    said = "must be callable as timers(name, log_level=1), or None"
    if value is None:
        return None
    if not callable(value):
        raise ValueError(said)
    try:
        inspect.signature(value).bind("optimizer-inner-step", log_level=1)
    except (TypeError, ValueError):  # it takes something else, or does not say what
        raise ValueError(said) from None
    return value


RATE = Number(0.0, LARGEST)
OPTIONAL_RATE = Number(0.0, LARGEST, optional=True)
UP_TO_1 = Number(0.0, 1.0)
BETA = Number(0.0, 1.0, open_high=True)


# -- hyperparameters ------------------------------------------------------------------------------

FINITE = Number(-_LARGEST_FP32, _LARGEST_FP32)
NOT_NEGATIVE = Number(0.0, _LARGEST_FP32)
POSITIVE = Number(0.0, _LARGEST_FP32, open_low=True)
WHOLE = whole(0, 2**53)


def as_flag(value: Any) -> bool:
    if not (isinstance(value, bool | int) and value in (0, 1)):
        raise ValueError("must be True or False")
    return bool(value)


def as_betas(value: Any) -> list[Any]:
    betas = [*map(_scalar, value)] if isinstance(value, list | tuple | Tensor) else []
    if len(betas) != 2 or not all(map(BETA.holds, betas)):
        raise ValueError("must be two numbers in [0, 1)")
    return betas


def _scalar(value: Any) -> Any:
    """Return the element of a tensor that has one; any other value unchanged."""
    is_scalar = isinstance(value, Tensor) and value.numel() == 1 and not value.is_meta
    return value.item() if is_scalar else value


def check_setting(name: str, value: Any, check: Check) -> None:
    """Raise unless a hyperparameter is what is allowed. A tensor of one element counts as a number,
    text does not.

    Raises:
        SettingError: naming setting and value.
    """
    plain = _scalar(value)
    if isinstance(check, Number):
        if not check.holds(plain):
            raise SettingError(name, value, check.said)
        return
    try:
        check(plain)
    except ValueError as error:
        raise SettingError(name, value, str(error)) from None


class RefusedSettings(ValueError):
    """Settings of param groups that no step can be taken with; nothing was stepped."""


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
    "capturable": "steps are not captured in CUDA graphs here",
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
