"""The modes sync, overlap and speculative give equal bits after any events before the step."""

import gc
import math
import threading

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from mp_optim import get_megatron_optimizer
from mp_optim.host.host_share import host_share
from mp_optim.host.transfer import Transfer
from support.models import build, config_for, tokens_of
from support.offload import (
    MODES,
    build_mode,
    delays,
    differing,
    finish_backward_work,
    hybrids,
    run,
    schedules,
    snapshot,
    spans_of_worker,
)

EARLY = MODES[1:]
each_early = pytest.mark.parametrize("mode", EARLY)


def back_buffer_bytes(hybrid):
    return hybrid.stepper.host_bytes().back


def counts(optimizer, name):
    return sum(each.counts[f"speculation_{name}"] for each in schedules(optimizer))


def apply_event(model, optimizer, event):
    if event == "lower the rate":
        for group in optimizer.param_groups:
            group["lr"] = group["lr"] * 0.5
    elif event == "other betas":
        optimizer.param_groups[0]["betas"] = (0.8, 0.95)
    elif event == "scale gradients":
        for param in model.parameters():
            if param.grad is not None:
                param.grad.mul_(0.5)
    elif event == "gradients of their own":
        for param in model.parameters():
            param.grad = param.grad.clone() * 0.25 if param.grad is not None else None
    elif event == "drop a gradient":
        model.dense.grad = None
    elif event == "replace a parameter":
        old = model.dense
        model.dense = nn.Parameter(old.detach().clone())
        model.dense.grad = old.grad
        for group in optimizer.param_groups:
            group["params"] = [model.dense if param is old else param for param in group["params"]]
    elif event == "write a parameter":
        with torch.no_grad():
            model.dense.mul_(0.5)
    elif event == "read state":
        optimizer.state_dict()
    elif event == "write state":
        state = optimizer.state[model.dense]
        key = sorted(key for key in state if key != "step")[0]
        if (moment := state[key]).is_inference():  # A copy of 8-bit state is read-only.
            state[key] = moment.flip(0)
        else:
            moment.data.copy_(moment.flip(0))
    elif event == "load state":
        optimizer.load_state_dict(optimizer.state_dict())
    elif event == "zero and again":
        optimizer.zero_grad()
        optimizer.scale_loss(model(tokens_of(77))).backward()
    elif event == "backward again":
        optimizer.scale_loss(model(tokens_of(78))).backward()
    elif event == "zero in place and again":
        optimizer.zero_grad(set_to_none=False)
        optimizer.scale_loss(model(tokens_of(79))).backward()
    elif event == "zero":
        optimizer.zero_grad()
    elif event == "move out and in":
        optimizer.offload_to_cpu()
        optimizer.restore_from_cpu()
    elif event == "discard":
        optimizer.discard_backward_work()
    elif event == "step twice":
        optimizer.step()
    elif event == "reload":
        optimizer.reload_model_params()
    elif event == "discard, backward again":
        optimizer.discard_backward_work()
        optimizer.scale_loss(model(tokens_of(79))).backward()
    elif event == "cut buckets":
        for hybrid in hybrids(optimizer):
            hybrid.stepper.use_transfer(hybrid.stepper.settings.transfer)
    elif event == "look at gradients":
        list(optimizer.named_gradients())
    elif event == "broken off":
        with pytest.raises(RuntimeError, match="in the middle"):
            RaisesInBackward.apply(model(tokens_of(80))).backward()
        optimizer.zero_grad()
        optimizer.scale_loss(model(tokens_of(81))).backward()
    elif event == "a step that is refused":
        group = optimizer.param_groups[0]
        rate, group["lr"] = group["lr"], math.nan
        with pytest.raises(ValueError, match="lr"):
            optimizer.step()
        group["lr"] = rate
    else:
        assert event == "nothing"


