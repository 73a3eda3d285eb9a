"""Defects of other libraries that this project must not have, each by name."""

import copy

import pytest
import torch
from torch import nn

from mp_optim import Float16OptimizerWithFloat16Params, HybridDeviceOptimizer
from support.models import build, config_for, same_bits, tokens_of, train


def replace_params(model, optimizer):
    """Replace every parameter by a new tensor, in the model and in the param groups of the
    optimizer."""
    for name, param in list(model.named_parameters()):
        *path, last = name.split(".")
        owner = model.get_submodule(".".join(path)) if path else model
        fresh = nn.Parameter(param.detach().clone())
        if isinstance(owner, nn.ParameterDict):
            owner[last] = fresh
        else:
            setattr(owner, last, fresh)
        for group in optimizer.param_groups:
            group["params"] = [fresh if p is param else p for p in group["params"]]


@pytest.mark.parametrize(
    ("precision", "fraction", "experts"),
    [("bf16", 0.0, False), ("bf16", 0.5, True), ("fp16", 1.0, True)],
)
def test_megatron_4046_4042_training_continues_when_params_are_replaced(
    precision, fraction, experts
):
    expected_model, expected = build(precision, fraction, experts)
    expected_losses = train(expected_model, expected, 6)

    model, optimizer = build(precision, fraction, experts)
    losses = train(model, optimizer, 2)
    replace_params(model, optimizer)
    losses += train(model, optimizer, 1, start=2)
    saved = copy.deepcopy(optimizer.state_dict())
    replace_params(model, optimizer)
    optimizer.load_state_dict(saved)
    assert set(optimizer.state) == set(model.parameters())
    losses += train(model, optimizer, 3, start=3)

    assert losses == expected_losses
    for (name, p), (_, q) in zip(
        model.named_parameters(), expected_model.named_parameters(), strict=True
    ):
        assert same_bits(p.detach(), q.detach()), name


def test_megatron_4046_hybrid_keeps_state_when_main_params_are_replaced():
    def run(replaced):
        torch.manual_seed(0)
        params = [nn.Parameter(torch.randn(5, 3)) for _ in range(4)]
        hybrid = HybridDeviceOptimizer(params, 0.5, lr=1e-2)
        for step in range(4):
            if replaced and step in (1, 2):
                for group in hybrid.param_groups:
                    group["params"] = [nn.Parameter(p.detach().clone()) for p in group["params"]]
            for group in hybrid.param_groups:
                for p in group["params"]:
                    p.grad = torch.ones_like(p) * (step + 1)
            hybrid.step()
        return [p.detach() for p in hybrid.param_groups[0]["params"]]

    assert all(same_bits(a, b) for a, b in zip(run(True), run(False), strict=True))


def test_step_adds_main_params_when_the_model_is_cast_to_bf16():
    model, optimizer = build("bf16", experts=False)
    before = model.scale.detach().clone()
    model.bfloat16()  # The parameter ``scale`` was FP32.
    train(model, optimizer, 5)
    assert model.scale.main_param.dtype == torch.float32
    assert not torch.equal(model.scale.detach().float(), before)
    model, optimizer = build("fp32", experts=False)
    model.bfloat16()
    with pytest.raises(TypeError, match="FP32Optimizer takes float32"):
        train(model, optimizer, 1)


@pytest.mark.parametrize("fraction", [0.0, 1.0])
def test_deepspeed_7948_step_writes_flat_views_without_autograd_errors(fraction):
    flat = torch.randn(10, requires_grad=True)
    params = [nn.Parameter(flat.detach()[2:8].view(2, 3)), nn.Parameter(flat.detach()[8:])]
    for param in params:
        param.grad = torch.ones_like(param)
    inner = HybridDeviceOptimizer(params, fraction, lr=0.1)
    optimizer = Float16OptimizerWithFloat16Params(inner, config_for("fp32"))
    before = flat.detach().clone()
    with torch.enable_grad():
        assert optimizer.step().success
    stepped = [
        p for sub in inner.sub_optimizers for group in sub.param_groups for p in group["params"]
    ]
    assert len(stepped) == 2 and not any(p.requires_grad or p.grad_fn for p in stepped)
    assert not torch.equal(flat.detach()[2:], before[2:])
    assert torch.equal(flat.detach()[:2], before[:2])
    (flat * 2).sum().backward()  # Autograd still accepts the buffer.


def test_load_state_dict_refuses_state_without_main_params():
    model, optimizer = build("bf16", 0.5, experts=False)
    plain = torch.optim.AdamW(list(model.named_parameters()))
    model(tokens_of(0)).backward()
    plain.step()
    with pytest.raises(ValueError, match="master_param is missing"):
        optimizer.load_state_dict(
            {**plain.state_dict(), "param_groups": optimizer.state_dict()["param_groups"]}
        )


def test_hybrid_optimizer_calls_the_closure_once_per_step():
    params = [nn.Parameter(torch.ones(2)) for _ in range(3)]
    calls = []

    def closure():
        calls.append(1)
        for p in params:
            p.grad = torch.ones(2)
        return torch.tensor(7.0)

    assert HybridDeviceOptimizer(params, 0.5, lr=0.1).step(closure) == 7.0 and len(calls) == 1
