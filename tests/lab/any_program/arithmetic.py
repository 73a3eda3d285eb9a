"""docs/numerics.md in numpy: rounding, sums, forms of state and rules, on flat FP32 arrays.

It is independent of the package. Every operation is one IEEE operation in FP32, unless a docstring
states another.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]
F = np.float32

BLOCK = 256
TINY_BLOCK = 2.0**-100
QUIET_NAN = 0x7FC00000
MOST_BFLOAT16 = 2.0**128 * (1 - 2.0**-8)
MOST_IN_BLOCKS = 2.0**128 * (1 - 2.0**-11)
INFINITE_ROOT = 2.0**65
LARGEST = np.finfo(F).max


# -- rounding -------------------------------------------------------------------------------------


def fp32(value: float) -> float:
    return float(F(value))


def rounded(x: Array, dtype: str) -> Array:
    if dtype == "fp16":
        return x.astype(np.float16).astype(F)
    return to_bfloat16(x) if dtype == "bf16" else x.copy()


def to_bfloat16(x: Array) -> Array:
    bits = np.ascontiguousarray(x).view(np.uint32).astype(np.uint64)
    bits = (bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000
    return np.where(np.isnan(x), F(np.nan), bits.astype(np.uint32).view(F))


def same_bits(a: Array, b: Array) -> bool:
    """Whether FP32 arrays are the same bits, where any two NaNs are."""
    return a.shape == b.shape and bool(np.all(equal_bits(a, b)))


def equal_bits(a: Array, b: Array) -> Any:
    """Return which elements of FP32 arrays have the same bits; any two NaNs do."""
    same = np.ascontiguousarray(a).view(np.uint32) == np.ascontiguousarray(b).view(np.uint32)
    return same | (np.isnan(a) & np.isnan(b))


# -- sums -----------------------------------------------------------------------------------------


def sum_of_squares(x: Array) -> float:
    flat = x.astype(np.float64)
    blocks = max(1, -(-flat.size // 1024))
    padded = np.zeros(blocks * 1024)
    padded[: flat.size] = flat
    rows = (padded * padded).reshape(blocks, 8, 128)
    total = rows[:, 0]
    for row in range(1, 8):
        total = total + rows[:, row]
    while total.shape[1] > 1:
        half = total.shape[1] // 2
        total = total[:, :half] + total[:, half:]
    return in_pairs([float(value) for value in total[:, 0]])


def in_pairs(values: Sequence[float]) -> float:
    left = list(values) or [0.0]
    while len(left) > 1:
        left += [0.0] * (len(left) % 2)
        left = [left[i] + left[i + 1] for i in range(0, len(left), 2)]
    return left[0]


# -- moments as they are stored -------------------------------------------------------------------


@dataclass(frozen=True)
class Stored:
    """A moment: codes (or FP32 values), and a scale for each block if the form has them."""

    form: str
    codes: Array
    scales: Array | None
    second: bool

    def values(self) -> Array:
        if self.scales is None:
            return self.codes
        x = self.codes * np.repeat(self.scales, BLOCK)[: self.codes.size]
        return x * x if self.second else x


def stored(x: Array, form: str, second: bool, *, loads: bool = False) -> Stored:
    """Round a moment to a form.

    Args:
        x: FP32 values, shape (n,).
        form: name of the form's dtype.
        second: True for a second moment. Its blocks store the square root.
        loads: True to try a second scale for each 8-bit block that loses bits, as a load does.
    """
    if form == "float32":
        return Stored(form, x, None, second)
    if form == "bfloat16":
        return Stored(form, to_bfloat16(_finite_within(x, MOST_BFLOAT16)), None, second)
    if second:
        roots = np.minimum(np.sqrt(x.astype(np.float64)), INFINITE_ROOT).astype(F)
    else:
        roots = _finite_within(x, MOST_IN_BLOCKS)
    blocks = []
    for start in range(0, x.size, BLOCK):
        part = slice(start, start + BLOCK)
        block = _block(roots[part], form, second)
        if loads and form == "uint8":
            other = _block(roots[part], form, second, top_code=254 if second else 126)
            if not _holds(block, x[part], second) and _holds(other, x[part], second):
                block = other
        blocks.append(block)
    codes = np.concatenate([np.zeros(0, F), *(codes for codes, _ in blocks)])
    return Stored(form, codes, np.array([scale for _, scale in blocks], F), second)


def _finite_within(x: Array, most: float) -> Array:
    return np.where(np.isinf(x), x, np.clip(x, F(-most), F(most)))


def _holds(block: tuple[Array, float], x: Array, second: bool) -> bool:
    """True if a block decodes to the values of ``x``."""
    return np.array_equal(Stored("uint8", block[0], np.array([block[1]], F), second).values(), x)


def _block(x: Array, form: str, second: bool, top_code: int | None = None) -> tuple[Array, float]:
    top = float(np.max(np.abs(x)))
    if not math.isfinite(top):
        return np.zeros_like(x), math.nan
    if top < TINY_BLOCK:
        return np.zeros_like(x), 0.0
    if form == "float16":
        scale = F(2.0 ** (math.frexp(_to_11_bits(top))[1] - 1 - 14))
        codes = (x * (F(1) / scale)).astype(np.float16)
        codes = np.maximum(codes, np.float16(2.0**-24)) if second else codes
        return codes.astype(F), float(scale)
    levels = 255 if second else 127
    rough = np.array([F(top) / F(top_code or levels)])
    scale = ((rough.view(np.uint32) + np.uint32(0xFF)) & np.uint32(0xFFFFFF00)).view(F)[0]
    codes = np.clip(np.rint(x * (F(1) / scale)), 1 if second else -127, levels)
    return codes.astype(F) + F(0), float(scale)  # integers have one zero


def _to_11_bits(x: float) -> float:
    unit = 2.0 ** (math.frexp(x)[1] - 11)
    return math.floor(x / unit + 0.5) * unit


# -- main params as bfloat16, alone or with a remainder -------------------------------------------


def _mixed(x: int) -> int:
    x = ((x ^ x >> 16) * 0x85EBCA6B) & 0xFFFFFFFF
    x = ((x ^ x >> 13) * 0xC2B2AE35) & 0xFFFFFFFF
    return x ^ x >> 16


def rounded_by_chance(x: Array, name: str, t: int) -> Array:
    digest = int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "little")
    key, first = _mixed(_mixed(0 ^ _mixed(t)) ^ digest & 0xFFFFFFFF), digest >> 32
    words = [_mixed((key + (first + at) * 0x9E3779B9) & 0xFFFFFFFF) for at in range(x.size)]
    bits = np.array([_mixed(word ^ 0x9E3779B9) & 0xFFFF for word in words], np.uint64)
    pattern = np.ascontiguousarray(x).view(np.uint32).astype(np.uint64)
    cut = ((pattern + bits) & np.uint64(0xFFFF0000)).astype(np.uint32).view(F)
    return np.where(np.isfinite(x), cut, to_bfloat16(x))


def split(x: Array, bits: int) -> tuple[Array, Array]:
    pattern = np.ascontiguousarray(x).view(np.uint32).astype(np.int64)
    if bits == 8:
        nearest_even = (pattern + 0x7F + ((pattern >> 8) & 1)) & ~0xFF
        pattern = np.where(np.isfinite(x), nearest_even, pattern)
    pattern = np.where(np.isnan(x), QUIET_NAN, pattern)
    high = ((pattern + 0x8000) >> 16) & 0xFFFF
    low = pattern - (((pattern + 0x8000) >> 16) << 16)
    return _from_high(high), low >> 8 if bits == 8 else low


def join(param: Array, remainder: Array, bits: int) -> Array:
    """Return the FP32 values again. A zero has no remainder, an infinity none that makes it NaN."""
    pattern = np.ascontiguousarray(param).view(np.uint32).astype(np.int64)
    low = remainder << 8 if bits == 8 else remainder
    magnitude = pattern & 0x7FFFFFFF
    has_none = (magnitude == 0) | ((magnitude == 0x7F800000) & (low > 0))
    found = np.where(has_none, pattern, pattern + low)
    return (found & 0xFFFFFFFF).astype(np.uint32).view(F)


def _from_high(high: Array) -> Array:
    return (high << 16).astype(np.uint32).view(F)


# -- rules ----------------------------------------------------------------------------------------

MOMENTS = {
    "adam": ("exp_avg", "exp_avg_sq"),
    "lamb": ("exp_avg", "exp_avg_sq"),
    "sgd": ("momentum_buffer",),
    "lion": ("exp_avg",),
    "foreign": ("buffer",),
}

State = dict[str, Stored]


def stepped(
    rule: str, p: Array, g: Array, state: State, t: int, h: Mapping[str, Any], multiplier: float
) -> tuple[Array, State]:
    with np.errstate(all="ignore"):
        g = g.astype(F) * F(multiplier)
        return _RULES[rule](p, g, state, t, h)


def _bounded(x: Array, made_of: Array) -> Array:
    """Replace infinities that finite values overflowed to by FP32's largest number."""
    return np.where(np.isinf(x) & np.isfinite(made_of), np.copysign(LARGEST, x), x)


