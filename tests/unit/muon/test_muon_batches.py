"""Matrices of one shape are multiplied together, and each has the bits that it has alone."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from mp_optim.muon import newton_schulz
from mp_optim.muon.muon import FusedMuon

SHAPES = [(64, 128), (128, 64), (48, 48), (37, 91), (300, 91), (256, 16), (1, 9), (9, 1)]


@pytest.fixture(params=[1, 2], ids=["one thread", "two threads"], autouse=True)
def threads(request):
    """The bits of matrix products may depend on the number of threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield
    torch.set_num_threads(before)


def random(shape: tuple[int, ...], seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def stepped(shapes, places, **settings) -> list[Tensor]:
    """Parameters after two steps; their values and gradients depend on their places alone."""
    params = [nn.Parameter(random(s, at)) for s, at in zip(shapes, places, strict=True)]
    optimizer = FusedMuon(params, lr=0.1, nesterov=True, **settings)
    for step in range(1, 3):
        for param, at in zip(params, places, strict=True):
            param.grad = random(tuple(param.shape), 1000 * step + at)
        optimizer.step()
    return [param.detach() for param in params]


@pytest.mark.parametrize("products", ["medium", "highest"])
def test_a_matrix_has_the_bits_that_it_has_alone(products):
    shapes = [*SHAPES, *SHAPES, (3, 64, 128), *SHAPES[:3], (2, 128, 64)]
    places = list(range(len(shapes)))
    together = stepped(shapes, places, fp32_matmul_prec=products)
    for at in range(0, len(shapes), 2):
        (alone,) = stepped([shapes[at]], [at], fp32_matmul_prec=products)
        assert torch.equal(together[at], alone), shapes[at]


@pytest.mark.parametrize("steps", [5, pytest.param(6, marks=pytest.mark.slow), 1])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_batch_has_the_bits_of_products_of_two_matrices(dtype, steps, monkeypatch):
    """Gradients whose products nearly cancel: their bits tell in which order they were added."""
    polynomials = [(3.4445, -4.7750, 2.0315)] * steps
    batched = []

    def watched(choice):
        def chosen(batch):
            batched.append(choice(batch))
            return batched[-1]

        return chosen

    for name in ("kernels_of", "products_of"):
        choice = getattr(newton_schulz, name)
        monkeypatch.setattr(newton_schulz, name, watched(choice))
    for count in (1, 3, 16):
        for rows, columns in SHAPES:
            stack = random((count, rows, columns), rows)
            half = columns // 2
            stack[:, : rows // 2, half : 2 * half] = stack[:, : rows // 2, :half]
            stack[:, rows // 2 :, half : 2 * half] = -stack[:, rows // 2 :, :half]
            stack = stack.to(dtype)
            expected = [newton_schulz.iterate(each.clone(), polynomials) for each in stack]
            (found,) = newton_schulz.orthogonalize_each([stack], polynomials)
            assert torch.equal(found, torch.stack(expected)), (count, rows, columns)
    if dtype == torch.bfloat16 and torch.backends.cpu.get_cpu_capability() == "AVX512":
        assert any(found is not None for found in batched)


def test_a_batch_of_separate_matrices_is_that_of_a_stack():
    """What lies side by side is not copied, what does not is: with the same result."""
    polynomials = [(3.4445, -4.7750, 2.0315)] * 3
    stack = random((4, 64, 128), 1).bfloat16()
    (expected,) = newton_schulz.orthogonalize_each([stack.clone()], polynomials)
    views = list(stack.clone())
    apart = [each.clone() for each in stack]
    for matrices in (views, apart, views[:0] + apart):
        matrices = [each.copy_(of) for each, of in zip(matrices, stack, strict=True)]
        found = newton_schulz.orthogonalize_each(matrices, polynomials)
        assert torch.equal(torch.stack(found), expected)
    assert newton_schulz.orthogonalize_each([], polynomials) == []
