"""Optimizers of other packages train and resume below the wrappers as they do alone.

Many of these optimizers write into their param groups: Prodigy, D-Adaptation, and all that count
steps in a group."""

import copy
from functools import partial

import pytest
import torch
from torch import nn

from mp_optim import (
    Adafactor,
    Float16OptimizerWithFloat16Params,
    FP32Optimizer,
    HybridDeviceOptimizer,
    checkpoint,
)
from support.models import config_for, same_bits

pytestmark = pytest.mark.usefixtures("one_thread")


registry = pytest.importorskip("pytorch_optimizer")

OF_GROUPS = ("prodigy", "asgd")
"""Optimizers whose steps depend on values that they write into a group, besides a count."""
OTHERS = ("came", "shampoo")
"""Optimizers with several moments, factored or matrix state, or scalars per parameter."""
STEPS = 6


def model_of(dtype):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4)).to(dtype)


def alone(name, params):
    return registry.load_optimizer(name)(params, lr=rate(name))


def rate(name):
    return 1.0 if name.startswith(("prodigy", "dadapt")) else 1e-2


def on_the_host(name, params):
    cls = registry.load_optimizer(name)
    return HybridDeviceOptimizer(params, 1.0, cls, cls, param_update_in_fp32=True, lr=rate(name))


def wrapped(inner, dtype):
    if dtype == torch.float32:
        return FP32Optimizer(inner, config_for("fp32", clip_grad=0.0))
    config = config_for("bf16", clip_grad=0.0)
    return Float16OptimizerWithFloat16Params(inner, config, None)


def train(optimizer, model, steps):
    losses = []
    for step in steps:
        generator = torch.Generator().manual_seed(step)
        batch = torch.randn(16, 8, generator=generator)
        dtype = next(model.parameters()).dtype
        out = model(batch.to(dtype)).float()
        loss = (out - 3 * batch[:, :4].sin()).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, [param.detach().clone() for param in model.parameters()]


def are_same(one, other):
    return one[0] == other[0] and all(map(same_bits, one[1], other[1]))


def built(name, dtype=torch.float32, place=alone):
    model = model_of(dtype)
    return wrapped(place(name, list(model.parameters())), dtype), model


@pytest.mark.parametrize("place", [alone, on_the_host])
@pytest.mark.parametrize("name", OF_GROUPS + OTHERS)
def test_foreign_optimizer_has_equal_bits_wrapped_and_alone(name, place):
    plain = model_of(torch.float32)
    expected = train(alone(name, list(plain.parameters())), plain, range(STEPS))
    optimizer, model = built(name, place=place)
    assert are_same(train(optimizer, model, range(STEPS)), expected)
    assert expected[0][-1] != expected[0][0]


@pytest.mark.parametrize("name", OF_GROUPS + OTHERS)
def test_foreign_optimizer_follows_its_fp32_losses_on_a_bf16_model(name):
    plain = model_of(torch.float32)
    expected, _ = train(alone(name, list(plain.parameters())), plain, range(STEPS))
    losses, _ = train(*built(name, torch.bfloat16), range(STEPS))
    assert losses == pytest.approx(expected, rel=0.03)


@pytest.mark.parametrize(
    ("way", "dtype"), [("state dict", torch.float32), ("checkpoint", torch.bfloat16)], ids=str
)
@pytest.mark.parametrize("name", OF_GROUPS + OTHERS)
def test_foreign_optimizer_resumes_with_equal_bits_from_each_save_format(
    name, dtype, way, tmp_path
):
    optimizer, model = built(name, dtype)
    train(optimizer, model, range(STEPS))
    weights = copy.deepcopy(model.state_dict())
    state = copy.deepcopy(optimizer.state_dict())
    checkpoint.save(tmp_path, model, optimizer)
    expected = train(optimizer, model, range(STEPS, STEPS + 3))
    optimizer, model = built(name, dtype)
    if way == "state dict":
        model.load_state_dict(weights)
        optimizer.load_state_dict(state)
    else:
        checkpoint.load(tmp_path, model, optimizer)
    assert are_same(train(optimizer, model, range(STEPS, STEPS + 3)), expected)


