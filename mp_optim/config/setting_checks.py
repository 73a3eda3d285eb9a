"""Checks of single settings: fields of the config, and hyperparameters.

Fields are converted to the type of the field. Hyperparameters are checked in constructors, param
groups and loaded state. Numbers must be finite unless a field allows infinity, and a bool is not a
number. Numpy scalars are accepted as Python numbers. A field also accepts text that spells a number
(PyYAML reads 1e-3 as text); a hyperparameter also accepts a tensor of one element.
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
"""Largest rate, decay or factor. The limit is far above useful values, and products of two such
values still fit FP32."""
_LARGEST_FP32 = 3.4028234663852886e38


def nearest(name: str, known: Sequence[str], cutoff: float = 0.4) -> str:
    """Return ``"; did you mean ...?"`` with the most similar known name; empty if none is similar.

    Args:
        name: unknown name.
        known: accepted names.
        cutoff: least similarity, 0 to 1, as for ``difflib.get_close_matches``.
    """
    close = difflib.get_close_matches(name, known, n=1, cutoff=cutoff)
    return f"; did you mean {close[0]!r}?" if close else ""


class SettingError(ValueError):
    """Error about one setting. Name, value and reason are attributes, so that callers can replace
    the name.

    Attributes:
        name: name of the setting.
        value: refused value.
        reason: the fault of the value, and the correction.
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
"""Function that converts a value to the type of a setting. If that is not possible, the function
raises a ValueError that lists the allowed values."""


@dataclass(frozen=True)
class Number:
    """Check for a number in an interval.

    Attributes:
        low: lower limit.
        high: upper limit.
        open_low: True if ``low`` itself is not allowed.
        open_high: True if ``high`` itself is not allowed.
        may_be_infinite: True if inf is allowed.
        optional: True if None is allowed.
        whole: True if only whole numbers are allowed; 2.0 is converted to 2.
        in_bytes: True if text with a unit is allowed, too: ``"60GB"``, ``"1.5GiB"``.
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
        """The end of an error message, such as ``"must be a finite number >= 0"``."""
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
        """True if a value is a number in the interval."""
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
    """Check for one of several words.

    Attributes:
        choices: allowed words; None is one of the words if None is allowed.
        elsewhere: words of other libraries that are not supported, with a reason for the error.
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
    """Return the number that text spells; return other values unchanged."""
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
    """Return a setting as plain data.

    Numpy numbers and arrays become Python numbers and lists, other sequences (OmegaConf's
    ListConfig) become lists. Plain values are returned unchanged.
    """
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
    """Convert a dtype or the name of a dtype to a ``torch.dtype``.

    Args:
        value: dtype, or its name with or without ``torch.``; or ``bf16``, ``fp16`` or ``fp32``.

    Raises:
        ValueError: the value names no dtype.
    """
    if isinstance(value, torch.dtype):
        return value
    short = str(value).removeprefix("torch.")
    known = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}.get(short, short)
    dtype = getattr(torch, known, None)
    if not isinstance(dtype, torch.dtype):
        hint = nearest(short, ["float32", "bfloat16", "float16"])
        raise ValueError(f"must be a torch dtype or its name{hint}")
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
    reason = "must be callable as timers(name, log_level=1), or None"
    if value is None:
        return None
    if not callable(value):
        raise ValueError(reason)
    try:
        inspect.signature(value).bind("optimizer-inner-step", log_level=1)
    # bind() raises TypeError if the callable has other parameters. signature() raises one of these
    # errors if the callable has no signature to inspect. Refuse both, because a step could not call
    # such timers.
    except (TypeError, ValueError):
        raise ValueError(reason) from None
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
    """Return the element of a tensor with one element; return any other value unchanged."""
    is_scalar = isinstance(value, Tensor) and value.numel() == 1 and not value.is_meta
    return value.item() if is_scalar else value


def check_setting(name: str, value: Any, check: Check) -> None:
    """Check a hyperparameter. A tensor of one element counts as a number; text does not.

    Args:
        name: name of the hyperparameter, for the error.
        value: value to check.
        check: the allowed values.

    Raises:
        SettingError: ``check`` does not allow the value.
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
    """Error about settings of param groups, raised before any parameter is stepped."""


SCHEDULED = (
    *("lr", "weight_decay", "initial_lr", "max_lr", "min_lr", "lr_mult"),
    *("start_wd", "end_wd", "wd_mult"),
)
"""Settings of a param group that schedulers read or write."""


def check_schedule(group: Mapping[str, Any]) -> None:
    """Check the :data:`SCHEDULED` settings of a param group.

    Raises:
        ValueError: ``lr`` is None, or a setting is not a finite number >= 0.
    """
    if "lr" in group and group["lr"] is None:
        raise ValueError(
            "lr=None: no learning rate has been set; set lr, or let a scheduler set lr before the "
            "first step"
        )
    for name in SCHEDULED:
        if name in group and group[name] is not None:
            check_setting(name, group[name], NOT_NEGATIVE)


NOT_HERE = {
    "amsgrad": "AMSGrad is not supported",
    "maximize": "steps always minimize; negate the loss",
    "capturable": "steps are not captured in CUDA graphs",
    "differentiable": "steps are not differentiable",
}
"""The reason or replacement for each switch of torch's optimizers that is not supported."""