def _kept(state: State, **values: Array) -> State:
    return {
        name: stored(value, state[name].form, state[name].second)
        for name, value in values.items()
        if name in state
    }


def _moments(g: Array, state: State, h: Mapping[str, Any], weight: float) -> tuple[Array, Array]:
    b1, b2 = h["betas"][:2]
    m, v = state["exp_avg"].values(), state["exp_avg_sq"].values()
    return m * F(b1) + g * F(weight), v * F(b2) + (g * F(1 - b2)) * g


def _corrections(h: Mapping[str, Any], t: int) -> tuple[float, float]:
    b1, b2 = h["betas"][:2]
    return (1 - b1**t, 1 - b2**t) if h.get("bias_correction", True) else (1.0, 1.0)


def _denominator(v: Array, h: Mapping[str, Any], t: int) -> Array:
    roots = np.sqrt(v.astype(np.float64)).astype(F)
    return roots * F(1 / math.sqrt(_corrections(h, t)[1])) + F(h["eps"])


def _with_l2(p: Array, g: Array, h: Mapping[str, Any]) -> Array:
    l2 = F(h["weight_decay"])
    return g if h["adam_w_mode"] or l2 == 0 else g + p * l2


def _decayed(p: Array, u: Array, h: Mapping[str, Any]) -> Array:
    decay = F(h["lr"] * h["weight_decay"])
    if decay == 0:
        return p
    leaves_zero = np.sign(p) * np.sign(u) < 0
    return p - np.where(leaves_zero & bool(h.get("cautious_wd")), F(0), p * decay)


