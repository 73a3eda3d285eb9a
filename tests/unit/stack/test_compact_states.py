"""Compact states in the whole stack: equal bits, saves, loads and conversions."""

import zlib

import pytest
import torch
from torch import nn

import mp_optim
from mp_optim import OptimizerConfig, get_megatron_optimizer
from support.kernels import NEED_KERNELS
from support.models import COMPACT, build, train
from support.offload import differing, state_of


def test_8bit_state_loads_without_convert_when_saved_in_full_precision():
    """Stochastic rounding gives the largest value of a block the second largest code in some of
    2,000 blocks."""
    built = [nn.Parameter(torch.ones(512, 512, dtype=torch.bfloat16)) for _ in range(2)]
    settings = {**COMPACT["8bit"], "stochastic_rounding": True}
    config = OptimizerConfig(lr=0.01, bf16=True, use_precision_aware_optimizer=True, **settings)
    optimizer, other = (
        get_megatron_optimizer(config, nn.ParameterList([param])) for param in built
    )
    built[0].grad = torch.randn(512, 512, generator=torch.Generator().manual_seed(0)).bfloat16()
    optimizer.step()
    other.load_state_dict(optimizer.state_dict(full_precision=True))
    assert differing(state_of(other), state_of(optimizer)) == []


def test_reload_model_params_keeps_fp32_values_in_remainders():
    model, optimizer = build("bf16-remainder")
    exact = torch.full((8, 8), 1.0 + 2.0**-20)
    optimizer.reload_model_params({"dense": exact})
    assert torch.equal(dict(optimizer.named_main_params())["dense"], exact)
    assert torch.equal(model.dense, torch.ones(8, 8, dtype=torch.bfloat16))


def test_stochastic_rounding_gives_equal_bits_for_a_seed_in_every_placement():
    runs = {}
    for seed, fraction in ((0, 0.0), (0, 0.7), (1, 0.0)):
        model, optimizer = build("bf16-stochastic", fraction, stochastic_rounding_seed=seed)
        train(model, optimizer, 3)
        runs[seed, fraction] = state_of(optimizer)
    assert differing(runs[0, 0.7], runs[0, 0.0]) == []
    assert any(not torch.equal(value, runs[1, 0.0][key]) for key, value in runs[0, 0.0].items())


@pytest.mark.parametrize("backend", [pytest.param("native", marks=NEED_KERNELS), "reference"])
def test_stochastic_rounding_differs_when_two_names_share_a_crc32(backend):
    names = ("plumless", "buckeroo")
    assert len({zlib.crc32(name.encode()) for name in names}) == 1
    params = [nn.Parameter(torch.ones(1000).bfloat16()) for _ in names]
    optimizer = mp_optim.AdamW(
        zip(names, params, strict=True), state="8bit", stochastic_rounding=True, backend=backend
    )
    for param in params:
        param.grad = torch.linspace(-1.0, 1.0, 1000).bfloat16()
    optimizer.step()
    first, second = (optimizer.state[param]["exp_avg"] for param in params)
    assert not torch.equal(first, second)
