"""``reference`` equals numpy to the bit, and FP64 and torch within the tolerance of
docs/numerics.md."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from lab.any_program.arithmetic import MOMENTS, Array, State, stepped, stored
from lab.any_program.arithmetic import sum_of_squares as summed
from mp_optim.core import Slot, SlotUpdate
from mp_optim.kernels import choose_backend, sums
from mp_optim.kernels import chunking as batching
from mp_optim.kernels.sums import sum_of_squares
from mp_optim.rules.fused import FusedAdam, FusedLAMB
from mp_optim.rules.rule_optimizer import RuleOptimizer

# Tolerance in units of lr = 1e-2, where an ulp of |p| < 4 is 2.4e-5. A hundred steps round p a
# hundred times (twice with decay), and roundings add up like a random walk. Measured: reference
# 3.2e-4 (LAMB 1.7e-4), torch 8.1e-4.
FP64_TOLERANCE = {"reference": 1e-3, "torch": 2e-3}
# A scalar, an empty tensor, less and more than a block, and more than a batch.
SHAPES: list[tuple[int, ...]] = [(), (0,), (7,), (33, 31), (1025,), (3, 45000)]


def tensors(seed: int, scale: float = 1.0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator) * scale for shape in SHAPES]


def run(
    optimizer: RuleOptimizer,
    steps: int,
    dtype: torch.dtype = torch.float32,
    multiplier: float = 0.3,
) -> None:
    for step in range(steps):
        updates = [
            SlotUpdate(Slot(0, i), g.to(dtype), float(np.float32(multiplier)))
            for i, g in enumerate(tensors(100 + step, 0.1))
        ]
        optimizer.step_slots(updates)


def bits(values: Any) -> bytes:
    array: np.ndarray[Any, Any] = np.ascontiguousarray(values, dtype=np.float32)
    return array.tobytes()


BF16 = {"exp_avg_dtype": torch.bfloat16, "exp_avg_sq_dtype": torch.bfloat16}
SETTINGS: list[tuple[str, dict[str, Any]]] = [
    ("adam", {"weight_decay": 0.1}),
    ("adam", {"adam_w_mode": False, "weight_decay": 0.1}),
    ("adam", {"bias_correction": False}),
    ("adam", BF16),
    ("lamb", {}),
    ("lamb", {"adam_w_mode": False}),
    ("lamb", {"grad_averaging": False}),
    ("lamb", {"weight_decay": 0.0}),
    ("lamb", {"weight_decay": 0.0, "use_nvlamb": True}),
    ("sgd", {"weight_decay": 0.01}),
    ("sgd", {"weight_decay": 0.01, "momentum": 0.9, "dampening": 0.1}),
    ("sgd", {"weight_decay": 0.01, "momentum": 0.9, "nesterov": True}),
    ("lion", {"weight_decay": 0.0}),
    ("lion", {"weight_decay": 0.1}),
]


@pytest.mark.parametrize(("rule", "extra"), SETTINGS)
def test_reference_rules_equal_numpy_to_the_bit(rule, extra):
    """A step uses unrounded moments, and the next step starts from the rounded moments."""
    form, mains = "bfloat16" if extra == BF16 else "float32", tensors(0)
    optimizer = RuleOptimizer(rule, mains, lr=3e-3, **extra)
    moments = MOMENTS[rule] if rule != "sgd" or "momentum" in extra else ()
    expected: list[tuple[Array, State]] = []
    for main in mains:
        zeros = np.zeros(main.numel(), np.float32)
        state = {name: stored(zeros, form, name == "exp_avg_sq") for name in moments}
        expected.append((main.numpy().flatten(), state))
    run(optimizer, 3, torch.bfloat16)
    for step in range(3):
        for i, grad in enumerate(tensors(100 + step, 0.1)):
            g = grad.bfloat16().float().numpy().flatten()
            expected[i] = stepped(
                rule, expected[i][0], g, expected[i][1], step + 1, optimizer.param_groups[0], 0.3
            )
    for i, (param, state) in enumerate(expected):
        kept = optimizer.slot_state(Slot(0, i))
        assert bits(mains[i]) == bits(param), SHAPES[i]
        assert kept.pop("step") == 3 and set(kept) == set(moments)
        assert all(bits(kept[name].float()) == bits(state[name].values()) for name in moments)


@pytest.mark.parametrize("cls", [FusedAdam, FusedLAMB])
def test_step_has_same_bits_for_any_batch_size(cls, monkeypatch):
    results = []
    for piece in (1 << 10, 1 << 13, 1 << 17, 1 << 24):
        for module in (batching, sums):
            monkeypatch.setattr(module, "piece_elements", lambda device, piece=piece: piece)
        mains = tensors(0)
        run(cls(mains, weight_decay=0.1), 2)
        results.append([bits(main) for main in mains])
    assert all(result == results[0] for result in results)


def test_sgd_rounds_bf16_output_to_nearest_even_for_strided_tensors():
    main = torch.tensor([[1 + 2**-8, 1 + 3 * 2**-8], [2.0, -1 - 2**-8]])
    before = main + 1.0
    output = torch.empty(2, 2, dtype=torch.bfloat16).t().copy_(before)
    grad = torch.ones(4, 2, dtype=torch.bfloat16)[::2]
    RuleOptimizer("sgd", [before], lr=1.0).step_slots([SlotUpdate(Slot(0, 0), grad, 1.0, output)])
    assert output.tolist() == [[1.0, 1 + 2**-6], [2.0, -1.0]]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_sum_of_squares_adds_in_the_documented_order(dtype):
    strided = [torch.randn(700, 500).t(), torch.randn(1, 300, 2, 900).transpose(1, 3)]
    values = [t.to(dtype) for t in (*tensors(5), *strided)]
    expected = [summed(v.double().numpy().flatten()) for v in values]
    assert sum_of_squares(values).tolist() == expected
    loose = choose_backend("torch", torch.device("cpu"))[0].sum_of_squares(values).tolist()
    assert loose == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_sum_of_squares_is_nan_or_inf_when_an_element_is_nan_or_inf(bad):
    big, small = torch.ones(300_000), torch.ones(3)
    big[-1] = bad
    found = sum_of_squares([big, small]).tolist()
    assert math.isnan(found[0]) if math.isnan(bad) else found[0] == math.inf
    assert found[1] == 3.0


def fp64_adam(
    p: Tensor, m: Tensor, v: Tensor, g: Tensor, t: int, h: dict[str, Any], lamb: bool
) -> None:
    b1, b2 = h["betas"]
    m.mul_(b1).add_(g * (1 - b1))
    v.mul_(b2).add_(g * g * (1 - b2))
    u = (m / (1 - b1**t)) / ((v / (1 - b2**t)).sqrt() + h["eps"])
    if lamb:
        u += h["weight_decay"] * p
        p -= h["lr"] * p.norm() / u.norm() * u
    else:
        p -= h["lr"] * (u + h["weight_decay"] * p)


@pytest.mark.parametrize("backend", ["reference", "torch"])
@pytest.mark.parametrize("cls", [FusedAdam, FusedLAMB])
def test_fused_optimizer_stays_close_to_fp64_for_100_steps(cls, backend):
    generator = torch.Generator().manual_seed(0)
    main = torch.randn(4096, generator=generator)
    exact, m, v = main.double(), torch.zeros(4096).double(), torch.zeros(4096).double()
    optimizer = cls([main], lr=1e-2, weight_decay=0.01, backend=backend)
    for step in range(1, 101):
        grad = torch.randn(4096, generator=generator) * 0.1
        optimizer.step_slots([SlotUpdate(Slot(0, 0), grad)])
        fp64_adam(exact, m, v, grad.double(), step, optimizer.param_groups[0], cls is FusedLAMB)
    error = float((main - exact).abs().max()) / 1e-2
    assert error < FP64_TOLERANCE[backend]
