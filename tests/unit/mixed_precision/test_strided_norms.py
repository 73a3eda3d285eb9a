"""The gradient norm has the same bits for all strides."""

import pytest
import torch
from torch import nn

from mp_optim import get_megatron_optimizer
from support.models import config_for, same_bits

MODES = [
    {},
    *({"fraction": 1.0, "offload_mode": mode} for mode in ("sync", "overlap", "speculative")),
]


def trained(backend: str, **settings):
    torch.manual_seed(0)
    model = nn.ParameterDict(
        {
            "strided": nn.Parameter(torch.randn(9, 300).t()),
            "whole": nn.Parameter(torch.randn(17, 15)),
            "stepped": nn.Parameter(torch.randn(40, 33)[:, ::3]),
        }
    )
    optimizer = get_megatron_optimizer(
        config_for("fp32", fused_backend=backend, clip_grad=0.1, **settings), model
    )
    factors, norms = torch.randn(300, 9), []
    for step in range(6):
        optimizer.zero_grad()
        loss = (model["strided"] * (factors + step)).sum() + (model["whole"] * step).sum()
        (loss + (model["stepped"].sin() * step).sum()).backward()
        norms.append(torch.tensor(optimizer.step().grad_norm, dtype=torch.float64))
    return [*norms, *(param.detach() for param in model.values())]


@pytest.mark.parametrize("backend", ["reference", "native", "torch"])
def test_grad_norm_of_strided_gradients_has_same_bits_in_each_offload_mode(backend):
    expected, *others = (trained(backend, **settings) for settings in MODES)
    assert all(all(map(same_bits, other, expected)) for other in others)
