"""NorMuon's second moment against its formula in numpy, with edge cases and refused settings."""

import re

import numpy as np
import pytest
import torch
from torch import nn

import mp_optim
from mp_optim import OptimizerConfig, get_megatron_optimizer
from mp_optim.config.rules import coefficients, scale_factor
from mp_optim.muon.muon import MuonRule
from mp_optim.rules.rule_optimizer import RuleOptimizer

SETTINGS = {"lr": 0.1, "weight_decay": 0.0, "fp32_matmul_prec": "highest"}
NORMUON = {**SETTINGS, "moment2_method": "normuon", "beta2": 0.8}
MOMENT = "moment2_buffer"


def random(*shape, seed=0):
    value = torch.randn(*shape, generator=torch.Generator().manual_seed(seed))
    return value * torch.logspace(-2, 2, shape[-2])[:, None]


def stepped(value, grads, **settings):
    param = nn.Parameter(value.clone())
    optimizer = RuleOptimizer(MuonRule(), [param], **{**NORMUON, **settings})
    for grad in grads:
        param.grad = grad.clone()
        optimizer.step()
    return param.detach(), optimizer


def orthogonal(matrix):
    wide = matrix if matrix.shape[0] <= matrix.shape[1] else matrix.T
    x = wide / np.linalg.norm(wide)
    for a, b, c in coefficients("quintic", 5):
        x = a * x + (b * (x @ x.T) + c * (x @ x.T) @ (x @ x.T)) @ x
    return x if wide is matrix else x.T


def even_rows(x, v, beta2):
    new = (v * beta2 + np.mean(x * x, axis=-1) * (1 - beta2)).astype(np.float32)
    even = x / (np.sqrt(new.astype(np.float64)) + 1e-8)[..., None]
    before, after = (np.sqrt(np.sum(each * each, (-2, -1))) for each in (x, even))
    kept = np.where(after == 0, 0, before / np.where(after == 0, 1, after))
    return even * kept[..., None, None], new


@pytest.mark.parametrize("backend", ["native", "reference"])
@pytest.mark.parametrize(
    "shape", [(12, 20), (20, 12), (7, 300), (1, 9), (9, 1), (3, 8, 5)], ids=str
)
def test_normuon_matches_a_numpy_formula_for_each_shape_and_backend(shape, backend):
    grads = [random(*shape, seed=1 + step) for step in range(5)]
    found, optimizer = stepped(random(*shape), grads, backend=backend)
    p = random(*shape).double().numpy()
    m, v = np.zeros_like(p), np.zeros(shape[:-1], np.float32)
    for grad in grads:
        m = m + (grad.double().numpy() - m) * 0.05
        stack = m.reshape(-1, *shape[-2:])
        x = np.stack([orthogonal(matrix) for matrix in stack]).reshape(shape)
        even, v = even_rows(x, v, NORMUON["beta2"])
        p = p - even * 0.1 * scale_factor("spectral", *shape[-2:])
    np.testing.assert_allclose(found.numpy(), p, rtol=0, atol=2e-5 * np.abs(p).max())
    (state,) = optimizer.state.values()
    np.testing.assert_allclose(state[MOMENT][..., 0].numpy(), v, rtol=1e-4)


