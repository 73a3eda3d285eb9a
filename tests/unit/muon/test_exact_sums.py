"""Exact sums of squares: values, and equal digits for every cut and order of a tensor."""

import itertools
import math
from fractions import Fraction

import pytest
import torch
from torch.distributed.tensor import Shard

from mp_optim.core.tensor_layout import ShardRegion
from mp_optim.muon.exact_sums import (
    digits_to_values,
    largest_magnitude,
    matrices_shape,
    matrix_blocks,
    row_digits,
)

CPU = torch.device("cpu")
SHAPES = [(7,), (), (5, 6), (1, 9), (9, 1), (3, 4, 5), (2, 3, 4, 5), (40, 130)]


def values_of(shape, seed=0):
    generator = torch.Generator().manual_seed(seed)
    spread = torch.exp2(-30 * torch.rand(shape, generator=generator))
    return torch.randn(shape, generator=generator) * spread


def whole(values):
    return matrix_blocks(ShardRegion(values.shape, (0,) * values.dim()), values)


def flat_parts(values, cuts):
    for start, stop in itertools.pairwise([0, *cuts, values.numel()]):
        yield (ShardRegion(values.shape, None, start), values.reshape(-1)[start:stop].contiguous())


def boxes(values, dim, count):
    parts, _ = Shard(dim)._split_tensor(values, count, with_padding=False)
    start = 0
    for part in parts:
        offsets = [0] * values.dim()
        offsets[dim] = start
        yield ShardRegion(values.shape, tuple(offsets)), part.contiguous()
        start += part.shape[dim]


def sums(parts, shape, top):
    return sum(
        row_digits(matrix_blocks(part, local), top, matrices_shape(shape), CPU)
        for part, local in parts
    )


def sums_of(values, top):
    return digits_to_values(row_digits(whole(values), top, matrices_shape(values.shape), CPU), top)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_exact_sums_equal_fractions_to_fp64_precision_when_rows_differ_widely(shape):
    values = values_of(shape)
    top = float(largest_magnitude(values))
    columns = matrices_shape(shape)[2]
    found = sums_of(values, top).flatten().tolist()
    for total, row in zip(found, values.view(-1, columns).tolist(), strict=True):
        exact = sum(Fraction(value) ** 2 for value in row)
        left_out = columns * Fraction(top) ** 2 * Fraction(2) ** -60
        assert abs(Fraction(total) - exact) <= exact * Fraction(2) ** -52 + left_out


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("piece", [1 << 21, 7])
def test_exact_sums_give_equal_digits_when_a_tensor_is_cut_differently(monkeypatch, shape, piece):
    values = values_of(shape, 1)
    top, count = float(largest_magnitude(values)), values.numel()
    expected = sums([(ShardRegion(values.shape, (0,) * values.dim()), values)], shape, top)
    monkeypatch.setattr("mp_optim.muon.exact_sums.piece_elements", lambda device: piece)
    edges = ([], [count // 3], sorted({count // 5, count // 2, count}))
    cuts = [list(flat_parts(values, each)) for each in edges]
    ways = itertools.product(range(values.dim()), (2, 3, 6))
    cuts += [list(boxes(values, dim, parts)) for dim, parts in ways]
    for parts in cuts:
        assert torch.equal(sums(parts, shape, top), expected), parts


@pytest.mark.parametrize("value", [2.0**-149, 1e-30, 1.0, 3.0e38])
def test_exact_sums_are_exact_for_the_smallest_and_largest_floats(value):
    values = torch.full((3, 2), value)
    top = float(largest_magnitude(values))
    assert sums_of(values, top).tolist() == [[2 * float(values[0, 0]) ** 2] * 3]


def test_exact_sums_return_zero_for_zeros_and_nan_for_infinite_elements():
    assert float(largest_magnitude(torch.zeros(0))) == 0.0
    assert float(largest_magnitude(torch.zeros(3))) == float(sums_of(torch.zeros(3), 0.0)) == 0.0
    for bad in (math.nan, math.inf, -math.inf):
        values = torch.tensor([1.0, bad])
        top = float(largest_magnitude(values))
        assert top == math.inf and sums_of(values, top).isnan()
