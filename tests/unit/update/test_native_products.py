"""Products of matrices by the compiled kernels: right, symmetric, within their memory, and with the
bits of torch's."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

from mp_optim.update import set_host_threads
from mp_optim.update.backends.native_products import (
    Chunks,
    NativeProducts,
    has_native_products,
)
from mp_optim.update.matrix_rooms import Rooms
from mp_optim.update.product_bits import products_of
from support.kernels import needs_kernels

pytestmark = pytest.mark.skipif(
    not has_native_products(), reason="this CPU, or this level, has no AMX"
)
SHAPES = [(32, 32), (64, 96), (33, 47), (100, 257), (257, 300), (160, 1100), (40, 2100)]


@pytest.fixture(params=[1, 2, 3], ids=lambda n: f"{n} threads")
def threads(request):
    set_host_threads(request.param)
    yield request.param
    set_host_threads(None)


def random(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


def rooms() -> Rooms:
    return Rooms(torch.device("cpu"), torch.bfloat16)


def by(chunk: int) -> NativeProducts:
    return NativeProducts(Chunks(chunk, chunk), Chunks(chunk, chunk), chunk)


def turned(x: Tensor) -> Tensor:
    """The same values, lying as their transpose would."""
    return x.mT.contiguous().mT


def near(found: Tensor, exact: Tensor, terms: int) -> bool:
    """Within half a unit of bfloat16, and the error of FP32 sums of so many terms."""
    bound = exact.abs() * 2.0**-8 + terms * 2.0**-22 * exact.abs().max()
    return bool(((found.double() - exact).abs() <= bound).all())


@needs_kernels
@pytest.mark.parametrize("chunk", [64, 1024])
def test_products_are_those_of_float64(threads, chunk):
    for count, (rows, columns) in itertools.product((1, 5), SHAPES):
        x = random(count, rows, columns).bfloat16()
        factor = random(count, rows, rows)
        factor = (factor + factor.mT).bfloat16()
        wide, square = x.double(), factor.double()
        exact = {
            "gram": wide @ wide.mT,
            "square": 0.5 * square @ square - 2.0 * square,
            "left": square @ wide + 3.0 * wide,
        }
        for lying in (x, turned(x)):
            gram = by(chunk).gram(lying, rooms())
            assert torch.equal(gram, gram.mT) and near(gram, exact["gram"], columns)
            to = torch.full_like(x, torch.nan)
            left = by(chunk).left(factor, lying, 3.0, to, rooms())
            assert left is to and near(left, exact["left"], rows)
        power = by(chunk).square(factor, -2.0, 0.5, rooms())
        assert torch.equal(power, power.mT) and near(power, exact["square"], rows)
        other = torch.full_like(x.mT.contiguous(), torch.nan)
        assert torch.equal(by(chunk).turned(factor, x, 3.0, other, rooms()).mT, left)


@needs_kernels
def test_nothing_beside_a_result_is_written(threads):
    for rows, columns in SHAPES:
        memory = torch.full((2, rows + 2, columns), 7.0, dtype=torch.bfloat16)
        x, factor = (
            random(1, rows, columns).bfloat16(),
            random(1, rows, rows).bfloat16(),
        )
        for to in memory[:, 1:-1]:
            by(1024).left(factor, x, 1.0, to[None], rooms())
        assert torch.equal(memory[:, [0, -1]], torch.full_like(memory[:, [0, -1]], 7.0))


@needs_kernels
def test_what_is_not_finite_stays_where_it_belongs(threads):
    x = random(1, 70, 90).bfloat16()
    x[0, 3, 5], x[0, 60, 89] = torch.inf, torch.nan
    expected = (x.double() @ x.double().mT).isfinite()
    assert torch.equal(by(1024).gram(x, rooms()).isfinite(), expected)


@needs_kernels
def test_bits_do_not_depend_on_threads_or_on_other_matrices():
    x = random(7, 130, 220).bfloat16()
    found = []
    for threads in (1, 2, 3, 8):
        set_host_threads(threads)
        found.append(by(64).gram(x, rooms()).clone())
        found.append(torch.cat([by(64).gram(one, rooms()) for one in x.split(1)]))
    set_host_threads(None)
    assert all(torch.equal(found[0], other) for other in found)


@needs_kernels
@pytest.mark.parametrize("threads", [1, 2])
def test_shapes_of_models_are_multiplied_by_the_kernels(threads):
    """With the bits of torch's products: else they would not be taken."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        for shape in [(256, 256), (128, 512), (512, 128), (64, 1024)]:
            batch = random(2, *shape).bfloat16()
            assert isinstance(products_of(batch), NativeProducts), shape
    finally:
        torch.set_num_threads(before)
