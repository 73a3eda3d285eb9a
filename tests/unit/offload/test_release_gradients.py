"""Gradients released during backward: equal bits, at most two buckets in memory, clear errors."""

import math

import pytest
import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from mp_optim import (
    Float16OptimizerWithFloat16Params,
    FusedAdam,
    HybridDeviceOptimizer,
    OptimizerConfig,
    get_megatron_optimizer,
)
from mp_optim.offload.backward_grads import BackwardJob
from mp_optim.offload.backward_scheduler import WorkerError
from support.models import DTYPES, TinyMoE, config_for, tokens_of
from support.offload import (
    build_mode,
    delays,
    differing,
    hybrids,
    params_of,
    run,
    schedules,
    snapshot,
)

EARLY = ("overlap", "speculative")
each_early = pytest.mark.parametrize("mode", EARLY)


def build(mode, precision="bf16", fraction=0.7, **settings):
    return build_mode(mode, precision, fraction, release_gradients=True, **settings)


def same_as_sync(mode, run_it, precision="bf16", fraction=0.7, **settings):
    """Assert that a run with released gradients gives the results of sync mode without release."""
    model, optimizer = build_mode("sync", precision, fraction, **settings)
    expected = run_it(model, optimizer), snapshot(model, optimizer)
    model, optimizer = build(mode, precision, fraction, **settings)
    results = run_it(model, optimizer), snapshot(model, optimizer)
    assert repr(results[0]) == repr(expected[0]), mode
    assert differing(results[1], expected[1]) == [], mode
    return optimizer


class Deep(nn.ModuleList):
    def __init__(self, depth=12, width=32):
        torch.manual_seed(0)
        layers = (nn.Linear(width, width, bias=False) for _ in range(depth))
        super().__init__(layer.bfloat16() for layer in layers)

    def forward(self, x):
        for layer in self:
            x = torch.tanh(layer(x))
        return x.float().square().mean()


def deep(mode, release, bucket_layers=2, **settings):
    model, grads, most = Deep(), [], [0]

    def look(param):
        grads.append((StorageWeakRef(param.grad.untyped_storage()), param.grad.nbytes))
        alive = {ref.cdata: size for ref, size in grads if not ref.expired()}
        most[0] = max(most[0], sum(alive.values()))

    # This hook is registered first, so it runs before the optimizer's hook.
    for param in model.parameters():
        param.register_post_accumulate_grad_hook(look)
    size = model[0].weight.nbytes
    config = config_for(
        "bf16",
        1.0,
        offload_mode=mode,
        release_gradients=release,
        offload_bucket_bytes=2 * bucket_layers * size,
        **settings,
    )
    return model, get_megatron_optimizer(config, model), most


@each_early
@pytest.mark.parametrize("micro", [1, 3])
@pytest.mark.parametrize("use_no_sync", [True, False])
@pytest.mark.parametrize("wait", [0.003])
def test_released_gradients_occupy_at_most_two_buckets_during_backward(
    mode, micro, use_no_sync, wait
):
    peaks = {}
    for release in (False, True):
        model, optimizer, most = deep(mode, release)
        (hybrid,), (schedule,) = hybrids(optimizer), schedules(optimizer)
        hybrid.stepper.use_transfer(hybrid.stepper.settings.transfer, 4 * model[0].weight.nbytes)
        with delays([wait]):
            for step in range(5):
                if step == 3:
                    most[0] = 0
                optimizer.zero_grad()
                for part in range(micro):
                    x = torch.ones(4, 32, dtype=torch.bfloat16) * (1 + part)
                    if use_no_sync and part + 1 < micro:
                        with optimizer.no_sync():
                            model(x).backward()
                    else:
                        model(x).backward()
                optimizer.step()
        assert [len(bucket.slots) for bucket in schedule.buckets] == [2] * 6
        peaks[release] = most[0]
    size = model[0].weight.nbytes
    assert peaks[False] == 12 * size
    assert peaks[True] <= 4 * size


@each_early
def test_named_gradients_returns_a_gradient_after_its_release(mode):
    model, optimizer = build_mode("sync", fraction=1.0)
    model(tokens_of(0)).backward()
    expected = {name: grad.cpu().clone() for name, grad in optimizer.named_gradients()}
    model, optimizer = build(mode, fraction=1.0, bucket_bytes=1)
    model(tokens_of(0)).backward()
    assert all(param.grad is None for param in model.parameters())
    found = {name: grad.cpu() for name, grad in optimizer.named_gradients()}
    assert differing(found, expected) == []