def _adam(p: Array, g: Array, state: State, t: int, h: Mapping[str, Any]) -> tuple[Array, State]:
    m, v = _moments(_with_l2(p, g, h), state, h, 1 - h["betas"][0])
    u = (m / _denominator(v, h, t)) * F(h["lr"] / _corrections(h, t)[0])
    p = _decayed(p, u, h) if h["adam_w_mode"] else p
    return p - u, _kept(state, exp_avg=m, exp_avg_sq=v)


def _lamb(p: Array, g: Array, state: State, t: int, h: Mapping[str, Any]) -> tuple[Array, State]:
    g = _with_l2(p, g, h)
    m, v = _moments(g, state, h, 1 - h["betas"][0] if h["grad_averaging"] else 1.0)
    state = _kept(state, exp_avg=_bounded(m, g), exp_avg_sq=v)
    m = state["exp_avg"].values()
    direction = _bounded(m * F(1 / _corrections(h, t)[0]), m)
    u = direction / _denominator(state["exp_avg_sq"].values(), h, t)
    decay = F(h["weight_decay"]) if h["adam_w_mode"] else F(0)
    u = u if decay == 0 else u + p * decay
    pp, uu = sum_of_squares(p), sum_of_squares(u)
    adapts = (h["use_nvlamb"] or decay != 0) and pp != 0 and uu != 0
    ratio = np.float64(h["lr"]) * np.sqrt(pp) / np.sqrt(uu) if adapts else h["lr"]
    return p - u * F(ratio), state


def _sgd(p: Array, g: Array, state: State, t: int, h: Mapping[str, Any]) -> tuple[Array, State]:
    decay, momentum = F(h["weight_decay"]), F(h["momentum"])
    g = g if decay == 0 else g + p * decay
    if "momentum_buffer" not in state:
        return p - g * F(h["lr"]), state
    b = g
    if t > 1:
        b = state["momentum_buffer"].values() * momentum + g * F(1 - h["dampening"])
        b = _bounded(b, g)
    g = g + b * momentum if h["nesterov"] else b
    return p - g * F(h["lr"]), _kept(state, momentum_buffer=b)


def _lion(p: Array, g: Array, state: State, t: int, h: Mapping[str, Any]) -> tuple[Array, State]:
    b1, b2 = h["betas"]
    m = state["exp_avg"].values()
    blend = m * F(b1) + g * F(1 - b1)
    u = np.sign(blend) * F(h["lr"])
    return _decayed(p, u, h) - u, _kept(state, exp_avg=m * F(b2) + g * F(1 - b2))


def _foreign(p: Array, g: Array, state: State, t: int, h: Mapping[str, Any]) -> tuple[Array, State]:
    b = state["buffer"].values() if state else np.zeros_like(p)
    b = b * F(0.5) + g
    state = {"buffer": stored(b, "float32", False)}
    return p - b * F(h["lr"] * h["rate"]), state


_RULES = {"adam": _adam, "lamb": _lamb, "sgd": _sgd, "lion": _lion, "foreign": _foreign}