class RaisesInBackward(torch.autograd.Function):
    """Function that raises in its backward pass."""

    @staticmethod
    def forward(ctx, loss):
        return loss.clone()

    @staticmethod
    def backward(ctx, grad):
        raise RuntimeError("in the middle")


RELEASABLE = [
    *("nothing", "lower the rate", "write a parameter", "read state", "load state", "zero"),
    *("zero and again", "backward again", "move out and in", "discard", "cut buckets"),
    *("discard, backward again", "look at gradients", "broken off", "a step that is refused"),
]
EVENTS = [
    *(*RELEASABLE, "other betas", "scale gradients", "gradients of their own", "step twice"),
    *("drop a gradient", "replace a parameter", "write state", "zero in place and again"),
    "reload",
]


def run_events(mode, events, waits=(), precision="bf16", **settings):
    model, optimizer = build_mode(mode, precision, **settings)
    found = []
    with delays(waits):
        for step, event in enumerate(events):
            optimizer.zero_grad()
            loss = model(tokens_of(step)) * 0.3
            optimizer.scale_loss(loss).backward()
            apply_event(model, optimizer, event)
            found.append((loss.item(), tuple(optimizer.step())))
    return found, snapshot(model, optimizer)


@given(
    data=st.data(),
    releases=st.booleans(),
    waits=st.lists(st.floats(0.0, 0.003), max_size=7),
    precision=st.sampled_from(["bf16", "fp16", "fp32", "bf16-8bit8"]),
    groups=st.sampled_from([0, 7]),
    clip_grad=st.sampled_from([0.0, 0.02, 1.0]),
    fraction=st.sampled_from([0.3, 0.7, 1.0]),
    bucket_bytes=st.sampled_from([64, 256, 1 << 20]),
)
@settings(max_examples=30, deadline=None)
@pytest.mark.filterwarnings("ignore:none of the optimizer:UserWarning")
def test_offload_modes_give_equal_bits_after_random_events_before_the_step(
    data, releases, waits, **settings
):
    kinds = st.sampled_from(RELEASABLE if releases else EVENTS)
    events = data.draw(st.lists(kinds, min_size=1, max_size=8))
    expected = run_events("sync", events, **settings)
    for mode in EARLY:
        found = run_events(mode, events, waits, release_gradients=releases, **settings)
        assert repr(found[0]) == repr(expected[0]), mode
        assert differing(found[1], expected[1]) == [], mode


def test_step_keeps_finished_buckets_when_a_gradient_is_missing():
    model = nn.ParameterList(torch.randn(600).bfloat16() for _ in range(6))
    config = config_for("bf16", 1.0, clip_grad=0.0, offload_mode="speculative")
    optimizer = get_megatron_optimizer(config, model)
    (schedule,) = schedules(optimizer)
    hybrids(optimizer)[0].stepper.use_transfer(Transfer(), bucket_bytes=4800)
    assert len(schedule.buckets) == 3
    for step in range(3):
        optimizer.zero_grad()
        sum(
            (param * (1 + at)).float().sum()
            for at, param in enumerate(model)
            if step < 2 or at != 5
        ).backward()
        optimizer.step()
    assert counts(optimizer, "hits") == 9  # All three buckets hit in each of three steps.


@each_early
def test_backward_work_waits_for_gradients_ready_when_several_ranks_reduce(mode, monkeypatch):
    monkeypatch.setattr("torch.distributed.is_initialized", lambda: True)
    monkeypatch.setattr("torch.distributed.get_world_size", lambda *_: 2)
    results = []
    for which in ("sync", mode):
        model, optimizer = build_mode(which, clip_grad=0.0)
        for step in range(6):
            optimizer.zero_grad()
            model(tokens_of(step)).backward()
            after_backward = finish_backward_work(optimizer)
            for param in model.parameters():
                # A reduction writes into the same memory without changing the version counter.
                param.grad.data.mul_(0.5)
            if step > 2:
                optimizer.gradients_ready()
            optimizer.step()
            brought = spans_of_worker(optimizer, "wait_copies")
            assert bool(brought) == (which == mode and step > 2)
            assert all(span.start >= after_backward for span in brought)
        results.append(snapshot(model, optimizer))
    assert differing(*results) == []
    assert mode == "overlap" or counts(optimizer, "hits") > 0


