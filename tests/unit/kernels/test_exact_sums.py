"""Sums of squares that do not round: right, and the same for any cut and any order."""

import itertools
import math
from fractions import Fraction

import pytest
import torch
from torch.distributed.tensor import Shard

from mp_optim.core.tensor_layout import ShardRegion
from mp_optim.kernels.sums import digits_to_values, matrices_shape, matrix_blocks
from mp_optim.rules.adafactor import ElementPasses

passes = ElementPasses()
largest, total_digits = passes.largest, passes.total_digits
row_and_column_digits = passes.row_and_column_digits

CPU = torch.device("cpu")
SHAPES = [(7,), (), (5, 6), (1, 9), (9, 1), (3, 4, 5), (2, 3, 4, 5), (40, 130)]


def values_of(shape, seed=0):
    generator = torch.Generator().manual_seed(seed)
    spread = torch.exp2(-30 * torch.rand(shape, generator=generator))
    return torch.randn(shape, generator=generator) * spread


def whole(values):
    return matrix_blocks(ShardRegion(values.shape, (0,) * values.dim()), values)


def flat_parts(values, cuts):
    """The tensor in ranges of its elements."""
    for start, stop in itertools.pairwise([0, *cuts, values.numel()]):
        yield (ShardRegion(values.shape, None, start), values.reshape(-1)[start:stop].contiguous())


def boxes(values, dim, count):
    """The tensor in slices along a dimension, as Shard makes them: some may be empty."""
    parts, _ = Shard(dim)._split_tensor(values, count, with_padding=False)
    start = 0
    for part in parts:
        offsets = [0] * values.dim()
        offsets[dim] = start
        yield ShardRegion(values.shape, tuple(offsets)), part.contiguous()
        start += part.shape[dim]


def sums(parts, shape, top):
    rows, columns, total = 0, 0, 0
    for part, local in parts:
        blocks = matrix_blocks(part, local)
        by_row, by_column = row_and_column_digits(blocks, top, matrices_shape(shape), CPU)
        rows, columns = rows + by_row, columns + by_column
        total = total + total_digits(blocks, top, CPU)
    return rows, columns, total


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_sums_are_right_to_the_last_bit_of_the_largest(shape):
    values = values_of(shape)
    top = float(largest(values))
    total = float(digits_to_values(total_digits(whole(values), top, CPU), top))
    exact = sum(Fraction(value) ** 2 for value in values.reshape(-1).tolist())
    assert abs(Fraction(total) - exact) <= exact * Fraction(2) ** -52


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("piece", [1 << 21, 7])
def test_any_cut_gives_the_same_digits(monkeypatch, shape, piece):
    values = values_of(shape, 1)
    top, count = float(largest(values)), values.numel()
    expected = sums([(ShardRegion(values.shape, (0,) * values.dim()), values)], shape, top)
    monkeypatch.setattr("mp_optim.kernels.sums.sum_piece_elements", lambda device: piece)
    edges = ([], [count // 3], sorted({count // 5, count // 2, count}))
    cuts = [list(flat_parts(values, each)) for each in edges]
    ways = itertools.product(range(values.dim()), (2, 3, 6))
    cuts += [list(boxes(values, dim, parts)) for dim, parts in ways]
    for parts in cuts:
        found = sums(parts, shape, top)
        assert all(map(torch.equal, found, expected)), parts


def test_rows_and_columns_are_those_of_each_matrix():
    values = values_of((2, 3, 4, 5), 2)
    top = float(largest(values))
    by_row, by_column = row_and_column_digits(whole(values), top, (6, 4, 5), CPU)
    squares = values.double().square().view(6, 4, 5)
    least = 5 * top**2 * 2.0**-62
    for digits, expected in ((by_row, squares.sum(2)), (by_column, squares.sum(1))):
        found = digits_to_values(digits, top)
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=least)


@pytest.mark.parametrize("value", [2.0**-149, 1e-30, 1.0, 3.0e38])
def test_the_smallest_and_the_largest_numbers(value):
    values = torch.full((3, 2), value)
    top = float(largest(values))
    expected = 6 * float(values[0, 0]) ** 2
    assert float(digits_to_values(total_digits(whole(values), top, CPU), top)) == expected


def test_zeros_nothing_and_what_is_not_finite():
    assert float(largest(torch.zeros(0))) == float(largest(torch.zeros(3))) == 0.0
    assert float(digits_to_values(total_digits(whole(torch.zeros(3)), 0.0, CPU), 0.0)) == 0.0
    for bad in (math.nan, math.inf, -math.inf):
        values = torch.tensor([1.0, bad])
        top = float(largest(values))
        assert top == math.inf
        assert digits_to_values(total_digits(whole(values), top, CPU), top).isnan()
