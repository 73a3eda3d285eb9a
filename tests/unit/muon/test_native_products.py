"""Products of matrices by the compiled kernels: right, symmetric, within their memory, and with the
bits of torch's."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

from mp_optim.kernels.native_library import set_host_threads
from mp_optim.muon.muon import FusedMuon, seconds_of_products
from mp_optim.muon.newton_schulz import (
    NativeProducts,
    NativeSteps,
    Rooms,
    SumChunks,
    has_native_products,
    kernels_of,
)
from support.kernels import needs_kernels

pytestmark = pytest.mark.skipif(
    not has_native_products(), reason="this CPU, or this level, has no products of bfloat16"
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
    return NativeProducts(SumChunks(chunk, chunk), SumChunks(chunk, chunk), chunk)


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
        assert torch.equal(by(chunk).left(factor, x, 3.0, other.mT, rooms()), left)


POLYNOMIALS = [(3.5, -4.75, 2.0), (2.5, -1.5, 0.5), (1.75, -0.75, 0.25), (2, -2, 1)]


@needs_kernels
@pytest.mark.parametrize("steps", range(5))
def test_steps_have_the_bits_of_single_products(threads, steps):
    """In memory of which nothing else is written, for stacks that threads share out and share."""
    polynomials = (POLYNOMIALS * 2)[:steps]
    stacks, expected = [], []
    for count, shape in ((5, (40, 96)), (2, (96, 40)), (1, (64, 64))):
        memory = torch.full((count + 2, *shape), 7.0, dtype=torch.bfloat16)
        memory[1:-1] = random(count, *shape)
        stacks.append(memory[1:-1])
        norms = memory[1:-1].double().norm(dim=(1, 2)).bfloat16()
        x = memory[1:-1] / norms[:, None, None]
        lies_turned = shape[0] > shape[1]
        x = x.mT if lies_turned else x
        for a, b, c in polynomials:
            factor = by(64).square(by(64).gram(x, rooms()), b, c, rooms())
            x = by(64).left(factor, x, a, torch.empty_like(x.contiguous()), rooms())
        expected.append(x.mT if lies_turned else x)
    NativeSteps([(stack, by(64)) for stack in stacks], polynomials, rooms()).take()
    for stack, values in zip(stacks, expected, strict=True):
        assert torch.equal(stack, values)
        beside = stack._base[[0, -1]]
        assert torch.equal(beside, torch.full_like(beside, 7.0))


@needs_kernels
def test_matrices_are_divided_by_their_norms():
    """Each bfloat16 by a norm of each mantissa, also where quotients are denormal or norms tiny."""
    bits = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16)
    every = bits.view(torch.bfloat16)
    for exponent in (-30, -23, 0, 90, 120):
        largest = (torch.arange(128, 256) / 128 * 2.0**exponent).bfloat16()
        small = every[every.abs() <= 2.0 ** (exponent - 18)]
        matrices = torch.zeros(128, 66, 1024, dtype=torch.bfloat16)
        matrices.view(128, -1)[:, : len(small)] = small
        matrices[:, -1, -1] = largest
        expected = matrices / largest.clamp(min=1e-7)[:, None, None]
        NativeSteps([(matrices, by(64))], [], rooms()).take()
        assert torch.equal(matrices.view(torch.int16), expected.view(torch.int16))
    odd = torch.ones(2, 40, 40, dtype=torch.bfloat16)
    odd[0], odd[1, 3, 4] = 0, torch.inf
    NativeSteps([(odd, by(64))], [], rooms()).take()
    assert not odd[0].any() and odd[1].isnan().sum() == 1 and odd[1].nansum() == 0


SHAPES_OF_A_STEP = [(64, 96), (96, 64), (160, 1024), (64, 96), (3, 64, 80), (192, 64)]


def stepped(backend: str, shapes: list[tuple[int, ...]], **settings) -> list[Tensor]:
    """Parameters after two steps."""
    params = [torch.nn.Parameter(random(*shape)) for shape in shapes]
    optimizer = FusedMuon(params, lr=0.1, backend=backend, **settings)
    for step in range(2):
        for param in params:
            param.grad = random(step + 1, *param.shape)[step]
        optimizer.step()
    return [param.detach() for param in params]


@needs_kernels
@pytest.mark.parametrize(
    ("shapes", "settings", "in_one"),
    [
        (SHAPES_OF_A_STEP, {"nesterov": True}, True),
        (SHAPES_OF_A_STEP[:4], {"head_rows": 32, "num_ns_steps": 10}, True),
        (SHAPES_OF_A_STEP, {"qkv_split_shapes": (16, 8, 8)}, False),
        ([*SHAPES_OF_A_STEP, (2, 41, 50)], {}, False),
        ([*SHAPES_OF_A_STEP, (9, 50)], {}, False),
        ([(41, 50), (0, 64)], {}, True),
        ([(0, 64)], {}, False),
    ],
    ids=["plain", "heads", "parts", "a stack of odd sizes", "a short side", "odd", "nothing"],
)
def test_a_step_in_one_call_has_the_bits_of_single_passes(threads, shapes, settings, in_one):
    expected = stepped("reference", shapes, **settings)
    before = seconds_of_products()
    found = stepped("native", shapes, **settings)
    assert (seconds_of_products() > before) == in_one
    assert all(map(torch.equal, found, expected))


@needs_kernels
def test_nothing_beside_a_result_is_written(threads):
    for rows, columns in SHAPES:
        memory = torch.full((2, rows + 2, columns), 7.0, dtype=torch.bfloat16)
        x, factor = (random(1, rows, columns).bfloat16(), random(1, rows, rows).bfloat16())
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
            assert kernels_of(batch) is not None, shape
    finally:
        torch.set_num_threads(before)
