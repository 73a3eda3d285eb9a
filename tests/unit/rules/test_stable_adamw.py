"""StableAdamW against the paper in FP64, against AdamW where nothing is clipped, and where AdamW
goes astray."""

import math

import numpy as np
import pytest
import torch
from torch import nn

from mp_optim import AdamW, OptimizerConfig, StableAdamW, get_megatron_optimizer
from mp_optim.kernels import choose_backend
from mp_optim.rules.whole_param import FusedStableAdamW as Rule
from support.kernels import NEED_KERNELS
from support.models import same_bits

SETTINGS = {"lr": 1e-2, "betas": (0.9, 0.99), "eps": 1e-6, "weight_decay": 0.1}
SHAPES = [(5, 40), (3000,), (), (2, 3, 4)]


def gradient(shape, step):
    """The third parameter from the tenth step on, and the first in one, a thousand times as
    large."""
    generator = torch.Generator().manual_seed(100 * step + len(shape))
    grad = torch.randn(shape, generator=generator) * 1e-3
    grows = (shape == () and step >= 10) or (shape == (5, 40) and step == 13)
    return grad * 1000 if grows else grad


def parameters():
    torch.manual_seed(0)
    return [nn.Parameter(torch.randn(shape)) for shape in SHAPES]


def step_all(optimizer, params, step):
    for param in params:
        param.grad = gradient(tuple(param.shape), step)
    optimizer.step()


def by_the_paper(param, steps):
    """Algorithm 2: decays that begin at 0, so that averages need no correction."""
    lr, (beta1, beta2) = SETTINGS["lr"], SETTINGS["betas"]
    theta = param.detach().double().numpy()
    v = u = np.zeros_like(theta)
    clipped = []
    for t in range(1, steps + 1):
        g = gradient(tuple(param.shape), t).double().numpy()
        now1 = beta1 * (1 - beta1 ** (t - 1)) / (1 - beta1**t)
        now2 = beta2 * (1 - beta2 ** (t - 1)) / (1 - beta2**t)
        v = now1 * v + (1 - now1) * g
        u = now2 * u + (1 - now2) * g**2
        rms = math.sqrt(np.mean(g**2 / np.maximum(u, SETTINGS["eps"] ** 2)))
        rate = lr / max(1.0, rms)
        theta = theta - rate * SETTINGS["weight_decay"] * theta
        theta = theta - rate * v / (np.sqrt(u) + SETTINGS["eps"])
        clipped.append(rms > 1.0 + 1e-6)
    return theta, clipped


@pytest.mark.parametrize("backend", ["reference", pytest.param("native", marks=NEED_KERNELS)])
def test_it_is_the_papers(backend):
    """Within 1e-3 lr an element after 30 steps: p is rounded 60 times, and an ulp of it is 2.4e-5
    lr."""
    params = parameters()
    optimizer = StableAdamW(params, backend=backend, **SETTINGS)
    expected = [by_the_paper(param, 30) for param in params]
    for step in range(1, 31):
        step_all(optimizer, params, step)
        now = sum(clipped[step - 1] for _, clipped in expected)
        assert optimizer.metrics()["update_clipped_params"] == now
    for param, (theta, _) in zip(params, expected, strict=True):
        assert np.abs(param.detach().double().numpy() - theta).max() < 1e-3 * 1e-2
    every = [step for _, clipped in expected for step in clipped]
    assert 20 < sum(every) < len(every) - 20


def test_what_is_not_clipped_has_adamws_bits():
    ours, theirs = parameters(), parameters()
    stable, plain = StableAdamW(ours, **SETTINGS), AdamW(theirs, **SETTINGS)
    for step in (1, 2):
        step_all(stable, ours, step)
        step_all(plain, theirs, step)
        flags = [clipped[-1] for _, clipped in (by_the_paper(p, step) for p in ours)]
    assert any(flags) and not all(flags)
    for param, other, is_clipped in zip(ours, theirs, flags, strict=True):
        assert same_bits(param.detach(), other.detach()) != is_clipped


def test_a_gradient_that_is_not_finite_shows_in_all_of_its_parameter():
    for bad in (math.nan, math.inf):
        params = parameters()
        optimizer = Rule(params, **SETTINGS)
        step_all(optimizer, params, 1)
        for param in params:
            param.grad = gradient(tuple(param.shape), 2)
        params[1].grad[7] = bad
        optimizer.step()
        assert params[1].isnan().all()
        assert all(param.isfinite().all() for param in (params[0], *params[2:]))


def test_denormal_gradients_and_an_eps_of_zero_stay_within_the_limit():
    """The second moment of gradients below 1e-22 is rounded to nothing, or to far too little."""
    param = nn.Parameter(torch.ones(64))
    settings = SETTINGS | {"eps": 1e-38, "weight_decay": 0.0}
    optimizer = StableAdamW([param], **settings)
    for step in range(4):
        param.grad = torch.full((64,), 3e-22 * 4**step)
        optimizer.step()
        assert param.isfinite().all()


def largest_loss(rule):
    """A regression whose features become ten thousand times as large in the last hundred steps:
    gradients grow at once, and the second moment does not know yet."""
    generator = torch.Generator().manual_seed(3)
    weight = nn.Parameter(torch.zeros(32))
    optimizer = rule([weight], lr=0.05, betas=(0.9, 0.999), weight_decay=0.0)
    losses = []
    for step in range(300):
        scale, noise = (1e-3, 1e-4) if step < 200 else (10.0, 1.0)
        x = torch.randn(64, 32, generator=generator) * scale
        error = x @ (weight - 1.0) - torch.randn(64, generator=generator) * noise
        optimizer.zero_grad()
        loss = error.square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return max(losses[200:])


def test_a_second_moment_that_is_stuck_in_the_past_makes_no_spike():
    """AdamW's loss jumps to 25 where the noise leaves 1; clipped steps take it to 4."""
    assert largest_loss(AdamW) > 15.0
    assert largest_loss(StableAdamW) < 8.0


def test_what_it_refuses():
    with pytest.raises(ValueError, match="decoupled_weight_decay=False: has no effect"):
        OptimizerConfig(optimizer="stable_adamw", lr=1e-3, decoupled_weight_decay=False)
    with pytest.raises(ValueError, match="fused_backend='apex': has no kernels for"):
        OptimizerConfig(optimizer="stable_adamw", lr=1e-3, fused_backend="apex")
    config = OptimizerConfig(optimizer="stable_adamw", lr=1e-3, fused_backend="torch")
    described = str(get_megatron_optimizer(config, nn.Linear(2, 2)).describe())
    assert "torch has no kernels for stable_adamw" in described
    assert choose_backend("reference", torch.device("cpu"))[0].name in described


@pytest.mark.parametrize("backend", [pytest.param("native", marks=NEED_KERNELS), "reference"])
def test_a_nan_gradient_leaves_other_parameters_alone(backend):
    """At a rate of 0 nothing is decayed, whatever is in the parameters: 0 times inf is not 0."""
    values = torch.tensor([torch.inf, -torch.inf, -0.0, 1.0])
    broken, whole = values.clone(), values.clone()
    broken.grad, whole.grad = torch.full_like(values, torch.nan), torch.ones(4)
    Rule([broken, whole], lr=0.0, weight_decay=0.1, backend=backend).step()
    assert broken.isnan().all()
    assert torch.equal(whole.view(torch.int32), values.view(torch.int32))
