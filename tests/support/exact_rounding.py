"""Rounding to nearest by exact fractions: what floating-point operations are held to."""

from __future__ import annotations

import math
from fractions import Fraction

FORMATS = {"f16": (11, -14, 15), "bf16": (8, -126, 127), "f32": (24, -126, 127)}
FORMATS["f64"] = (53, -1022, 1023)
"""Digits, and least and largest exponent of normal numbers."""


def _down(x: Fraction) -> int:
    return x.numerator // x.denominator


def _whole(x: Fraction) -> int:
    low = _down(x)
    rest, half = x - low, Fraction(1, 2)
    return low + (rest > half or (rest == half and low % 2 == 1))


def rounded(x: Fraction, kind: str, negative_zero: bool = False) -> float:
    """A number in a format, as a double.

    Args:
        negative_zero: what is exactly 0 is -0.
    """
    if x == 0:
        return -0.0 if negative_zero else 0.0
    digits, least, largest = FORMATS[kind]
    exponent = max(_exponent(abs(x)), least)
    unit = Fraction(2) ** (exponent - digits + 1)
    result = _whole(x / unit) * unit
    if result == 0:
        return -0.0 if x < 0 else 0.0
    most = (2 - Fraction(2) ** (1 - digits)) * Fraction(2) ** largest
    if abs(result) <= most:
        return float(result)
    return math.inf if x > 0 else -math.inf


def _exponent(x: Fraction) -> int:
    found = x.numerator.bit_length() - x.denominator.bit_length()
    return found - (x < Fraction(2) ** found)


def root(x: Fraction, kind: str) -> float:
    """The square root in a format: of 200 digits, and odd where it is none of them."""
    scale = 1 << 600
    whole = math.isqrt(_down(x * scale * scale))
    is_exact = Fraction(whole, scale) ** 2 == x
    return rounded(Fraction(whole if is_exact else whole | 1, scale), kind)
