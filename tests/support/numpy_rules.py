"""The formulas of docs/numerics.md in numpy FP32, one operation at a time, written apart from the
package."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]
F = np.float32


def naive_sum_of_squares(values: Array) -> float:
    """Blocks of 8 rows of 128: rows one after another, the 128 sums by halving, then block sums by
    adjacent pairs."""
    flat = values.reshape(-1).astype(np.float64)
    blocks = max(1, -(-flat.size // 1024))
    x = np.zeros((blocks, 1024))
    x.reshape(-1)[: flat.size] = flat
    x = (x * x).reshape(blocks, 8, 128)
    for row in range(1, 8):
        x[:, 0] = x[:, 0] + x[:, row]
    x = x[:, 0]
    while x.shape[1] > 1:
        half = x.shape[1] // 2
        x = x[:, :half] + x[:, half:]
    sums = list(x[:, 0])
    while len(sums) > 1:
        sums += [0.0] * (len(sums) % 2)
        sums = [sums[i] + sums[i + 1] for i in range(0, len(sums), 2)]
    return float(sums[0])


def bf16(x: Array) -> Array:
    """FP32 values rounded to bfloat16, to nearest even (finite values)."""
    bits = np.ascontiguousarray(x, dtype=np.float32).view(np.uint32).astype(np.uint64)
    bits = (bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000
    return bits.astype(np.uint32).view(np.float32).reshape(x.shape)


def _moments(g: Array, m: Array, v: Array, h: dict[str, Any], weight: float) -> tuple[Array, Array]:
    b1, b2 = h["betas"]
    return m * F(b1) + g * F(weight), v * F(b2) + (g * F(1 - b2)) * g


def adam(
    p: Array, g: Array, m: Array, v: Array, t: int, h: dict[str, Any], mult: float
) -> tuple[Array, ...]:
    lr, wd, (b1, b2) = h["lr"], h["weight_decay"], h["betas"]
    c1, c2 = (1 - b1**t, 1 - b2**t) if h["bias_correction"] else (1.0, 1.0)
    g = g * F(mult)
    if not h["adam_w_mode"] and wd:
        g = g + p * F(wd)
    m, v = _moments(g, m, v, h, 1 - b1)
    u = (m / (np.sqrt(v) * F(1 / math.sqrt(c2)) + F(h["eps"]))) * F(lr / c1)
    if h["adam_w_mode"] and wd:
        p = p - p * F(lr * wd)
    return p - u, m, v


def lamb(
    p: Array, g: Array, m: Array, v: Array, t: int, h: dict[str, Any], mult: float
) -> tuple[Array, ...]:
    lr, wd, (b1, b2) = h["lr"], h["weight_decay"], h["betas"]
    c1, c2 = (1 - b1**t, 1 - b2**t) if h["bias_correction"] else (1.0, 1.0)
    g = g * F(mult)
    if not h["adam_w_mode"] and wd:
        g = g + p * F(wd)
    m, v = _moments(g, m, v, h, 1 - b1 if h["grad_averaging"] else 1.0)
    u = (m * F(1 / c1)) / (np.sqrt(v) * F(1 / math.sqrt(c2)) + F(h["eps"]))
    if h["adam_w_mode"] and wd:
        u = u + p * F(wd)
    pp, uu = naive_sum_of_squares(p), naive_sum_of_squares(u)
    adapts = (h["use_nvlamb"] or wd) and pp > 0 and uu > 0
    ratio = lr * math.sqrt(pp) / math.sqrt(uu) if adapts else lr
    return p - u * F(ratio), m, v


def sgd(
    p: Array, g: Array, m: Array, t: int, h: dict[str, Any], mult: float
) -> tuple[Array, Array]:
    g = g * F(mult)
    if h["weight_decay"]:
        g = g + p * F(h["weight_decay"])
    if h["momentum"]:
        m = g if t == 1 else m * F(h["momentum"]) + g * F(1 - h["dampening"])
        g = g + m * F(h["momentum"]) if h["nesterov"] else m
    return p - g * F(h["lr"]), m


def lion(p: Array, g: Array, m: Array, h: dict[str, Any], mult: float) -> tuple[Array, Array]:
    lr, wd, (b1, b2) = h["lr"], h["weight_decay"], h["betas"]
    g = g * F(mult)
    u = np.sign(m * F(b1) + g * F(1 - b1)) * F(lr)
    if wd:
        p = p - p * F(lr * wd)
    return p - u, m * F(b2) + g * F(1 - b2)


def normuon(x: Array, v: Array, h: dict[str, Any]) -> tuple[Array, Array]:
    """A direction with rows of one size, in FP64, and the moment of its rows; from an orthogonal
    one."""
    x = x.astype(np.float64)
    new = (v * h["beta2"] + np.mean(x * x, axis=-1) * (1 - h["beta2"])).astype(np.float32)
    even = x / (np.sqrt(new.astype(np.float64)) + 1e-8)[..., None]
    before, after = (np.sqrt(np.sum(each * each, (-2, -1))) for each in (x, even))
    kept = np.where(after == 0, 0, before / np.where(after == 0, 1, after))
    return even * kept[..., None, None], new


def split(p: Array, bits: int) -> tuple[Any, Any]:
    """Main params as bfloat16 patterns and remainders, in exact integer arithmetic."""
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
    """Codes and scales of a moment, block by block."""
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
    """4-bit codes as bytes: the first and the last 32 of every 64 in lower and upper halves."""
    runs = np.zeros(-(-codes.size // 64) * 64, np.int64)
    runs[: codes.size] = codes
    halves = runs.reshape(-1, 2, 32) % 16
    return (halves[:, 0] + 16 * halves[:, 1]).astype(np.uint8).reshape(-1)


def dequantised(x: Array, kind: str, second: bool) -> Array:
    """What is left of a moment after it was stored."""
    codes, scales = quantise(x, kind, second)
    value = codes.astype(np.float32) * np.repeat(scales, 256)[: x.size]
    return value * value if second else value
