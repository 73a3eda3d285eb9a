"""Kinds of config fields: each takes a value and returns it in the form in which it is kept, or
raises ValueError with a rule, in words.

A value is finite unless the field says otherwise, in range, and of the field's kind. Numpy's
scalars count as Python's, and text that spells a number as that number (PyYAML reads 1e-3 as text);
a bool is no number.
"""

from __future__ import annotations

import difflib
import inspect
import math
import numbers
import os
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import torch

LARGEST = 1e10
"""Of a rate, a decay or a factor: far beyond use, and their products still fit FP32."""

Check = Callable[[Any], Any]
"""Takes a value and returns it in the form in which it is kept. Raises ValueError with a rule, in
words."""


def nearest(name: str, known: Sequence[str], cutoff: float = 0.4) -> str:
    """A question whether the most similar of the known names was meant; empty if none is
    similar."""
    close = difflib.get_close_matches(name, known, n=1, cutoff=cutoff)
    return f"; did you mean {close[0]!r}?" if close else ""


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
        value = _from_text(value)
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
        return (
            value
            if isinstance(value, (int, float)) and not _is_numpys(value)
            else number
        )


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
        value = _from_text(value)
        if not _is_number(value):
            raise ValueError(_wrong_kind(value, kind))
        try:
            whole = (
                int(float(value))
                if not isinstance(value, numbers.Integral)
                else int(value)
            )
        except (ValueError, OverflowError):  # nan, inf
            raise ValueError(self.said) from None
        if whole != value or not self.low <= whole <= self.high:
            raise ValueError(self.said)
        return whole


@dataclass(frozen=True)
class Size(Whole):
    """A number of bytes, or text with a unit: ``"60GB"``, ``"1.5GiB"``."""

    def __call__(self, value: Any) -> Any:
        if isinstance(value, str) and (match := _SIZE.fullmatch(value)):
            factor = _UNITS[match["unit"].lower()]
            value = int(Fraction(match["number"]) * factor)
        return super().__call__(value)


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


def _is_number(value: object) -> bool:
    return isinstance(value, numbers.Real) and not isinstance(value, bool)


def _is_numpys(value: object) -> bool:
    return type(value).__module__ == "numpy"


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
        raise ValueError(
            "not a torch dtype or the name of "
            f"one{nearest(short, ['float32', 'bfloat16', 'float16'])}"
        )
    return dtype


def as_fraction(value: Any) -> Any:
    if isinstance(value, str) and value == "auto":
        return "auto"
    text = "must be between 0 and 1, or 'auto'"
    value = _from_text(value)
    if isinstance(value, str):
        raise ValueError(text)
    return Number(0.0, 1.0, said=text)(value)


def as_cores(value: Any) -> tuple[int, ...] | None:
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


def as_folder(value: Any) -> str | None:
    if value is None:
        return None
    if not isinstance(value, (str, os.PathLike)) or not os.fspath(value):
        raise ValueError("must be the path of a folder, or None")
    return os.fsdecode(value)


def as_timers(value: Any) -> Any:
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
    if isinstance(value, torch.Tensor):
        return f"{text}; give a number (value.item())"
    return text


RATE = Number(0.0, LARGEST, said=f"must be a finite number >= 0, at most {LARGEST:g}")
OPTIONAL_RATE = Number(0.0, LARGEST, optional=True, said=RATE.said)
BETA = Number(0.0, 1.0, open_high=True, said="must be in [0, 1)")
