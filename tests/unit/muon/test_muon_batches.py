"""A matrix gets equal bits when Muon steps it alone and with other matrices."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from mp_optim.muon.muon import MuonRule
from mp_optim.rules.rule_optimizer import RuleOptimizer

SHAPES = [(64, 128), (128, 64), (48, 48), (37, 91), (300, 91), (256, 16), (1, 9), (9, 1)]


@pytest.fixture(params=[1, 2], ids=["one thread", "two threads"], autouse=True)
def threads(request):
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield
    torch.set_num_threads(before)


def random(shape: tuple[int, ...], seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def stepped(shapes, places, **settings) -> list[Tensor]:
    params = [nn.Parameter(random(s, at)) for s, at in zip(shapes, places, strict=True)]
    optimizer = RuleOptimizer(MuonRule(), params, lr=0.1, nesterov=True, **settings)
    for step in range(1, 3):
        for param, at in zip(params, places, strict=True):
            param.grad = random(tuple(param.shape), 1000 * step + at)
        optimizer.step()
    return [param.detach() for param in params]


@pytest.mark.parametrize("products", ["medium", "highest"])
def test_muon_gives_a_matrix_equal_bits_alone_and_beside_other_matrices(products):
    shapes = [*SHAPES, *SHAPES, (3, 64, 128), *SHAPES[:3], (2, 128, 64)]
    places = list(range(len(shapes)))
    together = stepped(shapes, places, fp32_matmul_prec=products)
    for at in range(0, len(shapes), 2):
        (alone,) = stepped([shapes[at]], [at], fp32_matmul_prec=products)
        assert torch.equal(together[at], alone), shapes[at]
