"""The optimizer follows parameters at a reused memory address and weights written after a load."""

import pytest
import torch
from torch import nn

from mp_optim import get_megatron_optimizer
from support.models import config_for


def one_param(precision: str = "bf16", **settings):
    model = nn.Module()
    model.w = nn.Parameter(torch.ones(4, dtype=torch.bfloat16))
    return model, get_megatron_optimizer(config_for(precision, weight_decay=0.0, **settings), model)


def step_in_place(model, optimizer):
    model.w.grad = torch.zeros_like(model.w)
    assert optimizer.step().success


@pytest.mark.parametrize("fraction", [0.0, 1.0])
def test_step_follows_parameter_values_when_memory_address_is_reused(fraction):
    model, optimizer = one_param(fraction=fraction)
    memory = bytearray(8)
    model.w.data = torch.frombuffer(memory, dtype=torch.bfloat16)
    step_in_place(model, optimizer)
    model.w.data = torch.zeros(4, dtype=torch.bfloat16)
    memory[:] = torch.full((4,), 5.0, dtype=torch.bfloat16).view(torch.uint8).numpy().tobytes()
    model.w.data = torch.frombuffer(memory, dtype=torch.bfloat16)
    step_in_place(model, optimizer)
    assert model.w.eq(5.0).all() and dict(optimizer.named_main_params())["w"].eq(5.0).all()
