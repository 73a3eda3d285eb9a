"""What the machine's instructions compute, each against Python's whole numbers and exact fractions,
over zeros, denormals, infinities, NaNs and random bits."""

from __future__ import annotations

import math
import struct
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import numpy as np
import pytest

from ptx import values
from ptx.opcodes import TABLE
from support.exact_rounding import root, rounded

FLOATS = {"f16": "e", "f32": "f", "f64": "d"}
SPECIAL = {
    "f16": [0x0000, 0x8000, 0x0001, 0x8001, 0x03FF, 0x0400, 0x7BFF, 0x7C00, 0xFC00, 0x7E01, 0x3C00],
    "f32": [
        *(0x00000000, 0x80000000, 0x00000001, 0x80000001, 0x007FFFFF, 0x00800000, 0x80800000),
        *(0x7F7FFFFF, 0xFF7FFFFF, 0x7F800000, 0xFF800000, 0x7FC00000, 0x7F800001, 0x3F800000),
        *(0xBF800000, 0x3F800001, 0x33800000, 0x477FF000, 0x477FEFFF, 0x38800000, 0x33000001),
        *(0x4EFFFFFF, 0x4F000000, 0xCF000000, 0x4F800000, 0x5F000000, 0x3F000000, 0x3FC00000),
        *(0x3F808000, 0x3F818000, 0x7F7F8000, 0x40400000),
    ],
    "f64": [
        *(0, 1 << 63, 1, 0x7FEFFFFFFFFFFFFF, 0x7FF0000000000000, 0xFFF0000000000000),
        *(0x7FF8000000000000, 0x3FF0000000000000, 0x3690000000000000, 0x36A0000000000000),
        *(0x47EFFFFFF0000000, 0x47EFFFFFEFFFFFFF, 0x380FFFFFE0000001, 0xC1E0000000200000),
        *(0x3FF0000010000000, 0x3FF0000030000000, 0x3FF0000010000001, 0x43E0000000000000),
    ],
    "s8": [0, 1, 0x7F, 0x80, 0xFF],
    "s16": [0, 1, 0x7FFF, 0x8000, 0xFFFF, 0x00FF],
    "s32": [0, 1, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFF, 0x01000001, 0x7FFFFFBF, 31, 32, 33],
    "s64": [0, 1, (1 << 63) - 1, 1 << 63, (1 << 64) - 1, (1 << 53) + 1, 0x7FFFFFBFFFFFFFFF],
}


def bits(kind: str) -> list[int]:
    """Bits of a kind to try."""
    if kind == "pred":
        return [0, 1]
    size = values.size_of(kind)
    name = kind if kind in FLOATS else f"s{8 * size}"
    if kind == "bf16":
        name = "s16"
    generator = np.random.default_rng(1)
    some = generator.integers(0, 1 << 63, 4, dtype=np.uint64).tolist()
    return [*SPECIAL[name], *(int(each) >> (63 - 8 * size + 1) for each in some)]


