"""Compact storage formats are exact or bounded, as docs/numerics.md states."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from lab.any_program import arithmetic
from mp_optim.config.state_forms import BLOCK
from mp_optim.kernels.codecs import SECOND, Noise, decode, encode_, join, split_
from mp_optim.kernels.state_format import moment_specs

BLOCKED = [
    (torch.float16, False),
    (torch.float16, True),
    (torch.int8, False),
    (torch.uint8, True),
    (torch.uint8, False),  # two 4-bit codes per byte
]
BITS = [torch.int16, torch.int8]
seeds = st.integers(0, 2**20)


def patterns(seed: int, n: int = 4096) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (
        torch.randint(-(2**31), 2**31, (n,), generator=generator, dtype=torch.int64)
        .int()
        .view(torch.float32)
    )


def values(seed: int, n: int, decades: float = 3.0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(n, generator=generator) * 10 ** (
        decades * torch.randn(n, generator=generator)
    )


def split(value: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    param = torch.empty_like(value, dtype=torch.bfloat16)
    remainder = torch.empty_like(value, dtype=dtype)
    split_(value, param, remainder)
    return param, remainder


def stored(
    value: Tensor, dtype: torch.dtype, second: bool, noise: Noise | None = None
) -> tuple[Tensor, Tensor]:
    name = SECOND if second else "exp_avg"
    forms = moment_specs(name, value.shape, dtype)
    codes, scale = (torch.empty(shape, dtype=kind) for shape, kind in forms.values())
    encode_(value, codes, scale, second, noise)
    return codes, scale


def same(a: Tensor, b: Tensor) -> bool:
    return bool(((a.view(torch.int32) == b.view(torch.int32)) | (a.isnan() & b.isnan())).all())


@given(seeds)
@settings(max_examples=50, deadline=None)
def test_bf16_and_16_bit_remainder_restore_every_fp32_value_unless_bf16_is_zero(seed):
    value = patterns(seed)
    param, remainder = split(value, torch.int16)
    assert same(join(param, remainder), torch.where(param == 0, param.float(), value))
    assert bool((param.isnan() == value.isnan()).all())


@given(seeds)
@settings(max_examples=50, deadline=None)
def test_split_and_join_of_remainders_equal_numpy(seed):
    value = patterns(seed)
    for dtype in BITS:
        param, remainder = split(value, dtype)
        bits = 16 if dtype == torch.int16 else 8
        high, low = arithmetic.split(value.numpy(), bits)
        assert np.array_equal(param.float().numpy().view(np.int32), high.view(np.int32))
        assert np.array_equal(remainder.numpy(), low)
        assert same(join(param, remainder), torch.from_numpy(arithmetic.join(high, low, bits)))


def test_8_bit_remainder_keeps_the_upper_24_bits():
    value = values(0, 10_000)
    param, remainder = split(value, torch.int8)
    assert bool(((join(param, remainder) - value).abs() <= value.abs() * 2.0**-16).all())
    assert all(
        torch.equal(a, b)
        for a, b in zip(split(join(param, remainder), torch.int8), (param, remainder), strict=True)
    )


@pytest.mark.parametrize(("dtype", "second"), BLOCKED)
@given(seed=seeds, n=st.integers(1, 1500), decades=st.floats(0.0, 12.0))
@settings(max_examples=30, deadline=None)
def test_codecs_reencode_decoded_values_to_the_same_codes(dtype, second, seed, n, decades):
    value = values(seed, n, decades)
    codes, scale = stored(value.square().clamp(max=1e30) if second else value, dtype, second)
    decoded = decode(codes, scale, second, n)
    if not second or bool((decoded >= 2.0**-126).all()):
        again, scale_again = stored(decoded, dtype, second)
        assert torch.equal(again, codes) and same(scale_again, scale)


def in_four_bits(x: Any) -> tuple[Any, Any]:
    """Return packed 4-bit codes and their scales, computed by numpy."""
    codes, scales = [], []
    for block in (x[start : start + BLOCK] for start in range(0, x.size, BLOCK)):
        rough = np.float64(np.max(np.abs(block)) / np.float32(7))
        unit = 2.0 ** (math.floor(math.log2(rough)) - 15)  # 16 significant bits
        scales.append(np.float32(math.floor(rough / unit) * unit))
        codes.append(np.rint(block * (np.float32(1) / scales[-1])).astype(np.int64))
    runs = np.zeros(-(-x.size // 64) * 64, np.int64)
    runs[: x.size] = np.concatenate(codes)
    halves = runs.reshape(-1, 2, 32) % 16
    return (halves[:, 0] + 16 * halves[:, 1]).reshape(-1), np.array(scales, dtype=np.float32)


@pytest.mark.parametrize(("dtype", "second"), BLOCKED)
@given(seed=seeds, n=st.integers(1, 1500))
@settings(max_examples=30, deadline=None)
def test_codecs_equal_numpy_and_round_by_at_most_half_a_code(dtype, second, seed, n):
    value = values(seed, n).square() if second else values(seed, n)
    codes, scale = stored(value, dtype, second)
    four = dtype == torch.uint8 and not second
    if four:
        theirs, their_scales = in_four_bits(value.numpy())
    else:
        form = "float16" if dtype == torch.float16 else "uint8"
        found = arithmetic.stored(value.numpy(), form, second)
        theirs, their_scales = found.codes, found.scales
    assert np.array_equal(scale.numpy(), their_scales)
    assert np.array_equal(codes.numpy(), theirs.astype(codes.numpy().dtype))
    x = value.sqrt() if second else value
    steps = scale.repeat_interleave(BLOCK)[:n]
    decoded = decode(codes, scale, second, n)
    error = ((decoded.sqrt() if second else decoded) - x).abs()
    if dtype == torch.float16:  # float16 keeps 11 bits, or half of its smallest step.
        assert bool((error <= torch.maximum(x.abs() * 2.0**-11, steps * 2.0**-24)).all())
    else:  # Codes err by half a step; a root below half a step is stored as one step.
        assert bool((error <= steps * (1.0 if second else 0.5) * (1 + 1e-5)).all())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.int8, torch.uint8])
@pytest.mark.parametrize("noise", [None, Noise(1, 2)])
def test_codecs_store_finite_values_as_finite(dtype, noise):
    large = (3.39e38, 3.4e38, torch.finfo(torch.float32).max)
    value = values(0, 3 * BLOCK)
    value[5::BLOCK], value[7::BLOCK] = torch.tensor(large), -torch.tensor(large)
    forms = moment_specs("exp_avg", value.shape, dtype)
    codes, *scales = (torch.empty(shape, dtype=kind) for shape, kind in forms.values())
    scale = scales[0] if scales else None
    encode_(value, codes, scale, False, noise)
    found = decode(codes, scale, False, value.numel())
    assert found.isfinite().all()
    assert found[5::BLOCK].tolist() == pytest.approx(large, rel=2.0**-6)
    assert found[7::BLOCK].tolist() == pytest.approx([-x for x in large], rel=2.0**-6)
    again, *_ = encoded = codes.clone(), *(each.clone() for each in scales)
    encode_(found, again, encoded[1] if scales else None, False)
    if noise is None:
        assert all(map(torch.equal, encoded, (codes, *scales)))


@settings(max_examples=50, deadline=None)
@given(st.integers(0, 2**32 - 1), st.integers(0, 2**32 - 1), st.integers(0, 2**48))
def test_noise_has_equal_random_words_when_its_stream_contains_the_offset(seed, stream, start):
    part, device = Noise(seed, stream, start), torch.device("cpu")
    whole = Noise(seed, part.own_stream)
    assert torch.equal(part.words(300, device), whole.words(300, device))


def test_stochastic_rounding_is_unbiased_and_reproducible():
    # a quarter of the way between two bfloat16 numbers
    value = torch.full((200_000,), 1.0 + 2.0**-9)
    rounded = torch.empty_like(value, dtype=torch.bfloat16)
    encode_(value, rounded, None, False, Noise(1, 2))
    # The mean of n draws deviates by a few times sqrt(p (1 - p) / n) steps.
    assert float((rounded == 1.0).double().mean()) == pytest.approx(0.75, abs=0.01)
    again = torch.empty_like(rounded)
    encode_(value[1000:], again[1000:], None, False, Noise(1, 2, 1000))
    assert torch.equal(again[1000:], rounded[1000:])
    for other in (Noise(2, 2), Noise(1, 3)):
        encode_(value, again, None, False, other)
        assert not torch.equal(again, rounded)
    x = torch.linspace(-1.0, 1.0, 100_001)
    codes, scale = stored(x, torch.int8, False, Noise(1, 2))
    steps = scale.repeat_interleave(BLOCK)[: len(x)]
    error = (decode(codes, scale, False) - x) / steps
    assert float(error.abs().max()) <= 1.0 + 1e-3 and abs(float(error.double().mean())) < 0.01


@given(seed=seeds, n=st.integers(1, 1500), decades=st.floats(0.0, 2.0))
@settings(max_examples=20, deadline=None)
@example(seed=0, n=1 << 20, decades=0.0)
def test_4_bit_codes_are_unchanged_after_decoding_and_encoding_again(seed, n, decades):
    """Stochastic rounding takes 16 random bits per element. In a million elements, all bits are
    zero for about 16 elements, and even these codes must not change."""
    codes, scale = stored(values(seed, n, decades), torch.uint8, False, Noise(1, seed))
    decoded = decode(codes, scale, False, n)
    for noise in (None, Noise(2, seed)):
        again, scale_again = stored(decoded, torch.uint8, False, noise)
        assert torch.equal(again, codes) and same(scale_again, scale)


def test_stochastic_remainders_are_unbiased():
    # a quarter of a step
    value = torch.full((200_000,), 1.0).view(torch.int32).add_(64).view(torch.float32)
    param = torch.empty_like(value, dtype=torch.bfloat16)
    remainder = torch.empty_like(value, dtype=torch.int8)
    split_(value, param, remainder, Noise(7, 8))
    assert set(remainder.tolist()) == {0, 1}
    assert float(remainder.double().mean()) == pytest.approx(0.25, abs=0.01)