@each_early
def test_backward_work_starts_only_in_the_last_micro_batch(mode):
    model, optimizer = build_mode(mode, clip_grad=0.0)
    run(model, optimizer, 2)
    optimizer.zero_grad()
    with optimizer.no_sync():
        assert not optimizer.is_last_microbatch
        model(tokens_of(0)).backward()
    before_the_last = finish_backward_work(optimizer)
    assert optimizer.is_last_microbatch
    model(tokens_of(1)).backward()
    before_step = finish_backward_work(optimizer)
    optimizer.step()
    brought = spans_of_worker(optimizer, "wait_copies")
    assert brought
    assert all(before_the_last <= span.start <= span.end <= before_step for span in brought)
    optimizer.is_last_microbatch = False
    optimizer.zero_grad()
    model(tokens_of(0)).backward()
    optimizer.step()
    assert spans_of_worker(optimizer, "wait_copies") == []


def test_gradient_hooks_follow_replaced_params_and_end_with_the_optimizer():
    model, optimizer = build_mode("speculative", experts=False, fraction=1.0)
    old = model.dense
    apply_event(model, optimizer, "replace a parameter")
    run(model, optimizer, 3)
    assert not old._post_accumulate_grad_hooks and len(model.dense._post_accumulate_grad_hooks) == 1
    params = list(model.parameters())
    del optimizer
    gc.collect()
    assert not any(param._post_accumulate_grad_hooks for param in params)


@pytest.mark.parametrize("bad", [math.inf, math.nan])
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_speculation_changes_nothing_when_one_gradient_element_is_not_finite(precision, bad):
    model, optimizer = build_mode("speculative", precision, clip_grad=0.0)
    run(model, optimizer, 3)
    before = snapshot(model, optimizer)
    optimizer.zero_grad()
    handle = model.embed.register_hook(
        lambda grad: grad.index_put(
            (torch.tensor(0), torch.tensor(0)), torch.tensor(bad, dtype=grad.dtype)
        )
    )
    optimizer.scale_loss(model(tokens_of(9))).backward()
    handle.remove()
    before_step = finish_backward_work(optimizer)
    assert optimizer.step() == (False, None, None)
    stepped = spans_of_worker(optimizer, "host_step")
    assert stepped and all(span.end <= before_step for span in stepped)
    measured = spans_of_worker(optimizer, "host_measure")
    assert {span.label for span in stepped} < {span.label for span in measured}
    assert differing(snapshot(model, optimizer), before) == []
    run(model, optimizer, 2)
    assert all(value.isfinite().all() for value in snapshot(model, optimizer).values())


def test_speculation_changes_nothing_when_a_huge_gradient_is_skipped():
    model, optimizer = build_mode("speculative", clip_grad=0.0, grad_norm_skip_threshold=1e6)
    run(model, optimizer, 3)
    before, hits = snapshot(model, optimizer), counts(optimizer, "hits")
    optimizer.zero_grad()
    (model(tokens_of(9)) * 1e9).backward()
    before_step = finish_backward_work(optimizer)
    success, norm, _ = optimizer.step()
    stepped = spans_of_worker(optimizer, "host_step")
    assert stepped and all(span.end <= before_step for span in stepped)
    assert not success and norm > 1e6 and counts(optimizer, "hits") == hits
    assert differing(snapshot(model, optimizer), before) == []


