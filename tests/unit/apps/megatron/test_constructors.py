"""Megatron's optimizer classes accept Megatron's constructor arguments."""

import copy
from typing import Any

import pytest
import torch
from torch import nn

import mp_optim
from support.models import TinyMoE, same_bits, tokens_of, train

core = pytest.importorskip("megatron.core.optimizer")
from megatron.core.optimizer import grad_scaler as scalers  # noqa: E402

from mp_optim.apps import megatron  # noqa: E402


@pytest.mark.parametrize("half", ["fp16", "bf16"])
def test_float16_optimizer_trains_alike_with_a_config_of_megatron_and_our_config(half):
    dtype = {"fp16": torch.float16, "bf16": torch.bfloat16}[half]
    scaler = megatron.ConstantGradScaler(64.0) if half == "fp16" else None
    model, other = TinyMoE(dtype, experts=False), TinyMoE(dtype, experts=False)
    config = core.OptimizerConfig(clip_grad=0.5, **{half: True})  # Megatron's config needs no lr
    wrapped = megatron.Float16OptimizerWithFloat16Params(
        torch.optim.AdamW(model.parameters(), lr=1e-2), config, scaler, None
    )
    ours = mp_optim.Float16OptimizerWithFloat16Params(
        torch.optim.AdamW(other.parameters(), lr=1e-2),
        mp_optim.OptimizerConfig(lr=1e-2, clip_grad=0.5, **{half: True}),
        scaler,
    )
    assert isinstance(wrapped, megatron.Float16OptimizerWithFloat16Params)
    assert train(model, wrapped, 6) == train(other, ours, 6)


def test_fp32_optimizer_with_megatron_config_steps_like_torch_sgd():
    model, other = nn.Linear(3, 3), nn.Linear(3, 3)
    other.load_state_dict(model.state_dict())
    config = core.OptimizerConfig(lr=1e-2, clip_grad=0.0)
    wrapped = megatron.FP32Optimizer(torch.optim.SGD(model.parameters(), lr=1e-2), config, None)
    plain = torch.optim.SGD(other.parameters(), lr=1e-2)
    for net, optimizer in ((model, wrapped), (other, plain)):
        net(torch.ones(2, 3)).square().sum().backward()
        optimizer.step()
    torch.testing.assert_close(model.weight, other.weight)


def dynamic(scale: float, growth: int, hysteresis: int) -> Any:
    scaler = scalers.DynamicGradScaler.__new__(scalers.DynamicGradScaler)
    numbers = {"_scale": scale, "min_scale": 1.0}
    numbers |= {"growth_factor": 2.0, "backoff_factor": 0.5}
    for name, value in numbers.items():
        setattr(scaler, name, torch.tensor([value]))
    scaler.growth_interval, scaler.hysteresis = 3, 2
    scaler._growth_tracker, scaler._hysteresis_tracker = growth, hysteresis
    return scaler


def test_float16_optimizer_updates_the_loss_scale_like_a_given_megatron_grad_scaler():
    for found_inf, expected in ((False, 2048.0), (True, 512.0)):
        theirs = dynamic(1024.0, growth=2, hysteresis=1)
        model = TinyMoE(torch.float16, experts=False)
        optimizer = megatron.Float16OptimizerWithFloat16Params(
            torch.optim.AdamW(model.parameters(), lr=1e-3),
            core.OptimizerConfig(lr=1e-3, fp16=True),
            theirs,
            None,
        )
        optimizer.scale_loss(model(tokens_of(0))).backward()
        if found_inf:
            model.dense.grad.fill_(float("inf"))
        optimizer.step()
        theirs.update(found_inf)
        assert optimizer.get_loss_scale().item() == theirs.scale.item() == expected


def test_float16_optimizer_names_an_unknown_grad_scaler_class():
    unknown = copy.copy(dynamic(1.0, 0, 1))
    unknown.__class__ = type("Elastic", (scalers.DynamicGradScaler,), {})
    with pytest.raises(TypeError, match="grad_scaler is a Elastic"):
        megatron.Float16OptimizerWithFloat16Params(
            torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=1.0),
            core.OptimizerConfig(fp16=True),
            unknown,
        )


def test_chained_optimizer_reports_one_norm_of_all_parts():
    model = TinyMoE(torch.bfloat16, experts=False)
    params, config = list(model.parameters()), core.OptimizerConfig(lr=1e-2, bf16=True)
    parts = [
        megatron.Float16OptimizerWithFloat16Params(
            torch.optim.AdamW(some, lr=1e-2), config, None, None
        )
        for some in (params[:2], params[2:])
    ]
    chain = megatron.ChainedOptimizer(parts)
    assert chain.get_parameters() == params
    model(tokens_of(0)).backward()
    expected = sum(p.grad.double().square().sum() for p in params).sqrt().item()
    assert chain.step()[1] == pytest.approx(expected, rel=1e-12)
    with pytest.raises(TypeError, match="has a SGD; wrap it"):
        megatron.ChainedOptimizer([torch.optim.SGD(params, lr=1.0)])


def test_megatron_optimizer_is_a_stub_when_a_rank_has_no_parameters():
    config = core.OptimizerConfig(lr=1e-2, bf16=True)
    stub = megatron.Float16OptimizerWithFloat16Params(None, config, None, None)
    for nothing in (stub, megatron.ChainedOptimizer([])):
        assert nothing.is_stub_optimizer and nothing.get_parameters() == []
        assert nothing.step()[0]


def test_hybrid_optimizer_lists_fp32_copies_of_its_parameters():
    model = nn.Linear(4, 4, dtype=torch.bfloat16)
    scale = nn.Parameter(torch.ones(1))
    hybrid = megatron.HybridDeviceOptimizer(
        [*model.parameters(), scale],
        offload_fraction=1.0,
        cpu_optimizer_cls=torch.optim.Adam,
        gpu_optimizer_cls=torch.optim.Adam,
        param_update_in_fp32=True,
        pin_cpu_grads=True,
        pin_cpu_params=True,
        overlap_cpu_optimizer_d2h_h2d=False,
        lr=1e-3,
    )
    (model(torch.ones(2, 4).bfloat16()).float() * scale).sum().backward()
    hybrid.step()
    copies = hybrid.param_to_fp32_param
    assert set(copies) == set(model.parameters())
    assert same_bits(copies[model.weight].bfloat16(), model.weight)
    hybrid.update_fp32_param_by_new_param()
    hybrid.dummy_step()
    assert len(hybrid.state) == 3
