"""AdEMAMix against the paper in FP64, its schedules over checkpoints, and what it refuses."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from mp_optim import AdamW, AdEMAMix, OptimizerConfig, get_megatron_optimizer

SETTINGS: dict[str, Any] = {
    "lr": 1e-2,
    "betas": (0.9, 0.99, 0.999),
    "alpha": 4.0,
    "weight_decay": 0.1,
    "alpha_warmup": 30,
    "beta3_warmup": 30,
}


def grads_of(step: int, shape: tuple[int, ...]) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(step))


def paper(start: np.ndarray, grads: list[np.ndarray], h: dict[str, Any]) -> np.ndarray:
    """Algorithm 1 with the schedulers of section 3, in FP64."""
    theta = start.copy()
    m, slow, nu = (np.zeros_like(theta) for _ in range(3))
    b1, b2, b3 = h["betas"]
    for t, g in enumerate(grads, start=1):
        alpha_t = min(t * h["alpha"] / h["alpha_warmup"], h["alpha"])
        x = min(t / h["beta3_warmup"], 1.0)
        logs = math.log(b1), math.log(b3)
        b3_t = min(math.exp(logs[0] * logs[1] / ((1 - x) * logs[1] + x * logs[0])), b3)
        m = b1 * m + (1 - b1) * g
        slow = b3_t * slow + (1 - b3_t) * g
        nu = b2 * nu + (1 - b2) * g * g
        root = np.sqrt(nu / (1 - b2**t)) + 1e-8
        theta = theta - h["lr"] * (
            (m / (1 - b1**t) + alpha_t * slow) / root + h["weight_decay"] * theta
        )
    return theta


@pytest.mark.parametrize("backend", ["auto", "reference"])
def test_it_follows_the_paper(backend: str) -> None:
    param = nn.Parameter(grads_of(1000, (33, 7)))
    start, grads = param.detach().double().numpy(), []
    optimizer = AdEMAMix([param], **SETTINGS, backend=backend)
    for step in range(40):
        param.grad = grads_of(step, param.shape)
        grads.append(param.grad.double().numpy())
        optimizer.step()
    expected = paper(start, grads, SETTINGS)
    assert np.abs(param.detach().double().numpy() - expected).max() < 1e-3 * SETTINGS["lr"]


def test_without_its_slow_average_it_is_adamw() -> None:
    ours, theirs = (nn.Parameter(grads_of(7, (65,))) for _ in range(2))
    mixed = AdEMAMix([ours], lr=1e-3, alpha=0.0, weight_decay=0.1)
    adam = AdamW([theirs], lr=1e-3, weight_decay=0.1)
    for step in range(5):
        ours.grad = grads_of(step, ours.shape)
        theirs.grad = ours.grad.clone()
        mixed.step()
        adam.step()
    assert torch.allclose(ours, theirs, rtol=0.0, atol=1e-6)


@pytest.mark.parametrize("state", ["fp32", "8bit", "4bit"])
def test_a_warm_up_goes_on_where_it_was_saved(state: str) -> None:
    def trained(steps: range, saved: Any = None) -> tuple[nn.Parameter, AdEMAMix]:
        param = nn.Parameter(grads_of(3, (300,)).bfloat16())
        optimizer = AdEMAMix([param], **SETTINGS, state=state)
        if saved is not None:
            values, held = saved
            param.data.copy_(values)
            optimizer.load_state_dict(held)
        for step in steps:
            param.grad = grads_of(step, param.shape).bfloat16()
            optimizer.step()
        return param, optimizer

    half, optimizer = trained(range(10))
    resumed, _ = trained(range(10, 20), (half.detach().clone(), optimizer.state_dict()))
    whole, _ = trained(range(20))
    assert torch.equal(resumed, whole)


def test_a_beta1_of_zero_keeps_no_first_moment() -> None:
    param = nn.Parameter(grads_of(3, (300,)))
    optimizer = AdEMAMix([param], **{**SETTINGS, "betas": (0.0, 0.99, 0.999)})
    for step in range(3):
        param.grad = grads_of(step, param.shape)
        optimizer.step()
    assert set(optimizer.state[param]) == {"step", "exp_avg_sq", "exp_avg_slow"}
    assert param.isfinite().all()


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("betas", (0.9, 0.999), "three numbers"),
        ("betas", (0.9, 0.999, 1.0), "three numbers"),
        ("alpha", -1.0, "alpha=-1.0"),
        ("alpha_warmup", 0, "alpha_warmup=0: must be a whole number of steps"),
        ("beta3_warmup", 2.5, "beta3_warmup=2.5: must be a whole number of steps"),
    ],
)
def test_what_it_refuses(name: str, value: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        AdEMAMix([nn.Parameter(torch.zeros(3))], **{name: value})


def test_the_config_names_its_fields() -> None:
    config = OptimizerConfig(
        optimizer="ademamix", lr=1e-3, bf16=True, ademamix_alpha=2.0, ademamix_beta3_warmup=7
    )
    optimizer = get_megatron_optimizer(config, nn.Linear(4, 4).bfloat16())
    group = optimizer.param_groups[0]
    assert group["betas"] == (0.9, 0.999, 0.9999)
    assert (group["alpha"], group["beta3_warmup"], group["alpha_warmup"]) == (2.0, 7, None)
    with pytest.raises(ValueError, match="ademamix_alpha_warmup"):
        OptimizerConfig(optimizer="ademamix", lr=1e-3, ademamix_alpha_warmup=0)
    with pytest.raises(ValueError, match="fused_backend='apex'"):
        OptimizerConfig(optimizer="ademamix", lr=1e-3, fused_backend="apex")


def test_a_group_may_have_its_own_betas() -> None:
    layer = nn.Linear(4, 4, bias=False).bfloat16()
    config = OptimizerConfig(optimizer="ademamix", lr=1e-3, bf16=True)
    group = {"params": [("weight", layer.weight)], "betas": (0.8, 0.9, 0.99), "alpha": 2.0}
    optimizer = get_megatron_optimizer(config, layer, param_groups=[group])
    assert optimizer.param_groups[0]["betas"] == (0.8, 0.9, 0.99)
    with pytest.raises(ValueError, match="must be three numbers"):
        get_megatron_optimizer(config, layer, param_groups=[{**group, "betas": (0.8, 0.9)}])
