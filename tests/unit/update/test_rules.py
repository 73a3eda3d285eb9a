"""The rules against independent texts: numpy in FP32 (bits), FP64 (tolerance), torch (tolerance)."""

import math

import numpy as np
import pytest
import torch
from torch import nn

from mp_optim import SGD, FusedAdam, FusedLAMB
from mp_optim.update import batches as batches_module
from mp_optim.update.backends import choose_backend
from mp_optim.update.sums import sum_of_squares

F = np.float32
LR = 1e-2


def gradients(step, n):
    generator = torch.Generator().manual_seed(step)
    return torch.randn(n, generator=generator) * 10.0 ** float(torch.randint(-3, 2, (), generator=generator))


def start(n):
    return torch.randn(n, generator=torch.Generator().manual_seed(99))


def run(build, n=5000, steps=5):
    param = nn.Parameter(start(n).clone())
    optimizer = build([param])
    for step in range(steps):
        param.grad = gradients(step, n)
        optimizer.step()
    return param.detach().clone(), optimizer


@pytest.mark.parametrize("decoupled", [True, False])
def test_adam_equals_the_numpy_text_bit_for_bit(decoupled):
    found, _ = run(lambda ps: FusedAdam(ps, lr=LR, weight_decay=0.1, adam_w_mode=decoupled))
    p, m, v = start(5000).numpy().copy(), np.zeros(5000, F), np.zeros(5000, F)
    for t in range(1, 6):
        g = gradients(t - 1, 5000).numpy()
        if not decoupled:
            g = g + p * F(0.1)
        m = m * F(0.9) + g * F(1 - 0.9)
        v = v * F(0.999) + (g * F(1 - 0.999)) * g
        d = np.sqrt(v) * F(1 / math.sqrt(1 - 0.999**t)) + F(1e-8)
        u = (m / d) * F(LR / (1 - 0.9**t))
        if decoupled:
            p = p - p * F(LR * 0.1)
        p = p - u
    assert np.array_equal(found.numpy().view(np.int32), p.view(np.int32))


@pytest.mark.parametrize("nesterov", [True, False])
def test_sgd_equals_the_numpy_text_bit_for_bit(nesterov):
    found, _ = run(lambda ps: SGD(ps, lr=LR, momentum=0.9, weight_decay=0.1, nesterov=nesterov))
    p, b = start(5000).numpy().copy(), None
    for t in range(5):
        g = gradients(t, 5000).numpy() + p * F(0.1)
        b = g if b is None else b * F(0.9) + g * F(1.0)
        p = p - (g + b * F(0.9) if nesterov else b) * F(LR)
    assert np.array_equal(found.numpy().view(np.int32), p.view(np.int32))


def oracle(rule, steps, n=2000, wd=0.1):
    p, m, v = start(n).double(), torch.zeros(n).double(), torch.zeros(n).double()
    for t in range(1, steps + 1):
        g = gradients(t - 1, n).double()
        m, v = 0.9 * m + 0.1 * g, 0.999 * v + 0.001 * g * g
        u = (m / (1 - 0.9**t)) / ((v / (1 - 0.999**t)).sqrt() + 1e-8) + wd * p
        p = p - u * (LR * float(p.norm() / u.norm()) if rule == "lamb" else LR)
    return p


@pytest.mark.parametrize("backend", ["reference", "torch"])
def test_adam_stays_near_the_double_oracle(backend):
    found, _ = run(lambda ps: FusedAdam(ps, lr=LR, weight_decay=0.1, backend=backend), 2000, 100)
    bound = {"reference": 1e-3, "torch": 1e-2}[backend]
    assert (found.double() - oracle("adam", 100)).abs().max() <= bound * LR


def test_lamb_stays_near_the_double_oracle():
    found, _ = run(lambda ps: FusedLAMB(ps, lr=LR, eps=1e-8, weight_decay=0.1, max_grad_norm=0.0), 2000, 100)
    expected = oracle("lamb", 100)
    assert (found.double() - expected).abs().max() <= 1e-4 * expected.abs().max()


def test_adam_stays_near_torch_fused():
    found, _ = run(lambda ps: FusedAdam(ps, lr=LR, weight_decay=0.1), 2000, 100)
    expected, _ = run(lambda ps: torch.optim.AdamW(ps, lr=LR, weight_decay=0.1, fused=True), 2000, 100)
    assert (found - expected).abs().max() <= 1e-2 * LR


