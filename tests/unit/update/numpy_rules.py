"""The formulas of docs/numerics.md in numpy FP32, one operation at a time, written apart from the package."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]
F = np.float32


def naive_sum_of_squares(values: Array) -> float:
    """Blocks of 8 rows of 128: rows one after another, the 128 sums by halving, then block sums by adjacent pairs."""
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


def adam(p: Array, g: Array, m: Array, v: Array, t: int, h: dict[str, Any], mult: float) -> tuple[Array, ...]:
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


def lamb(p: Array, g: Array, m: Array, v: Array, t: int, h: dict[str, Any], mult: float) -> tuple[Array, ...]:
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


def sgd(p: Array, g: Array, m: Array, t: int, h: dict[str, Any], mult: float) -> tuple[Array, Array]:
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
