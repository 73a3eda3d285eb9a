"""Any torch optimizer below the wrappers: its state belongs to the slot, as ours does."""

import pytest
import torch
from torch import nn

from mp_optim import FP32Optimizer, HybridDeviceOptimizer
from mp_optim.update import as_slot_optimizer
from support.models import config_for, same_bits


def adamw(params):
    return torch.optim.AdamW(params, lr=0.1)


def hybrid(params):
    return HybridDeviceOptimizer(
        params, 0.5, torch.optim.AdamW, torch.optim.AdamW, lr=0.1
    )


def wrapped(params):
    return FP32Optimizer(adamw(params), config_for("fp32", clip_grad=0.0))


def wrapped_hybrid(params):
    return FP32Optimizer(hybrid(params), config_for("fp32", clip_grad=0.0))


def as_slots(params):
    return as_slot_optimizer(adamw(params))


@pytest.mark.parametrize("make", [as_slots, hybrid, wrapped, wrapped_hybrid])
@pytest.mark.parametrize("order", [(1, 0, 2, 3), (1, 2, 3, 0), (3, 2, 1, 0)])
def test_parameters_that_change_places_leave_their_state_where_it_was(make, order):
    params = [nn.Parameter(torch.full((3,), float(value))) for value in range(4)]
    optimizer = make(params)

    def step():
        for value, param in enumerate(params):
            param.grad = torch.full((3,), 1.0 + value)
        optimizer.step()

    def moments():
        return [
            optimizer.slot_state(slot)["exp_avg"].clone() for slot in optimizer.slots()
        ]

    step()
    before = moments()
    optimizer.param_groups[0]["params"][:] = [params[index] for index in order]
    for param in params:
        param.grad = None
    optimizer.step()  # nothing has a gradient: only places are followed
    assert all(map(same_bits, moments(), before))
    step()
    assert all(
        float(optimizer.slot_state(slot)["step"]) == 2.0 for slot in optimizer.slots()
    )
    expected = [
        0.9 * moment + 0.1 * (1.0 + index)
        for moment, index in zip(before, order, strict=True)
    ]
    for found, wanted in zip(moments(), expected, strict=True):
        torch.testing.assert_close(found, wanted)
