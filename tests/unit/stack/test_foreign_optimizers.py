"""The wrappers keep the state of any torch optimizer by slot, which is the position of a parameter
in its group."""

import pytest
import torch
from torch import nn

from mp_optim import ChainedOptimizer, FP32Optimizer, HybridDeviceOptimizer
from support.models import config_for, same_bits


def adamw(params):
    return torch.optim.AdamW(params, lr=0.1)


def hybrid(params):
    return HybridDeviceOptimizer(params, 0.5, torch.optim.AdamW, torch.optim.AdamW, lr=0.1)


def wrapped(params):
    return FP32Optimizer(adamw(params), config_for("fp32", clip_grad=0.0))


def wrapped_hybrid(params):
    return FP32Optimizer(hybrid(params), config_for("fp32", clip_grad=0.0))


class Counting(torch.optim.SGD):
    """SGD that keeps a counter outside the state of parameters."""

    def step(self, closure=None):
        self.state["rounds"] = self.state.get("rounds", 0) + 1
        return super().step(closure)


@pytest.mark.parametrize("members", [1, 2])
def test_state_dict_refuses_foreign_state_that_belongs_to_no_parameter(members):
    params = [nn.Parameter(torch.ones(3)) for _ in range(members)]
    config = config_for("fp32", clip_grad=0.0)
    parts = [FP32Optimizer(Counting([param], lr=0.1), config) for param in params]
    optimizer = ChainedOptimizer(parts) if members > 1 else parts[0]
    for param in params:
        param.grad = torch.ones(3)
    optimizer.step()
    with pytest.raises(TypeError, match=r"Counting keeps \['rounds'\] outside the state"):
        optimizer.state_dict()


ORDERS = [(1, 0, 2, 3), (1, 2, 3, 0), (3, 2, 1, 0)]


@pytest.mark.parametrize("make", [wrapped, wrapped_hybrid])
@pytest.mark.parametrize("order", ORDERS)
def test_wrapper_refuses_swapped_params_and_steps_nothing(make, order):
    """State belongs to a position, so a swapped parameter would use the moments of another
    parameter."""
    params = [nn.Parameter(torch.full((3,), float(value))) for value in range(4)]
    optimizer = make(params)
    for param in params:
        param.grad = torch.ones(3)
    optimizer.step()
    before = [param.detach().clone() for param in params]
    optimizer.param_groups[0]["params"][:] = [params[index] for index in order]
    with pytest.raises(ValueError, match="has taken the position of"):
        optimizer.step()
    assert all(map(same_bits, (param.detach() for param in params), before))
    optimizer.param_groups[0]["params"][:] = params
    optimizer.step()
    assert all(float(optimizer.slot_state(slot)["step"]) == 2.0 for slot in optimizer.slots())


@pytest.mark.parametrize("make", [hybrid])
@pytest.mark.parametrize("order", ORDERS)
def test_hybrid_optimizer_keeps_state_by_position_when_params_are_swapped(make, order):
    params = [nn.Parameter(torch.full((3,), float(value))) for value in range(4)]
    optimizer = make(params)

    def step():
        for value, param in enumerate(params):
            param.grad = torch.full((3,), 1.0 + value)
        optimizer.step()

    def moments():
        return [optimizer.slot_state(slot)["exp_avg"].clone() for slot in optimizer.slots()]

    step()
    before = moments()
    optimizer.param_groups[0]["params"][:] = [params[index] for index in order]
    for param in params:
        param.grad = None
    optimizer.step()  # No parameter has a gradient, so this step only reads the new positions.
    assert all(map(same_bits, moments(), before))
    step()
    assert all(float(optimizer.slot_state(slot)["step"]) == 2.0 for slot in optimizer.slots())
    expected = [
        0.9 * moment + 0.1 * (1.0 + index) for moment, index in zip(before, order, strict=True)
    ]
    for found, wanted in zip(moments(), expected, strict=True):
        torch.testing.assert_close(found, wanted)
