"""Any torch optimizer below the wrappers: its state belongs to the slot, as ours does."""

import pytest
import torch
from torch import nn

from mp_optim import (
    ChainedOptimizer,
    Float16OptimizerWithFloat16Params,
    FP32Optimizer,
    HybridDeviceOptimizer,
)
from mp_optim.core.interrupted_step import BrokenOffError
from support.models import config_for, same_bits


def adamw(params):
    return torch.optim.AdamW(params, lr=0.1)


def hybrid(params):
    return HybridDeviceOptimizer(params, 0.5, torch.optim.AdamW, torch.optim.AdamW, lr=0.1)


def wrapped(params):
    return FP32Optimizer(adamw(params), config_for("fp32", clip_grad=0.0))


def wrapped_hybrid(params):
    return FP32Optimizer(hybrid(params), config_for("fp32", clip_grad=0.0))


class Meaning(torch.optim.SGD):
    """Shows the mean of a parameter's first value and its last one for evaluation."""

    def step(self, closure=None):
        for group in self.param_groups:
            for param in group["params"]:
                self.state[param].setdefault("first", param.detach().clone())
        return super().step(closure)

    def _show(self, weight):
        for group in self.param_groups:
            for param in group["params"]:
                param.data.lerp_(self.state[param]["first"], weight)

    def eval(self):
        self._show(0.5)

    def train(self):
        self._show(-1.0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_replaced_parameter_is_shown_as_it_is_evaluated(dtype):
    """No step comes between that would have found it."""
    param = nn.Parameter(torch.full((3,), 4.0, dtype=dtype))
    inner = Meaning([param], lr=1.0)
    if dtype == torch.float32:
        optimizer = FP32Optimizer(inner, config_for("fp32", clip_grad=0.0))
    else:
        optimizer = Float16OptimizerWithFloat16Params(inner, config_for("bf16", clip_grad=0.0))
    param.grad = torch.full_like(param, 2.0)
    optimizer.step()
    new = nn.Parameter(param.detach().clone())
    optimizer.param_groups[0]["params"][0] = new
    for show, value in ((optimizer.eval, 3.0), (optimizer.train, 2.0)):
        show()
        assert new.eq(value).all() and param.eq(2.0).all()


class Interrupted(Meaning):
    """Is interrupted when half of its parameters are shown."""

    def _show(self, weight):
        whole, self.param_groups = self.param_groups, self.param_groups[:1]
        super()._show(weight)
        self.param_groups = whole
        raise KeyboardInterrupt


def test_evaluation_that_is_broken_off_is_not_trained_on():
    params = [nn.Parameter(torch.full((3,), 4.0)) for _ in range(2)]
    inner = Interrupted([{"params": [param]} for param in params], lr=1.0)
    optimizer = FP32Optimizer(inner, config_for("fp32", clip_grad=0.0))
    for param in params:
        param.grad = torch.full((3,), 2.0)
    optimizer.step()
    saved = optimizer.state_dict()
    with pytest.raises(KeyboardInterrupt):
        optimizer.eval()
    for use in (optimizer.step, optimizer.state_dict):
        with pytest.raises(BrokenOffError, match="interrupted by KeyboardInterrupt"):
            use()
    optimizer.load_state_dict(saved)
    optimizer.step()


class Counting(torch.optim.SGD):
    """Keeps something outside the state of parameters."""

    def step(self, closure=None):
        self.state["rounds"] = self.state.get("rounds", 0) + 1
        return super().step(closure)


@pytest.mark.parametrize("members", [1, 2])
def test_foreign_state_outside_state_dicts_is_refused_by_name(members):
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
def test_wrapper_refuses_parameters_that_change_places(make, order):
    """State stays with its place, so a parameter would go on with another's moments."""
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
def test_parameters_that_change_places_leave_their_state_where_it_was(make, order):
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
    optimizer.step()  # nothing has a gradient: only places are followed
    assert all(map(same_bits, moments(), before))
    step()
    assert all(float(optimizer.slot_state(slot)["step"]) == 2.0 for slot in optimizer.slots())
    expected = [
        0.9 * moment + 0.1 * (1.0 + index) for moment, index in zip(before, order, strict=True)
    ]
    for found, wanted in zip(moments(), expected, strict=True):
        torch.testing.assert_close(found, wanted)