@pytest.mark.parametrize("rule", [FusedAdam, FusedLAMB, lambda ps: SGD(ps, lr=LR, momentum=0.9)])
def test_batching_changes_no_bit(rule, monkeypatch):
    expected, _ = run(rule)
    for limit in (1, 7, 1024, 1 << 20):
        if limit == 1:
            monkeypatch.setattr(batches_module, "piece_elements", lambda _: 333)
        else:
            monkeypatch.setattr(batches_module, "piece_elements", lambda _, limit=limit: limit)
        found, _ = run(rule)
        assert torch.equal(found, expected)


def test_lamb_clips_by_the_global_norm_and_zero_turns_it_off():
    def moved(limit):
        params = [nn.Parameter(torch.ones(4)), nn.Parameter(torch.ones(4))]
        optimizer = FusedLAMB(params, lr=LR, max_grad_norm=limit)
        for p in params:
            p.grad = torch.full((4,), 3.0)
        optimizer.step()
        return optimizer.state[params[0]]["exp_avg"]

    assert torch.allclose(moved(0.0), torch.full((4,), 0.3))
    assert torch.allclose(moved(1.0), torch.full((4,), 0.3 / math.sqrt(72)))


def test_lamb_without_decay_adapts_only_with_nvlamb():
    def ratio(**settings):
        param = nn.Parameter(torch.full((4,), 10.0))
        param.grad = torch.ones(4)
        FusedLAMB([param], lr=LR, max_grad_norm=0.0, weight_decay=0.0, **settings).step()
        return float(10.0 - param[0])

    assert ratio() == pytest.approx(LR, rel=1e-3)
    assert ratio(use_nvlamb=True) == pytest.approx(LR * 10, rel=1e-3)


@pytest.mark.parametrize("n", [0, 1, 1023, 1024, 1025, 5000, 131072, 131073, 400_000])
def test_sum_of_squares_has_the_documented_order(n):
    values = start(n) if n else torch.zeros(0)
    squares = values.double().numpy() ** 2
    blocks = np.concatenate([squares, np.zeros(-len(squares) % 1024)]).reshape(-1, 1024)
    while blocks.shape[1] > 1:
        half = blocks.shape[1] // 2
        blocks = blocks[:, :half] + blocks[:, half:]
    sums = blocks[:, 0] if n else np.zeros(1)
    while len(sums) > 1:
        sums = np.concatenate([sums, np.zeros(len(sums) % 2)])
        sums = sums[0::2] + sums[1::2]
    assert float(sum_of_squares([values])) == float(sums[0])


def test_sum_of_squares_of_many_dtypes_and_layouts():
    tensors = [torch.ones(3, dtype=torch.bfloat16), torch.full((2, 2), 2.0, dtype=torch.float16).t(),
               torch.tensor(3.0, dtype=torch.float64), torch.empty(0), torch.tensor([1e30]),
               torch.tensor([math.inf]), torch.tensor([math.nan])]
    for backend in ("reference", "torch"):
        found = choose_backend(backend, torch.device("cpu"))[0].sum_of_squares(tensors).tolist()
        assert found[:4] == pytest.approx([3.0, 16.0, 9.0, 0.0], rel=1e-15) and found[4] == pytest.approx(1e60, rel=1e-6)
        assert math.isinf(found[5]) and math.isnan(found[6])


def test_unknown_backend_and_bad_settings_are_named():
    with pytest.raises(ValueError, match="fused_backend='cuda'"):
        FusedAdam([nn.Parameter(torch.ones(1))], backend="cuda")
    for settings in ({"lr": -1.0}, {"betas": (1.0, 0.9)}, {"eps": -1.0}, {"weight_decay": -1.0}):
        with pytest.raises(ValueError, match=next(iter(settings))):
            FusedAdam([nn.Parameter(torch.ones(1))], **settings)
    with pytest.raises(ValueError, match="nesterov"):
        SGD([nn.Parameter(torch.ones(1))], nesterov=True)


def test_standalone_needs_fp32_dense_gradients():
    half = nn.Parameter(torch.ones(2, dtype=torch.bfloat16))
    half.grad = torch.ones(2, dtype=torch.bfloat16)
    with pytest.raises(TypeError, match=r"group0\.param0 is torch\.bfloat16"):
        FusedAdam([half]).step()


def test_a_tensor_learning_rate_is_obeyed():
    found, _ = run(lambda ps: FusedAdam(ps, lr=torch.tensor(LR, dtype=torch.float64)))
    expected, _ = run(lambda ps: FusedAdam(ps, lr=LR))
    assert torch.equal(found, expected)