@pytest.mark.parametrize(
    "cls",
    [torch.optim.Adafactor, registry.StableAdamW, registry.AdEMAMix],
    ids=lambda cls: cls.__name__,
)
def test_foreign_optimizer_has_equal_bits_in_every_placement(cls, tmp_path):
    """The placements are the device, half and whole offload, each resumed in another placement."""

    def built_at(fraction, mode):
        model = model_of(torch.bfloat16)
        params = list(model.named_parameters())
        if fraction is None:
            return wrapped(cls(params, lr=1e-2), torch.bfloat16), model
        how = {"param_update_in_fp32": True, "offload_mode": mode}
        inner = HybridDeviceOptimizer(params, fraction, cls, cls, **how, lr=1e-2)
        return wrapped(inner, torch.bfloat16), model

    places = [(None, ""), (0.5, "sync"), (1.0, "sync"), (0.5, "overlap"), (1.0, "overlap")]
    runs = []
    for at, place in enumerate(places):
        optimizer, model = built_at(*place)
        train(optimizer, model, range(3))
        checkpoint.save(tmp_path / str(at), model, optimizer)
        optimizer, model = built_at(*places[at - 1])
        checkpoint.load(tmp_path / str(at), model, optimizer)
        runs.append(train(optimizer, model, range(3, STEPS)))
    assert all(are_same(run, runs[0]) for run in runs[1:])
    assert len(set(runs[0][0])) == STEPS - 3


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("offload", [0.0, 0.5, 1.0])
def test_adafactor_matches_torch_bits_for_every_offload_fraction(dtype, offload):
    settings = {"lr": 2e-2, "weight_decay": 0.1, "d": 2.0}
    plain = model_of(dtype)
    inner = torch.optim.Adafactor(list(plain.parameters()), **settings)
    expected = train(
        inner if dtype == torch.float32 else wrapped(inner, dtype), plain, range(STEPS)
    )
    model = model_of(dtype)
    optimizer = Adafactor(model.parameters(), **settings, offload=offload)
    assert are_same(train(optimizer, model, range(STEPS)), expected)


def test_foreign_settings_are_copied_between_inner_and_outer_groups():
    optimizer, model = built("prodigy")
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    for step in range(3):
        train(optimizer, model, [step])
        scheduler.step()
    outer, inner = optimizer.param_groups[0], optimizer.optimizer.param_groups[0]
    train(optimizer, model, [3])
    assert outer["lr"] == inner["lr"] == 0.125
    assert outer["step"] == inner["step"] == 5  # The count begins with 1.
    assert outer["d"] == inner["d"] > outer["d0"]
    outer["growth_rate"] = 1.0
    train(optimizer, model, [4])
    assert inner["growth_rate"] == 1.0 and inner["d"] == outer["d"]


def test_hybrid_optimizer_refuses_prodigy_that_adapts_different_rates_on_host_and_device():
    model = model_of(torch.float32)
    cls = registry.Prodigy
    optimizer = HybridDeviceOptimizer(list(model.parameters()), 0.5, cls, cls, lr=1.0)
    refusal = r"param group 0: the rule has set d_.* on the host.*offload_fraction"
    with pytest.raises(ValueError, match=refusal):
        train(optimizer, model, range(STEPS))


@pytest.mark.parametrize("place", [alone, on_the_host])
def test_wrapper_refuses_a_schedule_free_optimizer(place):
    with pytest.raises(TypeError, match=r"has separate weights for evaluation \(train\(\), eval"):
        built("schedulefreeadamw", place=place)


@pytest.mark.parametrize(
    ("name", "what"),
    [("aggmo", "dict"), ("kron", "str"), ("conda", "Projector"), ("madgrad", "'k'")],
)
def test_foreign_state_that_cannot_be_saved_is_refused_by_name(name, what, tmp_path):
    optimizer, model = built(name)
    train(optimizer, model, range(2))
    for leave in (optimizer.state_dict, partial(checkpoint.save, tmp_path, model, optimizer)):
        with pytest.raises(TypeError, match=what):
            leave()
    train(optimizer, model, range(2, 4))