@pytest.mark.quick
@pytest.mark.parametrize("precision", ["bf16", "fp32"])
@pytest.mark.parametrize("fraction", [0.5, 1.0])
def test_sync_offload_stages_no_bytes_when_the_model_is_in_host_memory(precision, fraction):

    def trained(share):
        model, optimizer = build(precision, share, experts=False)
        for step in range(4):
            optimizer.zero_grad()
            model(tokens_of(step)).backward()
            model.dense.grad.data.mul_(0.5)
            if step == 2:
                model.dense.data[0] = 0.25
            assert optimizer.step().success
        return model, optimizer

    model, optimizer = trained(fraction)
    assert differing(snapshot(model, optimizer), snapshot(*trained(0.0))) == []
    metrics = optimizer.metrics()
    assert metrics["bytes_down"] == metrics["bytes_up"] == 0 and metrics["host_ms"] > 0
    assert hybrids(optimizer)[0].stepper.host_bytes().staging == ()
    assert "host" in {row.place for row in optimizer.describe().rows}


@pytest.mark.parametrize("mode", MODES)
def test_metrics_report_bytes_and_hidden_time_for_each_offload_mode(mode):
    model, optimizer = build_mode(mode, fraction=1.0, clip_grad=0.0)
    runs_in_backward = mode == "speculative" or (mode == "overlap" and model.dense.is_cpu)
    for _ in range(20):  # A busy machine may give the worker no core during one backward pass.
        run(model, optimizer, 5)
        metrics = optimizer.metrics()
        if not runs_in_backward or metrics["hidden_ms"] > 0:
            break
    assert {"copy_wait_ms", "worker_wait_ms", "host_ms", "hidden_ms"} <= metrics.keys()
    moved = sum(param.nbytes for param in model.parameters())
    assert metrics["host_ms"] > 0 and metrics["bytes_down"] == metrics["bytes_up"] == moved
    if mode == "sync":
        assert metrics["hidden_ms"] == 0 and "speculation_hits" not in metrics
        return
    assert runs_in_backward == (metrics["hidden_ms"] > 0)
    assert metrics["hidden_ms"] <= metrics["host_ms"]
    text = str(optimizer.describe())
    planned = sum(map(back_buffer_bytes, hybrids(optimizer)))
    assert f"offload_mode {mode}" in text
    assert (planned > 0) == (mode == "speculative")
    if mode == "speculative":
        assert f"{back_buffer_bytes(hybrids(optimizer)[0]):,} bytes double buffer" in text


def test_speculation_pauses_while_every_step_clips_and_then_resumes():
    model, optimizer = build_mode("speculative", experts=False, clip_grad=0.16, lr=1e-3)

    def hits_of(steps, start, scale):
        before = counts(optimizer, "hits"), counts(optimizer, "paused")
        run(model, optimizer, steps, start=start, scale=lambda step: scale)
        return counts(optimizer, "hits") - before[0], counts(optimizer, "paused") - before[1]

    hits, paused = hits_of(10, 0, 0.1)
    assert hits > 0 and paused == 0
    hits, paused = hits_of(12, 10, 100.0)
    assert hits == 0 and 0 < paused < 12
    hits, paused = hits_of(10, 22, 0.1)
    assert hits > 0 and 0 < paused < 10


def test_worker_kernels_use_fewer_threads_than_the_main_thread(monkeypatch):
    from mp_optim.kernels.native import NativeBackend
    from mp_optim.offload.backward_scheduler import occupy

    class Library:
        level = "scalar"

        def call(self, *arguments):
            self.threads = arguments[-1]

    def threads_of_kernels():
        backend = NativeBackend(Library())
        backend.sum_of_squares([torch.ones(3)])
        return backend.library.threads

    before, found = torch.get_num_threads(), []

    def look():
        occupy(3)
        found.append((torch.get_num_threads(), threads_of_kernels()))

    thread = threading.Thread(target=look)
    thread.start()
    thread.join()
    assert found[0][1] == 3 and torch.get_num_threads() == before
    assert threads_of_kernels() == host_share().threads
