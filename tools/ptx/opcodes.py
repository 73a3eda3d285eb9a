"""What an instruction computes from its operands, by its whole name: one table of everything that
our launches emit. What is not in it is an error.

Entries name the kind of the result and those of the operands; the function sees numbers of these
kinds. Moves, memory, branches and what threads do together are the machine's.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from ptx import values
from ptx.values import Array

INTEGERS = ("u16", "s16", "u32", "s32", "u64", "s64")
BITS = ("b16", "b32", "b64")
WIDER = {"u16": "u32", "s16": "s32", "u32": "u64", "s32": "s64"}
OF_THREE = "/3"
"""Ends the name of what has a form of two operands and one of three."""


@dataclass(frozen=True)
class Operation:
    """Attributes:
    exact: its result is specified to the bit.
    """

    result: str
    operands: tuple[str, ...]
    function: Callable[..., Array]
    exact: bool = True


TABLE: dict[str, Operation] = {}


def _put(name: str, result: str, operands: Any, function: Callable[..., Array]) -> None:
    TABLE[name] = Operation(result, tuple(operands), function)


# -- whole numbers --------------------------------------------------------------------------------


def _shift_left(a: Array, amount: Array) -> Array:
    bits = 8 * a.itemsize
    shifted = a << np.minimum(amount, bits - 1).astype(a.dtype)
    return np.where(amount >= bits, a.dtype.type(0), shifted)


def _shift_right(a: Array, amount: Array) -> Array:
    bits = 8 * a.itemsize
    shifted = a >> np.minimum(amount, bits - 1).astype(a.dtype)
    if a.dtype.kind == "i":
        return shifted
    return np.where(amount >= bits, a.dtype.type(0), shifted)


def _field(a: Array, place: Array, length: Array) -> Array:
    wide = a.astype(np.int64)  # of an unsigned number never negative
    place, length = place & np.uint32(0xFF), (length & np.uint32(0xFF)).astype(np.int64)
    moved = wide >> np.minimum(place, 63).astype(np.int64)
    if a.dtype.kind == "i":
        above = np.int64(64) - np.clip(length, 1, 64)
        kept = (moved << above) >> above
    else:
        kept = moved & ((np.int64(1) << np.minimum(length, 32)) - 1)
    return np.where(length == 0, 0, kept).astype(a.dtype)


def _bytes_chosen(a: Array, b: Array, selector: Array) -> Array:
    eight = a.astype(np.uint64) | (b.astype(np.uint64) << np.uint64(32))
    result = np.zeros(np.broadcast_shapes(a.shape, b.shape, selector.shape), np.uint64)
    for place in range(4):
        nibble = (selector >> np.uint32(4 * place)) & np.uint32(0xF)
        shift = (nibble & np.uint32(7)).astype(np.uint64) * np.uint64(8)
        byte = (eight >> shift) & np.uint64(0xFF)
        sign = (byte >> np.uint64(7)) * np.uint64(0xFF)
        chosen = np.where(nibble & np.uint32(8), sign, byte)
        result |= chosen << np.uint64(8 * place)
    return result.astype(np.uint32)


def _ones(a: Array) -> Array:
    return np.bitwise_count(a).astype(np.uint32)


def _integers() -> None:
    for kind in INTEGERS:
        two = (kind, kind)
        _put(f"add.{kind}", kind, two, np.add)
        _put(f"sub.{kind}", kind, two, np.subtract)
        _put(f"mul.lo.{kind}", kind, two, np.multiply)
        _put(f"mad.lo.{kind}", kind, (*two, kind), lambda a, b, c: a * b + c)
        _put(f"min.{kind}", kind, two, np.minimum)
        _put(f"max.{kind}", kind, two, np.maximum)
        _put(f"shr.{kind}", kind, (kind, "u32"), _shift_right)
        if kind[0] == "s":
            _put(f"neg.{kind}", kind, (kind,), np.negative)
            _put(f"abs.{kind}", kind, (kind,), np.abs)
    for kind, wider in WIDER.items():
        dtype = values.KINDS[wider]
        _put(f"mul.wide.{kind}", wider, (kind, kind), _wide(dtype))
        _put(f"mad.wide.{kind}", wider, (kind, kind, wider), _wide_added(dtype))
    for kind in ("s16x2", "u16x2"):
        _put(f"max.{kind}", kind, (kind, kind), np.maximum)
        _put(f"min.{kind}", kind, (kind, kind), np.minimum)
    for kind in ("u32", "s32"):
        _put(f"bfe.{kind}", kind, (kind, "u32", "u32"), _field)
    _put("prmt.b32", "b32", ("b32", "b32", "b32"), _bytes_chosen)
    _put("popc.b32", "u32", ("b32",), _ones)


def _wide(dtype: Any) -> Callable[..., Array]:
    return lambda a, b: a.astype(dtype) * b.astype(dtype)


def _wide_added(dtype: Any) -> Callable[..., Array]:
    return lambda a, b, c: a.astype(dtype) * b.astype(dtype) + c


def _logic() -> None:
    for kind in ("pred", *BITS):
        two = (kind, kind)
        _put(f"and.{kind}", kind, two, np.bitwise_and)
        _put(f"or.{kind}", kind, two, np.bitwise_or)
        _put(f"xor.{kind}", kind, two, np.bitwise_xor)
        _put(f"not.{kind}", kind, (kind,), np.invert)
    for kind in BITS:
        _put(f"shl.{kind}", kind, (kind, "u32"), _shift_left)


# -- choices --------------------------------------------------------------------------------------

_COMPARED: dict[str, Callable[..., Array]] = {
    "eq": np.equal,
    "ne": np.not_equal,
    "lt": np.less,
    "le": np.less_equal,
    "gt": np.greater,
    "ge": np.greater_equal,
}


def _ordered(compare: Callable[..., Array], unordered: bool) -> Callable[..., Array]:
    def compared(a: Array, b: Array) -> Array:
        nan = np.isnan(a) | np.isnan(b)
        return (compare(a, b) | nan) if unordered else (compare(a, b) & ~nan)

    return compared


def _choices() -> None:
    for kind in (*BITS, *INTEGERS, "f32", "f64"):
        bits = f"b{8 * values.size_of(kind)}"  # a choice is of bits: it changes no NaN
        _put(f"selp.{kind}", bits, (bits, bits, "pred"), lambda a, b, p: np.where(p, a, b))
    for name, compare in _COMPARED.items():
        for kind in INTEGERS:
            _put(f"setp.{name}.{kind}", "pred", (kind, kind), compare)
        for kind in ("f16", "f32", "f64"):
            two = (kind, kind)
            _put(f"setp.{name}.{kind}", "pred", two, _ordered(compare, False))
            _put(f"setp.{name}u.{kind}", "pred", two, _ordered(compare, True))
        if name in ("eq", "ne"):
            for kind in BITS:
                _put(f"setp.{name}.{kind}", "pred", (kind, kind), compare)
    for kind in ("f16", "f32", "f64"):
        two = (kind, kind)
        _put(f"setp.nan.{kind}", "pred", two, lambda a, b: np.isnan(a) | np.isnan(b))
        _put(f"setp.num.{kind}", "pred", two, lambda a, b: ~(np.isnan(a) | np.isnan(b)))


# -- floats ---------------------------------------------------------------------------------------


def _floats() -> None:
    for kind in ("f32", "f32x2", "f64"):
        two = (kind, kind)
        _put(f"add.rn.{kind}", kind, two, np.add)
        _put(f"sub.rn.{kind}", kind, two, np.subtract)
        _put(f"mul.rn.{kind}", kind, two, np.multiply)
        fma = values.fma64 if kind == "f64" else values.fma32
        _put(f"fma.rn.{kind}", kind, (*two, kind), fma)
        if kind != "f32x2":
            _put(f"div.rn.{kind}", kind, two, np.divide)
            _put(f"sqrt.rn.{kind}", kind, (kind,), np.sqrt)
    for kind in ("f32", "f64"):
        two = (kind, kind)
        for largest, name in ((False, "min"), (True, "max")):
            for form, nan in ((name, False), (f"{name}.NaN", True)):
                _put(f"{form}.{kind}", kind, two, _extreme(largest, nan))
                _put(f"{form}.{kind}{OF_THREE}", kind, (*two, kind), _extreme(largest, nan))
        _put(f"abs.{kind}", kind, (kind,), np.abs)
        _put(f"neg.{kind}", kind, (kind,), np.negative)


def _extreme(largest: bool, nan: bool) -> Callable[..., Array]:
    def chosen(first: Array, *others: Array) -> Array:
        for other in others:
            first = values.extreme(first, other, largest, nan)
        return first

    return chosen


# -- conversions ----------------------------------------------------------------------------------


def _cast(kind: str) -> Callable[..., Array]:
    dtype = values.KINDS[kind]
    return lambda a: a.astype(dtype)


def _cut(kind: str) -> Callable[..., Array]:
    return lambda a: values.whole(a, kind)


def _pair(convert: Callable[[Array], Array]) -> Callable[..., Array]:
    def packed(high: Array, low: Array) -> Array:
        upper, lower = (convert(each).view(np.uint16).astype(np.uint32) for each in (high, low))
        return (upper << np.uint32(16)) | lower

    return packed


def _half(value: Array) -> Array:
    half = value.astype(np.float16)
    return np.where(np.isnan(half), np.array(values.NAN["f16"], np.uint16).view(np.float16), half)


def _conversions() -> None:
    whole_kinds = ("u8", "s8", *INTEGERS)
    for source in whole_kinds:
        for result in whole_kinds:
            _put(f"cvt.{result}.{source}", result, (source,), _cast(result))
        for result in ("f32", "f64"):
            _put(f"cvt.rn.{result}.{source}", result, (source,), _cast(result))
    for source in ("f32", "f64"):
        for result in ("s32", "u32", "s64", "u64"):
            _put(f"cvt.rzi.{result}.{source}", result, (source,), _cut(result))
        _put(f"cvt.rzi.{source}.{source}", source, (source,), np.trunc)
    _put("cvt.f64.f32", "f64", ("f32",), _cast("f64"))
    _put("cvt.rn.f32.f64", "f32", ("f64",), _cast("f32"))
    _put("cvt.f32.f16", "f32", ("f16",), _cast("f32"))
    _put("cvt.f64.f16", "f64", ("f16",), _cast("f64"))
    _put("cvt.rn.f16.f32", "f16", ("f32",), _half)
    _put("cvt.rn.f16x2.f32", "b32", ("f32", "f32"), _pair(_half))
    _put("cvt.rn.bf16.f32", "bf16", ("f32",), values.bfloat16)
    _put("cvt.rn.bf16x2.f32", "b32", ("f32", "f32"), _pair(values.bfloat16))
    _put(
        "cvt.f32.bf16",
        "f32",
        ("bf16",),
        lambda a: (a.astype(np.uint32) << np.uint32(16)).view(np.float32),
    )


# -- approximations: errors where bits are promised -----------------------------------------------


def _flushing(function: Callable[..., Array]) -> Callable[..., Array]:
    return lambda *operands: values.flushed(function(*map(values.flushed, operands)))


def _approximations() -> None:
    found: dict[str, tuple[int, Callable[..., Array]]] = {
        "div.full": (2, np.divide),
        "div.approx": (2, np.divide),
        "rcp.approx": (1, np.reciprocal),
        "sqrt.approx": (1, np.sqrt),
        "ex2.approx": (1, np.exp2),
        "lg2.approx": (1, np.log2),
    }
    for name, (count, function) in found.items():
        operands = ("f32",) * count
        TABLE[f"{name}.f32"] = Operation("f32", operands, function, exact=False)
        TABLE[f"{name}.ftz.f32"] = Operation("f32", operands, _flushing(function), exact=False)
    for name in ("add", "sub", "mul"):
        for kind in ("f32", "f64"):  # without a direction: the assembler may contract them
            nearest = TABLE[f"{name}.rn.{kind}"].function
            TABLE[f"{name}.{kind}"] = Operation(kind, (kind, kind), nearest, exact=False)


_integers()
_logic()
_choices()
_floats()
_conversions()
_approximations()
