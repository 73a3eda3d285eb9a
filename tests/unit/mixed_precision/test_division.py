"""Divisors are tensors, because a GPU's division by a Python number has other bits."""

import contextlib
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from mp_optim import get_megatron_optimizer
from mp_optim.core.quantized import scaled_codes
from mp_optim.mixed_precision.clip_and_skip import clip_coefficients
from mp_optim.zero.collectives import divide_, finish_sum
from support.cuda_division import DividesAsCuda
from support.models import build, config_for, same_bits, tokens_of


def test_simulated_cuda_division_multiplies_by_the_reciprocal_when_the_divisor_is_a_number():
    values = torch.arange(1.0, 1000.0)
    with DividesAsCuda() as mode:
        off = values / 3.0
        same = values / 4.0
        several = torch._foreach_div([values, values], 3.0)
    assert not torch.equal(off, values / torch.tensor(3.0).expand_as(values))
    assert torch.equal(same, values * 0.25)
    assert torch.equal(several[0], off) and mode.numbers == [3.0, 4.0, 3.0]


def float8_scales() -> Tensor:
    values = torch.linspace(-3.0, 5.0, 96 * 400).view(400, 96) ** 3
    return scaled_codes(values, (400, 1), torch.float8_e4m3fn)[0]


def mean_of_sums() -> Tensor:
    total = torch.linspace(-1.0, 1.0, 5000) ** 3
    mean = torch.zeros_like(total)
    finish_sum(total, mean, divisor=12, add=False)
    return mean


def coefficients() -> Tensor:
    return clip_coefficients(torch.linspace(0.1, 40.0, 5000, dtype=torch.float64), 0.3)


@pytest.mark.parametrize("compute", [float8_scales, mean_of_sums, coefficients])
def test_quotients_have_host_bits_when_cuda_division_is_simulated(compute):
    expected = compute()
    with DividesAsCuda():
        assert torch.equal(compute(), expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("divisor", [2, 24, 255, 257, 513, 2056, 70_001])
def test_divide_is_exact_when_gradient_dtype_cannot_hold_the_divisor(dtype, divisor):
    grads = (torch.linspace(-3.0, 5.0, 5000) ** 3).to(dtype)
    expected = (grads.float() / torch.full((5000,), float(divisor))).to(dtype)
    with DividesAsCuda():
        divide_(grads, divisor)
    assert torch.equal(grads, expected)


def test_clip_coefficients_have_bits_of_python_floats():
    norms = torch.linspace(0.1, 40.0, 5000, dtype=torch.float64)
    host = [min(1.0, 0.3 / (norm + 1e-6)) for norm in norms.tolist()]
    assert clip_coefficients(norms, 0.3).tolist() == host


def state_after(precision: str, rule: str, mode: Any) -> list[Tensor]:
    model, optimizer = build(precision, optimizer=rule, clip_grad=0.3, fused_backend="reference")
    for step in range(4):
        optimizer.zero_grad()
        optimizer.scale_loss(model(tokens_of(step))).backward()
        with mode:
            optimizer.step()
    states = [value for state in optimizer.state.values() for value in state.values()]
    return [*(param.detach() for param in model.parameters()), *states]


RULES = ("adam", "lamb", "lion", "sgd", "muon")
CASES = [
    *((precision, rule) for precision in ("fp32", "fp16", "bf16") for rule in RULES),
    *(
        (precision, rule)
        for precision in ("bf16-8bit", "bf16-stochastic")
        for rule in ("adam", "lamb")
    ),
]


@pytest.mark.parametrize(("precision", "rule"), CASES)
def test_step_has_host_bits_when_cuda_division_is_simulated(precision, rule):
    on_host = state_after(precision, rule, contextlib.nullcontext())
    as_cuda = state_after(precision, rule, DividesAsCuda())
    assert len(on_host) == len(as_cuda)
    for ours, theirs in zip(on_host, as_cuda, strict=True):
        assert same_bits(ours, theirs)


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_loss_scale_is_on_the_device_of_the_model(precision):
    model = nn.Linear(
        4, 4, device="meta", dtype=torch.bfloat16 if precision == "bf16" else torch.float16
    )
    optimizer = get_megatron_optimizer(config_for(precision), model)
    assert optimizer.get_loss_scale().device == torch.device("meta")
