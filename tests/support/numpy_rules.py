"""Forms of state, and the rows of NorMuon, in numpy by exact arithmetic, apart from the package.

The rules are in ``lab.any_program.arithmetic``.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]
F = np.float32


def normuon(x: Array, v: Array, h: dict[str, Any]) -> tuple[Array, Array]:
    x = x.astype(np.float64)
    new = (v * h["beta2"] + np.mean(x * x, axis=-1) * (1 - h["beta2"])).astype(np.float32)
    even = x / (np.sqrt(new.astype(np.float64)) + 1e-8)[..., None]
    before, after = (np.sqrt(np.sum(each * each, (-2, -1))) for each in (x, even))
    kept = np.where(after == 0, 0, before / np.where(after == 0, 1, after))
    return even * kept[..., None, None], new


def split(p: Array, bits: int) -> tuple[Any, Any]:
    pattern = p.view(np.uint32).astype(np.int64)
    if bits == 8:
        finite = np.isfinite(p)
        quotient, rest = pattern // 256, pattern % 256
        up = (rest > 128) | ((rest == 128) & (quotient % 2 == 1))
        pattern = np.where(finite, (quotient + up) * 256, pattern)
    pattern = np.where(np.isnan(p), 0x7FC00000, pattern)
    high = (pattern + 0x8000) // 65536
    low = (pattern - high * 65536) // (256 if bits == 8 else 1)
    return high.astype(np.uint16).view(np.int16), low.astype(np.int8 if bits == 8 else np.int16)


def join(high: Any, low: Any) -> Array:
    pattern = high.view(np.uint16).astype(np.int64) * 65536
    rest = low.astype(np.int64) * (256 if low.dtype == np.int8 else 1)
    has_none = (pattern % 2**31 == 0) | ((pattern % 2**31 == 0x7F800000) & (rest > 0))
    return np.where(has_none, pattern, pattern + rest).astype(np.uint32).view(np.float32)


def quantise(x: Array, kind: str, second: bool) -> tuple[Any, Array]:
    if second:
        x = np.minimum(np.sqrt(x), F(2.0**65))
    else:
        most = F(2.0**128 * (1 - 2.0**-11))
        x = np.where(np.isinf(x), x, np.clip(x, -most, most))
    codes, scales = [], []
    for block in (x[start : start + 256] for start in range(0, x.size, 256)):
        top = np.max(np.abs(block))
        if kind == "half":
            mantissa, exponent = np.frexp(np.float64(top))  # top = mantissa * 2^exponent, below 1
            carry = np.rint(mantissa * 2**11) == 2**11  # what half() would make a power of two
            scale = np.ldexp(F(1), int(exponent) - 15 + int(carry)).astype(np.float32)
            code = (block * (F(1) / scale)).astype(np.float16)
            code = np.maximum(code, np.float16(2.0**-24)) if second else code
        elif kind == "four":
            rough = np.float64(top / F(7))
            unit = 2.0 ** (math.floor(math.log2(rough)) - 15)  # 16 significant bits
            scale = F(math.floor(rough / unit) * unit)
            code = np.rint(block * (F(1) / scale)).astype(np.int8)
        else:
            rough = top / F(255 if second else 127)
            unit = np.float64(2.0) ** (math.floor(math.log2(rough)) - 15)  # 16 significant bits
            scale = F(math.ceil(np.float64(rough) / unit) * unit)
            code = np.clip(
                np.rint(block * (F(1) / scale)), 1 if second else -127, 255 if second else 127
            )
            code = code.astype(np.uint8 if second else np.int8)
        codes.append(code)
        scales.append(scale)
    return np.concatenate(codes), np.array(scales, dtype=np.float32)


def packed(codes: Any) -> Any:
    runs = np.zeros(-(-codes.size // 64) * 64, np.int64)
    runs[: codes.size] = codes
    halves = runs.reshape(-1, 2, 32) % 16
    return (halves[:, 0] + 16 * halves[:, 1]).astype(np.uint8).reshape(-1)
