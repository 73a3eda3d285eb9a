"""Compact storage formats of optimizer state, as functions that change only their arguments.

docs/numerics.md, "Compact states", specifies the formats. A moment is stored as float32, as
bfloat16, or in blocks of 256 row-major elements with one FP32 scale each. Elements of blocks are
float16, 8-bit codes, or, for a first moment, 4-bit codes, two in a byte. Blocks of a second moment
store its square root. A main param is stored as float32; as the bfloat16 model parameter and an
integer remainder of 16 bits (all of FP32) or 8 bits (24 bits of FP32); or as the parameter alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

from mp_optim.config.state_forms import BLOCK, FIRST_FORMS, PACKED, SECOND_FORMS, StateForm
from mp_optim.core.slot_state import SECOND

MOST_BFLOAT16 = 2.0**128 * (1.0 - 2.0**-8)
"""Largest finite bfloat16 number."""
MOST_IN_BLOCKS = 2.0**128 * (1.0 - 2.0**-11)
"""Largest magnitude that every block format decodes to a finite value."""
INFINITE_ROOT = 2.0**65
"""Finite root that is stored for an infinite second moment. With any rounding, the decoded square
is infinite again."""

_TINY = 2.0**-100
_FOUR_BITS = 7  # A signed 4-bit code from -7 to 7 is symmetric, so -8 is not used.
_QUIET_NAN = 0x7FC0
_INFINITY = 0x7F800000
_GOLDEN = 0x9E3779B9
_MASK = 0xFFFFFFFF
_Bits = TypeVar("_Bits", int, Tensor)


def state_form(name: str, dtype: torch.dtype) -> StateForm:
    """Return the storage format of a moment.

    Args:
        name: name of the moment.
        dtype: dtype of the stored tensor.
    """
    return _FORMS.get((name == SECOND, dtype)) or StateForm(str(dtype), dtype, 0)


def is_packed(name: str, dtype: torch.dtype) -> bool:
    """True if a moment with this stored dtype has 4-bit codes, two in a byte of a 1-D tensor."""
    return state_form(name, dtype).packed


def is_blocked(dtype: torch.dtype) -> bool:
    """True if a moment with this stored dtype has a scale for each block."""
    return dtype in _IN_BLOCKS


_FORMS = {
    (is_second, form.dtype): form
    for is_second, forms in ((False, FIRST_FORMS), (True, SECOND_FORMS))
    for form in forms
}
_IN_BLOCKS = {form.dtype for form in (*FIRST_FORMS, *SECOND_FORMS) if form.in_blocks}


# -- random numbers -------------------------------------------------------------------------------


def mix(x: _Bits) -> _Bits:
    """Return the 32-bit finalizer of MurmurHash3 (Appleby 2011), a bijection.

    An int64 tensor is mixed element by element; its elements are 32-bit values.
    """
    x = ((x ^ (x >> 16)) * 0x85EBCA6B) & _MASK
    x = ((x ^ (x >> 13)) * 0xC2B2AE35) & _MASK
    return x ^ (x >> 16)


@dataclass(frozen=True, slots=True)
class Noise:
    """Random bits for neighboring elements of a tensor, computed from seed, stream and index.

    Attributes:
        seed: 32-bit number that differs from step to step.
        stream: 32-bit hash of the parameter's name.
        start: index of the first element in the whole parameter, modulo 2^32.
    """

    seed: int
    stream: int
    start: int = 0

    def words(self, count: int, device: torch.device) -> Tensor:
        """Return 32 random bits for each of ``count`` elements: int64, shape (count,)."""
        key = mix(self.seed ^ self.stream)
        index = (
            torch.arange(self.start, self.start + count, dtype=torch.int64, device=device) & _MASK
        )
        return mix((key + index * _GOLDEN) & _MASK)

    @property
    def own_stream(self) -> int:
        """Stream for kernels that count elements from 0: with this stream, such a kernel computes
        the random bits of this object."""
        if not self.start:
            return self.stream
        x = (mix(self.seed ^ self.stream) + self.start * _GOLDEN) & _MASK
        # Compute the argument of mix() that gives x: multiply by the inverses of mix()'s factors
        # modulo 2^32.
        x = ((x ^ (x >> 16)) * 0x7ED1B41D) & _MASK
        x = ((x ^ (x >> 13) ^ (x >> 26)) * 0xA5CB9243) & _MASK
        return self.seed ^ x ^ (x >> 16)


def _sixteen(noise: Noise, like: Tensor, second: bool) -> Tensor:
    """Return 16 random bits for rounding each element of a moment: int32, shape of ``like``.

    A first moment uses the upper 16 of 32 bits, a second moment the lower 16 bits.
    """
    words = noise.words(like.numel(), like.device)
    return (words & 0xFFFF if second else words >> 16).int()


# -- moments --------------------------------------------------------------------------------------


def decode(stored: Tensor, scale: Tensor | None, second: bool, numel: int | None = None) -> Tensor:
    """Return a stored moment in FP32, shape (numel,). An FP32 tensor is returned unchanged.

    Args:
        stored: stored tensor, 1-D.
        scale: FP32, shape (ceil(numel / 256),), for block formats; else None.
        second: True for a second moment. Its blocks store the square root.
        numel: number of elements of the moment; by default the number of stored codes. Needed for
            4-bit codes, of which a byte holds two and the last bytes may be padding.
    """
    if scale is None:
        return stored.float()
    four = stored.dtype == torch.uint8 and not second
    codes = stored
    if four:  # The last run of codes may be padded, so cut the padding off.
        pairs = stored.int().view(-1, 1, PACKED // 2)
        halves = torch.cat([pairs & 15, pairs >> 4], 1)
        codes = ((halves ^ 8) - 8).view(-1)[:numel]
    values = codes.float() * scale.repeat_interleave(BLOCK)[: codes.numel()]
    return values * values if second else values


def encode_(
    value: Tensor, stored: Tensor, scale: Tensor | None, second: bool, noise: Noise | None = None
) -> None:
    """Store FP32 values in a moment's format, rounded to nearest even, or stochastically with
    ``noise``.

    Float16 is always rounded to nearest. Decoding a block format and storing the result again gives
    the same bits. Finite values stay finite, except that the square of a large gradient in a second
    moment may become infinite. Other values of the block do not become NaN.

    Args:
        value: FP32 values, 1-D.
        stored: tensor to write.
        scale: scales to write, for block formats; else None.
        second: True for a second moment. Its blocks store the square root.
        noise: random bits for stochastic rounding; None rounds to nearest even.
    """
    if value is stored or not value.numel():
        return
    if scale is not None:
        if second:
            value = value.double().sqrt_().clamp_(max=INFINITE_ROOT).float()
        else:
            value = _finite_within(value, MOST_IN_BLOCKS)
        _encode_blocks(value, stored, scale, second, noise)
        return
    if stored.dtype == torch.bfloat16:
        value = _finite_within(value, MOST_BFLOAT16)
    if noise is not None and stored.dtype == torch.bfloat16:
        stored.copy_(_dithered(value, _sixteen(noise, value, second)))
    else:
        stored.copy_(value)


def encode_again_(value: Tensor, stored: Tensor, scale: Tensor | None, second: bool) -> None:
    """Store FP32 values like :func:`encode_`, but keep blocks exact that were decoded from 8-bit
    codes.

    Stochastic rounding can store the largest value of a block as the second-largest code. The
    block's scale is then the largest value divided by that code. :func:`encode_` would choose
    another scale.
    """
    encode_(value, stored, scale, second)
    codes = 255 if second else 127
    if scale is None or state_form(SECOND if second else "", stored.dtype).name != torch.uint8:
        return
    other, other_scale = torch.empty_like(stored), torch.empty_like(scale)
    roots = value.double().sqrt_().clamp_(max=INFINITE_ROOT).float() if second else value
    _encode_blocks(roots, other, other_scale, second, None, codes - 1)
    lost = ~_blocks_of_equal(decode(stored, scale, second), value)
    taken = lost & _blocks_of_equal(decode(other, other_scale, second), value)
    scale.copy_(torch.where(taken, other_scale, scale))
    stored.copy_(torch.where(taken.repeat_interleave(BLOCK)[: stored.numel()], other, stored))


def _blocks_of_equal(a: Tensor, b: Tensor) -> Tensor:
    """Return a bool for each block: True if two FP32 tensors have equal values in the block."""
    differ = (a != b) & ~(a.isnan() & b.isnan())
    return ~torch.nn.functional.pad(differ, (0, -differ.numel() % BLOCK)).view(-1, BLOCK).any(1)


def _finite_within(value: Tensor, most: float) -> Tensor:
    """Clamp finite values to a magnitude, and keep infinite values."""
    return torch.where(value.isinf(), value, value.clamp(-most, most))


def _encode_blocks(
    x: Tensor,
    stored: Tensor,
    scale: Tensor,
    roots: bool,
    noise: Noise | None,
    top_code: int | None = None,
) -> None:
    blocks = torch.nn.functional.pad(x, (0, -x.numel() % BLOCK)).view(-1, BLOCK)
    top = blocks.abs().amax(1)
    good = top.isfinite() & (top >= _TINY)
    half, four = (stored.dtype == torch.float16, stored.dtype == torch.uint8 and not roots)
    if half:
        # The scale is the power of two that maps a block's largest value, rounded to 11 bits, into
        # [2^14, 2^15), so that scale and inverse are exact. Without the rounding to 11 bits, a code
        # could be 2^15, and storing the decoded value again would choose another scale.
        exponent = ((top.view(torch.int32) + 0x1000) & 0x7F800000) - (14 << 23)
        new_scale = exponent.view(torch.float32)
        inverse = ((254 << 23) - exponent).view(torch.float32)
    else:
        # Keep 16 significant bits of the scale, so that every code times the scale is exact. Round
        # the scale of 8-bit codes up. Round the scale of 4-bit codes down: the largest value then
        # has code 7 with any rounding, so storing decoded values again gives the same scale.
        levels = top_code or (_FOUR_BITS if four else 255 if roots else 127)
        # Divide by a tensor. For a division by a number, a GPU multiplies by the number's
        # reciprocal, which gives other bits.
        quotient = top / torch.full_like(top, levels)
        up = 0 if levels == _FOUR_BITS else 0xFF
        new_scale = ((quotient.view(torch.int32) + up) & -0x100).view(torch.float32)
        inverse = 1.0 / new_scale
    scale.copy_(torch.where(good, new_scale, torch.where(top.isfinite(), 0.0, torch.nan)))
    scaled = torch.where(
        good[:, None], blocks * torch.where(good, inverse, 0.0)[:, None], 0.0
    ).view(-1)[: x.numel()]
    if four:
        stored.copy_(_packed(_codes(scaled, -_FOUR_BITS, _FOUR_BITS, noise)))
    else:
        bounds = (0, 255) if roots else (-127, 127)
        stored.copy_(scaled if half else _codes(scaled, *bounds, noise))
    if roots:  # Store no root as 0, because an update divided by 0 could have any length.
        codes = stored.view(torch.int16) if half else stored
        codes.copy_(
            torch.where(good.repeat_interleave(BLOCK)[: x.numel()], codes.clamp(min=1), codes)
        )


def _dithered(value: Tensor, sixteen: Tensor) -> Tensor:
    """Add random bits to the lower 16 bits of FP32 values, then clear the lower 16 bits. Inf and
    NaN are unchanged."""
    bits = (value.view(torch.int32) + sixteen) & -0x10000
    return torch.where(value.isfinite(), bits.view(torch.float32), value)


def _codes(scaled: Tensor, low: int, high: int, noise: Noise | None) -> Tensor:
    """Round scaled values to whole numbers from ``low`` to ``high``; ``low`` is 0 for a second
    moment."""
    if noise is not None:
        bits = _sixteen(noise, scaled, second=low == 0).float()
        # Add half a unit, so that the random number is never 0. A decoded 4-bit value divided by
        # its scale may be slightly below its code, and then still gets this code.
        if high == _FOUR_BITS:
            bits += 0.5
        scaled = (scaled + bits * 2.0**-16).floor_()
    return scaled.round().clamp_(low, high)


def _packed(codes: Tensor) -> Tensor:
    """Pack whole numbers from -7 to 7, two in a byte, in runs of 64 numbers. The last run is padded
    with zeros."""
    runs = torch.nn.functional.pad(codes.int() & 15, (0, -codes.numel() % PACKED))
    low, high = runs.view(-1, 2, PACKED // 2).unbind(1)
    return (low | high << 4).reshape(-1)


# -- averages -------------------------------------------------------------------------------------


def store_average(value: Tensor, stored: Tensor, noise: Noise | None) -> None:
    """Store FP32 averages as FP32, or as bfloat16. Rounding to bfloat16 is stochastic with
    ``noise``, else to nearest."""
    if noise is None or stored.dtype == torch.float32:
        stored.copy_(value)
        return
    words = noise.words(value.numel(), value.device)
    sixteen = (mix(words ^ _GOLDEN) >> 16).int().view(value.shape)
    stored.copy_(_dithered(value, sixteen))


# -- main params ----------------------------------------------------------------------------------


def join(param: Tensor, remainder: Tensor | None) -> Tensor:
    """Return the FP32 main param of a bfloat16 parameter.

    Args:
        param: bfloat16 parameter.
        remainder: int16 or int8 tensor of the parameter's shape; None for a parameter alone. The
            remainder of a zero is ignored. A positive remainder of an infinity is ignored, too.
    """
    if remainder is None:
        return param.float()
    high = param.view(torch.int16).int() << 16
    low = remainder.int() << (8 if remainder.dtype == torch.int8 else 0)
    magnitude = high & 0x7FFFFFFF
    has_none = (magnitude == 0) | ((magnitude == _INFINITY) & (low > 0))
    return torch.where(has_none, high, high + low).view(torch.float32)


def split_(
    value: Tensor, param: Tensor, remainder: Tensor | None, noise: Noise | None = None
) -> None:
    """Split FP32 main params into bfloat16 parameters and remainders.

    The parameter is the value rounded to nearest, ties away from zero. A 16-bit remainder keeps the
    whole value. An 8-bit remainder keeps the upper 24 bits, rounded to nearest even or
    stochastically. Without remainder, the parameter is rounded to nearest even or stochastically.

    Args:
        value: FP32 main params.
        param: bfloat16 tensor to write.
        remainder: int16 or int8 tensor to write; None for a parameter alone.
        noise: random bits for stochastic rounding; None rounds to nearest.
    """
    if remainder is None:
        if noise is not None:
            words = noise.words(value.numel(), value.device)
            sixteen = (mix(words ^ _GOLDEN) & 0xFFFF).int().view(value.shape)
            value = _dithered(value, sixteen)
        param.copy_(value)
        return
    bits = value.contiguous().view(torch.int32)
    eight = remainder.dtype == torch.int8
    if eight:
        if noise is None:
            added = 0x7F + ((bits >> 8) & 1)
        else:
            words = noise.words(bits.numel(), bits.device)
            added = (mix(words ^ _GOLDEN) & 0xFF).int().view(bits.shape)
        bits = torch.where(value.isfinite(), (bits + added) & -0x100, bits)
    bits = torch.where(value.isnan(), _QUIET_NAN << 16, bits)
    high = (bits + 0x8000) >> 16
    low = bits - (high << 16)
    param.view(torch.int16).copy_(high)
    remainder.copy_(low >> 8 if eight else low)
