"""Tests that need an accelerator."""

import math
import warnings

import pytest
import torch

from mp_optim import get_megatron_optimizer
from support.models import DTYPES, TinyMoE, config_for, is_expert, same_bits, tokens_of

pytestmark = pytest.mark.gpu


def run(precision, fraction, rule="adam", steps=50, clip_to=None, **settings):
    model = TinyMoE(DTYPES[precision]).cuda()
    optimizer = get_megatron_optimizer(
        config_for(precision, fraction, optimizer=rule, **settings),
        model,
        expert_predicate=is_expert,
    )
    losses = []
    for step in range(steps):
        optimizer.zero_grad()
        loss = model(tokens_of(step).cuda())
        optimizer.scale_loss(loss).backward()
        if clip_to is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), clip_to)
        optimizer.step()
        losses.append(loss.item())
    return losses, {n: p.detach().cpu() for n, p in model.named_parameters()}, optimizer


@pytest.mark.usefixtures("deterministic")
@pytest.mark.parametrize("rule", ["adam", "lamb", "sgd"])
@pytest.mark.parametrize("precision", ["bf16", "fp16", "fp32"])
def test_offload_fractions_give_equal_bits_on_a_gpu(precision, rule):
    expected = run(precision, 0.0, rule)
    assert expected[0][-1] < expected[0][0]
    for fraction, overlap in ((0.3, False), (0.5, True), (1.0, True), (1.0, False)):
        losses, params, _ = run(precision, fraction, rule, overlap_cpu_optimizer_d2h_h2d=overlap)
        assert losses == expected[0]
        assert all(same_bits(params[n], p) for n, p in expected[1].items())


@pytest.mark.usefixtures("deterministic")
@pytest.mark.parametrize("limit", [math.inf, 1e-2])
def test_gpu_step_repeats_backward_work_only_when_a_clip_changes_gradient_bits(limit):
    settings = {"clip_grad": 0.0, "clip_to": limit, "steps": 12}
    expected, params, _ = run("bf16", 0.0, **settings)
    for mode in ("overlap", "speculative"):
        losses, there, optimizer = run("bf16", 1.0, offload_mode=mode, **settings)
        assert losses == expected
        assert all(same_bits(there[n], p) for n, p in params.items())
    metrics = optimizer.metrics()
    if limit == math.inf:
        assert metrics["stale_buckets"] == 0 and metrics["speculation_hits"] >= 11
    else:
        assert metrics["stale_buckets"] > 0


def test_offload_pins_host_main_params_and_allocates_none_on_the_gpu():
    torch.cuda.empty_cache()
    model = torch.nn.Linear(4096, 4096, bias=False).bfloat16().cuda()
    before = torch.cuda.memory_allocated()
    config = config_for("bf16", 1.0, overlap_cpu_optimizer_d2h_h2d=True)
    optimizer = get_megatron_optimizer(config, model)
    optimizer.init_state()
    assert torch.cuda.memory_allocated() - before < 1 << 20
    assert all(main.is_pinned() for _, main in optimizer.named_main_params())


@pytest.mark.usefixtures("deterministic")
def test_offload_to_cpu_moves_all_state_and_restores_it_with_equal_bits():
    _, _, optimizer = run("bf16", 0.5, steps=1)
    before = {k: v.clone() for s in optimizer.state_dict()["state"].values() for k, v in s.items()}
    optimizer.offload_to_cpu()
    assert all(
        v.device.type == "cpu" for s in optimizer.state_dict()["state"].values() for v in s.values()
    )
    with pytest.raises(RuntimeError, match="restore_from_cpu"):
        optimizer.step()
    optimizer.restore_from_cpu()
    after = {k: v for s in optimizer.state_dict()["state"].values() for k, v in s.items()}
    assert all(
        same_bits(before[k].cpu(), after[k].cpu()) and before[k].device == after[k].device
        for k in before
    )


KINDS = {
    "bf16": {},
    "fp16": {},
    "bf16-8bit": {},
    "bf16-lamb": {"optimizer": "lamb"},
    "bf16-zeros": {"log_num_zeros_in_grad": True},
}


def steady(kind, **settings):
    precision = kind if kind in ("bf16", "fp16", "bf16-8bit") else "bf16"
    model = TinyMoE(DTYPES[precision.split("-")[0]]).cuda()
    optimizer = get_megatron_optimizer(
        config_for(precision, fused_backend="triton", **KINDS[kind], **settings),
        model,
        expert_predicate=is_expert,
    )
    streams = [
        [
            torch.randn(p.shape, generator=torch.Generator().manual_seed(step)).cuda()
            for p in model.parameters()
        ]
        for step in range(20)
    ]
    for param in model.parameters():
        param.grad = torch.zeros_like(param)
    results, waits = [], 0
    for step, values in enumerate(streams):
        for param, value in zip(model.parameters(), values, strict=True):
            param.grad.copy_(value * optimizer.get_loss_scale())
        if step in (3, 11):
            next(iter(model.parameters())).grad.view(-1)[0] = float("inf")
        for group in optimizer.param_groups:
            group["lr"] = 1e-2 / (1 + step)
        if step < 6:  # The first steps make tables and compile kernels.
            results.append(optimizer.step())
            continue
        torch.cuda.set_sync_debug_mode("warn")
        try:
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                results.append(optimizer.step())
        finally:
            torch.cuda.set_sync_debug_mode("default")
        waits += sum("synchronizing" in str(warning.message) for warning in caught)
    # A step skipped without a loss scale searches for the bad gradient, which waits once.
    assert waits <= (precision != "fp16")
    return (
        [tuple(result) for result in results],
        {n: p.detach().cpu() for n, p in model.named_parameters()},
        optimizer,
    )


@pytest.mark.parametrize("kind", list(KINDS))
def test_step_decided_on_the_gpu_does_not_synchronize_and_has_the_bits_of_a_host_decision(
    kind, monkeypatch
):
    results, params, optimizer = steady(kind)
    assert optimizer.executor.verdict_device() is not None
    assert not all(success for success, _, _ in results)
    monkeypatch.setattr(
        "mp_optim.rules.rule_executor.RuleExecutor.verdict_device", lambda self: None
    )
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", lambda mode: None)
    host = steady(kind)
    assert results == host[0]
    assert all(same_bits(params[name], value) for name, value in host[1].items())


def test_gpu_step_result_is_readable_before_the_update_kernels_end():
    model = torch.nn.Linear(8192, 8192, bias=False).bfloat16().cuda()
    optimizer = get_megatron_optimizer(config_for("bf16", fused_backend="triton"), model)
    model.weight.grad = torch.ones_like(model.weight)
    optimizer.step().success  # noqa: B018
    result, done = optimizer.step(), torch.cuda.Event()
    torch.cuda._sleep(1 << 30)
    done.record()
    assert result.success and not done.query()