def number(each: int, kind: str) -> Any:
    """What Python calls these bits."""
    size = 8 * values.size_of(kind)
    if kind in FLOATS:
        return struct.unpack(f"<{FLOATS[kind]}", each.to_bytes(size // 8, "little"))[0]
    if kind == "bf16":
        return number(each << 16, "f32")
    if kind[0] == "s":
        return each - (1 << size) * (each >> (size - 1))
    return bool(each) if kind == "pred" else each


def as_bits(value: Any, kind: str) -> int:
    if kind == "bf16":
        return as_bits(value, "f32") >> 16
    if kind in FLOATS:
        return int.from_bytes(struct.pack(f"<{FLOATS[kind]}", value), "little")
    return int(value) & ((1 << 8 * values.size_of(kind)) - 1 if kind != "pred" else 1)


def same(found: int, expected: int, kind: str) -> bool:
    """Of NaNs there is one, the GPU's."""
    name = kind if kind in values.NAN else ""
    if name and math.isnan(number(expected, name)):
        return found == values.NAN[name]
    return found == expected


def columns(kinds: tuple[str, ...]) -> list[tuple[int, ...]]:
    """Operands to try: all pairs, and of three some triples."""
    if len(kinds) == 3 and "pred" not in kinds:
        generator = np.random.default_rng(2)
        picked = [generator.choice(np.array(bits(kind), np.uint64), 300) for kind in kinds]
        return [tuple(map(int, each)) for each in zip(*picked, strict=True)]
    found: list[tuple[int, ...]] = [()]
    for kind in kinds:
        found = [(*before, each) for before in found for each in bits(kind)]
    return found


def computed(name: str, rows: list[tuple[int, ...]]) -> list[int]:
    """What the table's function makes of operands, as bits of the result."""
    operation = TABLE[name]
    given = []
    for place, kind in enumerate(operation.operands):
        column = [row[place] for row in rows]
        if kind == "pred":
            given.append(np.array(column, np.bool_))
        else:
            unsigned = values.UNSIGNED[values.size_of(kind)]
            given.append(values.typed(np.array(column, unsigned), kind))
    with np.errstate(all="ignore"):
        result = operation.function(*given)
    if operation.result == "pred":
        return [int(each) for each in result]
    register = values.UNSIGNED[values.size_of(operation.result)]
    return [int(each) for each in values.bits_of(result, operation.result, register)]


# -- what it should be ----------------------------------------------------------------------------


def finite(*each: float) -> bool:
    return all(map(math.isfinite, each))


def summed(a: float, b: float, kind: str) -> float:
    if not finite(a, b):
        return a + b
    return rounded(Fraction(a) + Fraction(b), kind, a == b == 0 and both_negative(a, b))


def both_negative(a: float, b: float) -> bool:
    return math.copysign(1, a) + math.copysign(1, b) < 0


def multiplied(a: float, b: float, kind: str) -> float:
    if not finite(a, b):
        return a * b
    negative = math.copysign(1, a) != math.copysign(1, b)
    return rounded(Fraction(a) * Fraction(b), kind, negative)


def divided(a: float, b: float, kind: str) -> float:
    negative = math.copysign(1, a) != math.copysign(1, b)
    if math.isnan(a) or math.isnan(b) or (math.isinf(a) and math.isinf(b)) or a == b == 0:
        return math.nan
    if math.isinf(a) or b == 0:
        return -math.inf if negative else math.inf
    if math.isinf(b):
        return -0.0 if negative else 0.0
    return rounded(Fraction(a) / Fraction(b), kind, negative)


def rooted(a: float, kind: str) -> float:
    if math.isnan(a) or a < 0:
        return math.nan
    return a if a == 0 or math.isinf(a) else root(Fraction(a), kind)


def fused(a: float, b: float, c: float, kind: str) -> float:
    sign = math.copysign(1, a) * math.copysign(1, b)
    if not finite(a, b, c):
        if math.isnan(a) or math.isnan(b) or (not finite(a, b) and 0 in (a, b)):
            return math.nan
        return (sign * math.inf if not finite(a, b) else 0.0) + c
    product = Fraction(a) * Fraction(b)
    return rounded(product + Fraction(c), kind, product == c == 0 and both_negative(sign, c))


def extreme(a: float, b: float, largest: bool, nan: bool) -> float:
    if math.isnan(a) or math.isnan(b):
        return math.nan if nan or (math.isnan(a) and math.isnan(b)) else b if math.isnan(a) else a
    if a == b == 0:
        signs = math.copysign(1, a), math.copysign(1, b)
        return math.copysign(0.0, (max if largest else min)(signs))
    return (max if largest else min)(a, b)


FLOAT: dict[str, Callable[..., float]] = {
    "add": summed,
    "sub": lambda a, b, kind: summed(a, -b, kind),
    "mul": multiplied,
    "div": divided,
    "sqrt": rooted,
    "fma": fused,
}
COMPARED: dict[str, Callable[[Any, Any], bool]] = {
    "eq": lambda a, b: a == b,
    "ne": lambda a, b: a != b,
    "lt": lambda a, b: a < b,
    "le": lambda a, b: a <= b,
    "gt": lambda a, b: a > b,
    "ge": lambda a, b: a >= b,
}
WHOLE: dict[str, Callable[..., int]] = {
    "add": lambda a, b: a + b,
    "sub": lambda a, b: a - b,
    "mul": lambda a, b: a * b,
    "mad": lambda a, b, c: a * b + c,
    "min": min,
    "max": max,
    "and": lambda a, b: a & b,
    "or": lambda a, b: a | b,
    "xor": lambda a, b: a ^ b,
    "not": lambda a: ~a,
    "neg": lambda a: -a,
    "abs": abs,
    "popc": lambda a: a.bit_count(),
}


def field(a: int, place: int, length: int, kind: str) -> int:
    """As the ISA's text has it, bit by bit."""
    place, length = place & 0xFF, length & 0xFF
    sign = 0
    if kind[0] == "s" and length:
        sign = (a >> min(place + length - 1, 31)) & 1
    result = 0
    for bit in range(32):
        inside = bit < length and place + bit <= 31
        result |= ((a >> (place + bit)) & 1 if inside else sign) << bit
    return result


def chosen(a: int, b: int, selector: int) -> int:
    eight = (a & 0xFFFFFFFF) | b << 32
    result = 0
    for place in range(4):
        nibble = selector >> 4 * place & 15
        byte = eight >> 8 * (nibble & 7) & 0xFF
        byte = (byte >> 7) * 0xFF if nibble & 8 else byte
        result |= byte << 8 * place
    return result


def converted(value: Any, result: str, source: str, mode: str) -> Any:
    if result in FLOATS or result == "bf16":
        if isinstance(value, float) and (not finite(value) or value == 0):
            return value
        if mode == "rzi":
            return rounded(Fraction(math.trunc(value)), result, value < 0)
        return rounded(Fraction(value), result)
    size = 8 * values.size_of(result)
    if not isinstance(value, float):
        return value
    low, high = (
        (-(1 << size - 1), (1 << size - 1) - 1) if result[0] == "s" else (0, (1 << size) - 1)
    )
    if math.isnan(value):
        return 0 if source == "f32" and size < 64 else 1 << size - 1
    if math.isinf(value):
        return high if value > 0 else low
    return min(max(math.trunc(value), low), high)


def _of_floats(parts: list[str], kind: str, row: list[Any]) -> Any:
    family, mode = parts[0], parts[1]
    if family in ("min", "max"):
        first, *others = row
        for other in others:
            first = extreme(first, other, family == "max", mode == "NaN")
        return first
    if family == "abs":
        return abs(row[0])
    if family == "neg":
        return -row[0]
    return FLOAT[family](*row, kind)


def _of_whole(parts: list[str], kind: str, row: list[Any]) -> int:
    family = parts[0]
    if family == "shl":
        return int(row[0] << row[1]) if row[1] < 64 else 0
    if family == "shr":
        return int(row[0] >> min(row[1], 64))
    if family == "bfe":
        return field(row[0], row[1], row[2], kind)
    if family == "prmt":
        return chosen(*row)
    return WHOLE[family](*row)


def _compared(parts: list[str], row: list[Any]) -> bool:
    how = parts[1]
    nan = any(isinstance(each, float) and math.isnan(each) for each in row)
    if how in ("nan", "num"):
        return nan == (how == "nan")
    if how.endswith("u") and how[:2] in COMPARED:
        return nan or COMPARED[how[:2]](*row)
    return not nan and COMPARED[how](*row)


def expected(name: str, row: tuple[int, ...]) -> int:
    """Bits of the result, by its name and what the ISA says of it."""
    operation, parts = TABLE[name], name.split(".")
    given = [number(each, kind) for each, kind in zip(row, operation.operands, strict=True)]
    result = operation.result
    if parts[0] == "setp":
        return int(_compared(parts, given))
    if parts[0] == "selp":
        return row[0] if row[2] else row[1]
    if parts[0] == "cvt" and parts[2] in ("f16x2", "bf16x2"):
        half = parts[2][:-2]
        both = [as_bits(converted(each, half, "f32", "rn"), half) for each in given]
        for place, each in enumerate(given):
            if math.isnan(each):
                both[place] = values.NAN[half]
        return both[0] << 16 | both[1]
    if parts[0] == "cvt":
        value = converted(given[0], result, operation.operands[0], parts[1])
    elif operation.operands[0] in FLOATS:
        value = _of_floats(parts, operation.operands[0], given)
    else:
        value = _of_whole(parts, operation.operands[0], given)
    return as_bits(value, result)


PACKED = tuple(name for name in TABLE if name.endswith("x2") and not name.startswith("cvt"))
EXACT = tuple(name for name in TABLE if TABLE[name].exact and name not in PACKED)


@pytest.mark.parametrize("name", EXACT)
def test_each_instruction_is_what_the_isa_says(name: str) -> None:
    operation = TABLE[name]
    rows = columns(operation.operands)
    wrong = [
        (row, hex(found), hex(expected(name, row)))
        for row, found in zip(rows, computed(name, rows), strict=True)
        if not same(found, expected(name, row), operation.result)
    ]
    assert not wrong, wrong[:3]


@pytest.mark.parametrize("name", PACKED)
def test_a_packed_instruction_is_that_of_each_half(name: str) -> None:
    half = name[: -len("x2")]
    size = 8 * values.size_of(half.split(".")[-1])
    rows = columns(TABLE[half].operands)
    others = rows[1:] + rows[:1]
    pairs = [
        tuple(low | high << size for low, high in zip(one, other, strict=True))
        for one, other in zip(rows, others, strict=True)
    ]
    low, high = computed(half, rows), computed(half, others)
    assert computed(name, pairs) == [a | b << size for a, b in zip(low, high, strict=True)]


def test_only_approximations_and_what_may_be_contracted_are_inexact() -> None:
    inexact = {name for name, operation in TABLE.items() if not operation.exact}
    families = {name.split(".")[1] for name in inexact}
    assert families == {"approx", "full", "f32", "f64"}
    assert {
        f"{name}.{kind}" for name in ("add", "sub", "mul") for kind in ("f32", "f64")
    } <= inexact


def test_flushing_makes_zeros_of_denormal_operands_and_results() -> None:
    tiny, least = 0x00000001, 0x00800000
    (found,) = computed("div.full.ftz.f32", [(tiny, 0x3F800000)])
    assert found == 0
    (kept,) = computed("div.full.f32", [(tiny, 0x3F800000)])
    assert kept == tiny
    (result,) = computed("div.full.ftz.f32", [(least | 0x80000000, 0x40000000)])
    assert result == 0x80000000
