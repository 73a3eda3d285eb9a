"""Settings of the rules, and refusals of invalid settings."""

import math

import pytest
import torch
from torch import nn

from mp_optim.rules.fused import FusedAdam, FusedLAMB
from mp_optim.rules.rule_optimizer import RuleOptimizer

LR = 1e-2


def test_lamb_clips_by_the_global_norm_unless_max_grad_norm_is_zero():
    def moved(limit):
        params = [nn.Parameter(torch.ones(4)), nn.Parameter(torch.ones(4))]
        optimizer = FusedLAMB(params, lr=LR, max_grad_norm=limit)
        for p in params:
            p.grad = torch.full((4,), 3.0)
        optimizer.step()
        return optimizer.state[params[0]]["exp_avg"]

    assert torch.allclose(moved(0.0), torch.full((4,), 0.3))
    assert torch.allclose(moved(1.0), torch.full((4,), 0.3 / math.sqrt(72)))


def test_lamb_adapts_params_without_decay_only_when_nvlamb_is_set():
    def ratio(**settings):
        param = nn.Parameter(torch.full((4,), 10.0))
        param.grad = torch.ones(4)
        FusedLAMB([param], lr=LR, max_grad_norm=0.0, weight_decay=0.0, **settings).step()
        return float(10.0 - param.detach()[0])

    assert ratio() == pytest.approx(LR, rel=1e-3)
    assert ratio(use_nvlamb=True) == pytest.approx(LR * 10, rel=1e-3)


def test_fused_adam_and_sgd_refuse_invalid_settings_by_name():
    with pytest.raises(ValueError, match="fused_backend='cuda'"):
        FusedAdam([nn.Parameter(torch.ones(1))], backend="cuda")
    for settings in ({"lr": -1.0}, {"betas": (1.0, 0.9)}, {"eps": -1.0}, {"weight_decay": -1.0}):
        with pytest.raises(ValueError, match=next(iter(settings))):
            FusedAdam([nn.Parameter(torch.ones(1))], **settings)
    with pytest.raises(ValueError, match="nesterov"):
        RuleOptimizer("sgd", [nn.Parameter(torch.ones(1))], nesterov=True)


def test_fused_adam_refuses_bf16_params_by_name():
    half = nn.Parameter(torch.ones(2, dtype=torch.bfloat16))
    half.grad = torch.ones(2, dtype=torch.bfloat16)
    with pytest.raises(TypeError, match=r"group0\.param0: adam does not step torch\.bfloat16"):
        FusedAdam([half]).step()
