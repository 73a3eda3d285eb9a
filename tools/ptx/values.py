"""Bits as numbers and back, and rounding to nearest, once.

Registers hold unsigned integers; a *kind* such as ``s32``, ``f32`` or ``f32x2`` says what their
bits stand for. A NaN that an operation makes is the one that GPUs make.
"""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]

UNSIGNED = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}
KINDS: dict[str, Any] = {
    **{f"{letter}{8 * size}": unsigned for size, unsigned in UNSIGNED.items() for letter in "bu"},
    **{"s8": np.int8, "s16": np.int16, "s32": np.int32, "s64": np.int64},
    **{"f16": np.float16, "f32": np.float32, "f64": np.float64, "bf16": np.uint16},
    "pred": np.bool_,
}
PACKED = {"f32x2": ("f32", 8), "s16x2": ("s16", 4), "u16x2": ("u16", 4)}
"""Several numbers in one register: what each is, and bytes of all of them."""
NAN = {"f16": 0x7FFF, "bf16": 0x7FFF, "f32": 0x7FFFFFFF, "f64": 0x7FF8000000000000}


def size_of(kind: str) -> int:
    return PACKED[kind][1] if kind in PACKED else np.dtype(KINDS[kind]).itemsize


def typed(bits: Array, kind: str) -> Array:
    """Register bits as numbers of a kind; of a wider register the lower bits."""
    if kind == "pred":
        return bits
    unsigned = UNSIGNED[size_of(kind)]
    if bits.dtype != unsigned:
        bits = bits.astype(unsigned)
    return np.ascontiguousarray(bits).view(KINDS[PACKED.get(kind, (kind,))[0]])


def bits_of(values: Array, kind: str, register: Any) -> Array:
    if kind == "pred":
        return values
    number = PACKED.get(kind, (kind,))[0]
    dtype = KINDS[number]
    values = np.ascontiguousarray(values, dtype=dtype)
    if number in ("f16", "f32", "f64"):
        nan = np.isnan(values)
        if nan.any():
            values = np.where(nan, _nan(number), values)
    if np.dtype(register).itemsize == values.itemsize or kind in PACKED:
        return values.view(register)
    if values.dtype.kind == "f":
        values = values.view(UNSIGNED[values.itemsize])
    return values.astype(register)


def _nan(kind: str) -> Any:
    return np.array(NAN[kind], UNSIGNED[size_of(kind)]).view(KINDS[kind])


# -- rounding -------------------------------------------------------------------------------------


def two_sum(a: Array, b: Array) -> tuple[Array, Array]:
    total = a + b
    part = total - a
    return total, (a - (total - part)) + (b - part)


def to_odd(value: Array, rest: Array) -> Array:
    bits = value.view(np.int64)
    inexact = (rest != 0.0) & np.isfinite(value) & np.isfinite(rest)
    outward = (rest > 0.0) == (value > 0.0)
    odd = np.where(outward, bits | 1, (bits - 1) | 1)
    return np.where(inexact & (bits & 1 == 0), odd, bits).view(np.float64)


def fma32(a: Array, b: Array, c: Array) -> Array:
    product = a.astype(np.float64) * b.astype(np.float64)
    result = to_odd(*two_sum(product, c.astype(np.float64))).astype(np.float32)
    cancelled = (result == 0.0) & (np.signbit(product) != np.signbit(c))
    exact_zero = cancelled & (product == -c.astype(np.float64))
    return np.where(exact_zero, np.float32(0.0), result)


def _fma(a: float, b: float, c: float) -> float:
    if not all(map(np.isfinite, (a, b, c))):
        return a * b + c
    exact = Fraction(a) * Fraction(b) + Fraction(c)
    if exact == 0:
        return a * b + c
    try:
        return exact.numerator / exact.denominator
    except OverflowError:
        return np.inf if exact > 0 else -np.inf


def fma64(a: Array, b: Array, c: Array) -> Array:
    fused = np.frompyfunc(lambda *each: _fma(*map(float, each)), 3, 1)
    return np.asarray(fused(a, b, c)).astype(np.float64)


def extreme(a: Array, b: Array, largest: bool, nan: bool) -> Array:
    chosen = (np.fmax if largest else np.fmin)(a, b)
    zeros = (a == 0.0) & (b == 0.0)
    negative = (np.logical_and if largest else np.logical_or)(np.signbit(a), np.signbit(b))
    chosen = np.where(zeros, np.where(negative, -0.0, 0.0).astype(chosen.dtype), chosen)
    if nan:
        chosen = np.where(np.isnan(a) | np.isnan(b), chosen.dtype.type(np.nan), chosen)
    return chosen


def whole(value: Array, kind: str) -> Array:
    limits = np.iinfo(KINDS[kind])
    wide = np.trunc(value.astype(np.float64))
    low, high = wide <= float(limits.min), wide >= float(limits.max)
    inside = np.where(low | high | np.isnan(wide), 0.0, wide).astype(KINDS[kind])
    result = np.where(high, limits.max, np.where(low, limits.min, inside)).astype(KINDS[kind])
    odd = 0
    if value.dtype == np.float64 or kind in ("s64", "u64"):
        odd = limits.min if kind[0] == "s" else (limits.max >> 1) + 1
    return np.where(np.isnan(wide), np.array(odd, KINDS[kind]), result)


def bfloat16(value: Array) -> Array:
    bits = value.view(np.uint32)
    rounded = (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
    return np.where(np.isnan(value), np.uint32(NAN["bf16"]), rounded).astype(np.uint16)


def flushed(value: Array) -> Array:
    small = np.abs(value) < np.finfo(np.float32).tiny
    return np.where(small, np.copysign(np.float32(0.0), value), value)