@each_early
def test_step_names_a_released_gradient_that_is_not_finite(mode):
    model, optimizer = build(mode, fraction=1.0, bucket_bytes=1)
    model.dense.register_hook(lambda grad: grad.fill_(math.inf))
    before = params_of(model)
    model(tokens_of(0)).backward()
    with pytest.warns(UserWarning, match="the gradient of dense holds an inf or nan"):
        assert not optimizer.step().success
    assert differing(params_of(model), before) == []


@each_early
def test_step_refuses_a_second_gradient_when_the_first_was_released(mode):
    model, optimizer = build(mode, fraction=1.0, bucket_bytes=1)
    model(tokens_of(0)).backward()
    before = params_of(model)
    model.dense.grad = torch.ones_like(model.dense)
    with pytest.raises(ValueError, match="dense: its gradient was released during backward"):
        optimizer.step()
    assert differing(params_of(model), before) == []
    model.dense.grad = None
    assert optimizer.step().success


@each_early
def test_gradients_are_not_released_when_backward_creates_a_graph(mode):

    def run_it(model, optimizer):
        for step in range(3):
            optimizer.zero_grad()
            model(tokens_of(step)).backward(create_graph=True)
            kept = [param.grad is not None for param in model.parameters()]
            optimizer.step()
        return all(kept)

    same_as_sync(mode, run_it)


@each_early
@pytest.mark.parametrize("micro", [1, 2])
def test_step_refuses_until_zero_grad_when_released_gradients_are_lost(mode, micro, monkeypatch):
    model, optimizer = build(mode, experts=False)
    run(model, optimizer, 2)
    before, original, calls = snapshot(model, optimizer), BackwardJob.run, []

    def fails(job):
        calls.append(job)
        if len(calls) == 2:
            raise RuntimeError("no more")
        original(job)

    monkeypatch.setattr(BackwardJob, "run", fails)
    for part in range(micro):
        model(tokens_of(part)).backward()
    for _ in range(2):
        with pytest.raises(WorkerError, match="are lost: call zero_grad"):
            optimizer.step()
    model(tokens_of(5)).backward()
    with pytest.raises(WorkerError, match="are lost: call zero_grad"):
        optimizer.step()
    assert differing(snapshot(model, optimizer), before) == []
    run(model, optimizer, 3, start=2)
    expected, other = build_mode("sync", experts=False)
    run(expected, other, 5)
    assert differing(snapshot(model, optimizer), snapshot(expected, other)) == []


OFFLOADED = {"optimizer_cpu_offload": True, "optimizer_offload_fraction": 1.0}


@pytest.mark.parametrize(
    "settings, text",
    [
        ({}, "has no effect without offload_mode='overlap' or 'speculative'"),
        (OFFLOADED, "has no effect without offload_mode='overlap' or 'speculative'"),
        (
            {**OFFLOADED, "offload_mode": "overlap", "use_distributed_optimizer": True},
            "a distributed optimizer are stored in buckets",
        ),
        (
            {**OFFLOADED, "offload_mode": "overlap", "fused_backend": "apex"},
            "other bits than fused_backend='apex'",
        ),
    ],
)
def test_release_gradients_refuses_unsupported_settings(settings, text):
    with pytest.raises(ValueError, match=f"release_gradients=True: .*{text}"):
        OptimizerConfig(lr=1e-3, bf16=True, release_gradients=True, **settings)


def test_release_gradients_refuses_params_with_main_grad():
    model = TinyMoE(DTYPES["bf16"])
    model.dense.main_grad = torch.zeros_like(model.dense, dtype=torch.float32)
    config = config_for("bf16", 1.0, offload_mode="overlap", release_gradients=True)
    with pytest.raises(ValueError, match=r"release_gradients=True: .* has a main_grad"):
        get_megatron_optimizer(config, model)


def test_release_gradients_refuses_an_optimizer_that_copies_no_gradients_in_backward():
    model = TinyMoE(DTYPES["bf16"])
    inner = HybridDeviceOptimizer(model.parameters(), 1.0, FusedAdam, FusedAdam, lr=1e-3)
    config = config_for("bf16", 1.0, offload_mode="overlap", release_gradients=True)
    with pytest.raises(ValueError, match="copies no gradients during backward"):
        Float16OptimizerWithFloat16Params(inner, config)
