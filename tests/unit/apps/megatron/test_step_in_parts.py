"""Megatron programs may replace ``step`` by separate calls: ``prepare_grads``, the gradient norm,
then ``step_with_ready_grads``."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from support.models import TinyMoE, same_bits, tokens_of
from support.one_rank import one_rank

core = pytest.importorskip("megatron.core.optimizer")
from mp_optim.apps import megatron  # noqa: E402

LIMIT = 0.02
"""A clip limit below every norm in this file, so that each step is clipped."""
DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16}


def build(**settings: Any) -> tuple[nn.Module, Any]:
    settings = {"lr": 1e-2, "clip_grad": LIMIT, **settings}
    half = "fp16" if settings.get("fp16") else "bf16"
    model = TinyMoE(DTYPES[half])
    config = core.OptimizerConfig(**{half: True, **settings})
    return model, megatron.get_megatron_optimizer(config, [model])


def backward(model: nn.Module, optimizer: Any, step: int) -> None:
    optimizer.zero_grad()
    optimizer.scale_loss(model(tokens_of(step))).backward()


def by_parts(optimizer: Any) -> tuple[bool, float | None]:
    if optimizer.prepare_grads():
        return False, None
    norm = optimizer.clip_grad_norm(optimizer.config.clip_grad)
    return optimizer.step_with_ready_grads(), norm


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"clip_grad": 0.0},
        {"fp16": True, "initial_loss_scale": 2.0**40, "hysteresis": 1},
        {"fp16": True, "loss_scale": 128.0},
        {"optimizer_cpu_offload": True, "optimizer_offload_fraction": 0.5},
    ],
    ids=["clipped", "unclipped", "overflows", "constant_scale", "offloaded"],
)
def test_prepare_grads_and_step_with_ready_grads_have_the_bits_of_step(settings):
    (whole, at_once), (cut, in_parts) = build(**settings), build(**settings)
    for step in range(20):
        backward(whole, at_once, step)
        backward(cut, in_parts, step)
        success, norm, _ = at_once.step()
        assert norm is None or norm > LIMIT
        assert by_parts(in_parts) == (success, norm)
        assert at_once.get_loss_scale().item() == in_parts.get_loss_scale().item()
    for one, other in zip(whole.parameters(), cut.parameters(), strict=True):
        assert same_bits(one, other)
    assert at_once.metrics()["skipped_steps"] == in_parts.metrics()["skipped_steps"]


@pytest.mark.parametrize("half", ["fp16", "bf16"])
def test_prepare_grads_and_step_with_ready_grads_have_the_bits_of_step_when_sharded(half):
    with one_rank():
        settings = {half: True, "use_distributed_optimizer": True}
        (whole, at_once), (cut, in_parts) = build(**settings), build(**settings)
        for step in range(4):
            backward(whole, at_once, step)
            backward(cut, in_parts, step)
            success, norm, _ = at_once.step()
            assert by_parts(in_parts) == (success, norm)
            assert len(in_parts.get_grads_for_grad_norm()) == len([*cut.parameters()])
        for one, other in zip(whole.parameters(), cut.parameters(), strict=True):
            assert same_bits(one, other)


def test_get_grad_norm_and_count_zeros_equal_results_of_step():
    model, optimizer = build(log_num_zeros_in_grad=True)
    backward(model, optimizer, 0)
    assert not optimizer.prepare_grads()
    asked = optimizer.get_grad_norm(), optimizer.count_zeros()
    assert (True, *asked) == optimizer.step()


def test_get_grads_for_grad_norm_returns_unscaled_gradients():
    model = TinyMoE(torch.float16)
    model.bias.shared = True  # A shared parameter is left out of the norm.
    config = core.OptimizerConfig(lr=1e-2, fp16=True, loss_scale=128.0)
    optimizer = megatron.get_megatron_optimizer(config, [model])
    backward(model, optimizer, 0)
    grads = optimizer.get_grads_for_grad_norm()
    assert len(grads) == len(list(model.parameters())) - 1
    assert {grad.dtype for grad in grads} == {torch.float32}
    assert same_bits(grads[0], model.embed.grad.float() / 128.0)
    norm = math.sqrt(sum(grad.double().square().sum().item() for grad in grads))
    assert optimizer.step()[1] == pytest.approx(norm, rel=1e-12)


def test_grad_norms_by_group_has_the_norm_of_each_named_group():
    model = TinyMoE(torch.bfloat16)
    model.dense.grad_norm_group = "mtp"
    config = core.OptimizerConfig(lr=1e-2, bf16=True)
    optimizer = megatron.get_megatron_optimizer(config, [model])
    backward(model, optimizer, 0)
    own = model.dense.grad.double().norm().item()
    assert optimizer.has_grad_norm_group("mtp")
    assert not optimizer.has_grad_norm_group("other")
    assert len(optimizer.get_grads_for_grad_norm("mtp")) == 1
    optimizer.step()
    assert optimizer.grad_norms_by_group == {"mtp": pytest.approx(own, rel=1e-12)}


def asks(name: str) -> Callable[[Any], Any]:
    return lambda optimizer: getattr(optimizer, name)()


@pytest.mark.parametrize("name", ["get_grad_norm", "step_with_ready_grads"])
def test_calls_that_use_prepared_gradients_raise_before_prepare_grads(name):
    _, optimizer = build()
    with pytest.raises(RuntimeError, match=rf"^{name}: no gradients are prepared"):
        asks(name)(optimizer)


def test_step_with_ready_grads_refuses_gradients_that_are_not_finite():
    model, optimizer = build()
    backward(model, optimizer, 0)
    model.dense.grad.fill_(math.inf)
    before = model.dense.detach().clone()
    assert optimizer.prepare_grads()
    with pytest.raises(RuntimeError, match="no gradients are prepared"):
        optimizer.step_with_ready_grads()
    assert same_bits(before, model.dense)


def test_prepare_grads_refuses_settings_that_step_refuses():
    model, optimizer = build()
    backward(model, optimizer, 0)
    before = model.dense.detach().clone()
    taken = optimizer.param_groups[0]["params"].pop()
    with pytest.raises(ValueError, match="editing the lists"):
        optimizer.prepare_grads()
    assert same_bits(before, model.dense)
    optimizer.param_groups[0]["params"].append(taken)
    assert by_parts(optimizer)[0]


def test_step_with_ready_grads_needs_clip_grad_norm_when_clipping_is_on():
    model, optimizer = build(clip_grad=1e-3)
    backward(model, optimizer, 0)
    before = model.dense.detach().clone()
    optimizer.prepare_grads()
    with pytest.raises(RuntimeError, match="clip_grad_norm was not called"):
        optimizer.step_with_ready_grads()
    assert same_bits(before, model.dense)
    optimizer.clip_grad_norm(0.0)
    assert optimizer.step_with_ready_grads()
    assert not same_bits(before, model.dense)


def test_reload_model_params_copies_fp32_values_of_a_state_dict_into_main_params():
    model, optimizer = build()
    exact = {
        f"module.{name}": param.detach().float() * (1 + 2**-12)
        for name, param in model.named_parameters()
    }
    optimizer.reload_model_params(state_dict={"model": exact, "iteration": 3})
    mains = dict(optimizer.named_main_params())
    assert same_bits(mains["dense"], exact["module.dense"])
    with torch.no_grad():
        model.dense.mul_(0.5)
    optimizer.reload_model_params()
    mains = dict(optimizer.named_main_params())
    assert same_bits(mains["dense"], model.dense.detach().float())


def test_get_canonical_lr_for_logging_returns_lr_of_the_config():
    model = TinyMoE(torch.bfloat16)
    model.embed.is_embedding_or_output_parameter = True
    config = core.OptimizerConfig(lr=1e-2, decoupled_lr=5e-3, bf16=True)
    optimizer = megatron.get_megatron_optimizer(config, [model])
    assert {group["max_lr"] for group in optimizer.param_groups} == {1e-2, 5e-3}
    rate = megatron.get_canonical_lr_for_logging(optimizer.param_groups)
    assert rate == optimizer.config.lr


def test_get_megatron_optimizer_refuses_mimo_models():
    mimo = type("MimoModel", (nn.Linear,), {})(2, 2)
    with pytest.raises(ValueError, match="computes their gradient norm itself"):
        megatron.get_megatron_optimizer(core.OptimizerConfig(lr=1.0), [mimo])


@pytest.mark.parametrize("mode", ["sync", "overlap", "speculative"])
def test_step_with_ready_grads_uses_gradients_written_after_prepare_grads(mode):
    """The caller writes after the norm was measured, when the host may already hold a copy of the
    old gradient."""
    model, optimizer = build(optimizer_cpu_offload=True, optimizer_offload_fraction=1.0)
    try:
        megatron.install(offload_mode=mode)
        other, early = build(optimizer_cpu_offload=True, optimizer_offload_fraction=1.0)
    finally:
        megatron.uninstall()
    for step in range(4):
        for one, its in ((model, optimizer), (other, early)):
            backward(one, its, step)
            its.prepare_grads()
            its.clip_grad_norm(0.0)
            for param in one.parameters():
                param.grad.neg_()
            assert its.step_with_ready_grads()
        for param, expected in zip(other.parameters(), model.parameters(), strict=True):
            assert same_bits(param, expected)
