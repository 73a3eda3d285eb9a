"""First moments in 4 bits: shown and saved in FP32 without losing a bit."""

from typing import Any

import torch

from mp_optim import HybridDeviceOptimizer
from mp_optim.config.state_forms import UINT4
from mp_optim.rules.fused import FusedAdam
from support.models import same_bits


def assert_same(found: dict[str, Any], expected: dict[str, Any]) -> None:
    assert found.keys() == expected.keys()
    assert all(same_bits(found[key], value) for key, value in expected.items())


def alone() -> list[torch.optim.Optimizer]:
    form = {"exp_avg_dtype": UINT4, "exp_avg_sq_dtype": torch.uint8}
    found: list[torch.optim.Optimizer] = []
    for fraction in (None, 0.0, 1.0):
        torch.manual_seed(0)
        param = torch.nn.Parameter(torch.randn(5, 130))
        if fraction is None:
            found.append(FusedAdam([param], lr=1e-2, **form))
        else:
            hybrid = HybridDeviceOptimizer([param], fraction, lr=1e-2, sub_optimizer_kwargs=form)
            found.append(hybrid)
    return found


def test_4bit_state_is_shown_in_fp32_and_loads_back_with_equal_bits():
    shown = []
    for optimizer, again in zip(alone(), alone(), strict=True):
        param, other = (each.param_groups[0]["params"][0] for each in (optimizer, again))
        param.grad = torch.randn(5, 130, generator=torch.Generator().manual_seed(1))
        optimizer.step()
        state = optimizer.state[param]
        assert state["exp_avg"].dtype == torch.float32
        assert state["exp_avg"].shape == param.shape and state["exp_avg"].any()
        saved = optimizer.state_dict()
        full = optimizer.state_dict(full_precision=True)["state"][0]
        assert "exp_avg_scale" not in saved["state"][0] and "exp_avg_sq_scale" in saved["state"][0]
        assert state.keys() == saved["state"][0].keys()
        assert_same(full, {key: state[key] for key in full})
        other.data.copy_(param.data)
        again.load_state_dict(saved)
        assert_same(dict(again.state[other]), dict(state))
        other.grad = param.grad
        optimizer.step()
        again.step()
        assert torch.equal(param, other)
        shown.append(param.detach())
    assert all(torch.equal(param, shown[0]) for param in shown)