@pytest.mark.parametrize("precision", ["medium", "highest"])
def test_normuon_normalizes_q_k_and_v_separately_when_a_weight_is_fused(precision):
    value, grads = random(16, 6), [random(16, 6, seed=step) for step in range(1, 4)]
    how = {"fp32_matmul_prec": precision}
    whole, _ = stepped(value, grads, qkv_split_shapes=(4, 2, 2), **how)
    for part in ([0, 1, 2, 3, 8, 9, 10, 11], [4, 5, 12, 13], [6, 7, 14, 15]):
        alone, _ = stepped(value[part], [grad[part] for grad in grads], **how)
        assert torch.equal(whole[part], alone)
    assert not torch.equal(whole, stepped(value, grads, **how)[0])


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"moment2_method": "nurmuon"}, "moment2_method='nurmuon': must be one of"),
        ({"tp_mode": "blockwise"}, "moment2_method='normuon': needs whole rows of matrices"),
        ({"beta2": 1.0}, "beta2=1.0: must be"),
    ],
)
def test_muon_rule_refuses_invalid_normuon_settings_by_name(settings, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        RuleOptimizer(MuonRule(), [nn.Parameter(torch.zeros(2, 3))], **{**NORMUON, **settings})


def test_muon_refuses_normuon_when_turned_on_after_a_step():
    param = nn.Parameter(random(4, 6))
    optimizer = RuleOptimizer(MuonRule(), [param], **SETTINGS)
    param.grad = random(4, 6, seed=1)
    optimizer.step()
    optimizer.param_groups[0] |= {"moment2_method": "normuon", "beta2": 0.9}
    with pytest.raises(
        ValueError, match=rf"stepped without {MOMENT}, which moment2_method='normuon'"
    ):
        optimizer.step()


def test_load_refuses_a_normuon_moment_with_negative_elements():
    _, optimizer = stepped(random(4, 6), [random(4, 6, seed=1)])
    saved = optimizer.state_dict()
    saved["state"][0][MOMENT] = saved["state"][0][MOMENT] - 1.0
    with pytest.raises(ValueError, match=f"{MOMENT}: has negative elements"):
        optimizer.load_state_dict(saved)


def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 12), nn.Linear(12, 4)).bfloat16()


def trained(net, optimizer, steps):
    for step in steps:
        for index, param in enumerate(net.parameters()):
            shape = (1, *param.shape) if param.dim() < 2 else param.shape
            param.grad = random(*shape, seed=10 * step + index).view(param.shape).bfloat16()
        optimizer.step()
    return [param.detach().clone() for param in net.parameters() if param.dim() > 1]


@pytest.mark.parametrize(
    "offload", [{}, {"optimizer_cpu_offload": True, "optimizer_offload_fraction": 0.5}]
)
def test_normuon_trains_alike_when_built_by_config_built_by_class_or_resumed(offload, tmp_path):
    fields = {
        "muon_moment2_method": "normuon",
        "muon_beta2": 0.8,
        "muon_coefficient_type": "simple",
    }
    config = OptimizerConfig(
        **{"optimizer": "muon", "lr": 0.01, "weight_decay": 0.1, "bf16": True, "clip_grad": 0.0},
        **{"muon_use_nesterov": True, "muon_scale_mode": "shape_scaling", **fields, **offload},
    )
    net = model()
    stack = get_megatron_optimizer(config, net)
    first, after = trained(net, stack, range(3)), None
    mp_optim.checkpoint.save(tmp_path / "saved", net, stack)
    after = trained(net, stack, range(3, 6))
    again = model()
    resumed = get_megatron_optimizer(config, again)
    mp_optim.checkpoint.load(tmp_path / "saved", again, resumed)
    assert all(map(torch.equal, first, trained(again, resumed, ())))
    assert all(map(torch.equal, after, trained(again, resumed, range(3, 6))))
    plain = model()
    torch_shaped = mp_optim.Muon(
        plain.named_parameters(), lr=0.01, moment2_method="normuon", beta2=0.8
    )
    assert all(map(torch.equal, after, trained(plain, torch_shaped, range(6))))


def test_load_names_the_normuon_moment_when_a_checkpoint_lacks_the_moment(tmp_path):
    nets = [model(), model()]
    without, wants = (
        get_megatron_optimizer(
            OptimizerConfig(optimizer="muon", lr=0.01, bf16=True, muon_moment2_method=method), net
        )
        for net, method in zip(nets, (None, "normuon"), strict=True)
    )
    trained(nets[0], without, range(1))
    mp_optim.checkpoint.save(tmp_path / "saved", nets[0], without)
    with pytest.raises(ValueError, match=MOMENT):
        mp_optim.checkpoint.load(tmp_path / "saved", nets[1], wants)
