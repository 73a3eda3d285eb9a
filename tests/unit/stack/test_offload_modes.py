"""Sync, overlap and speculative give the same bits, whatever happens between backward and step."""

import math
import threading

import pytest
import torch
from models import COMPACT, same_bits, tokens_of
from offload import (
    MODES,
    build_mode,
    delays,
    differing,
    hybrids,
    params_of,
    run,
    schedules,
    snapshot,
    state_of,
)
from torch import nn

from mp_optim import (
    FusedAdam,
    FusedLAMB,
    HybridDeviceOptimizer,
    OptimizerConfig,
    checkpoint,
    get_megatron_optimizer,
)
from mp_optim.placement.buckets import plan_buckets
from mp_optim.placement.speculation import WINDOW, speculates_next

EARLY = MODES[1:]
each_early = pytest.mark.parametrize("mode", EARLY)


def counts(optimizer, name):
    return sum(schedule.counts[f"speculation_{name}"] for schedule in schedules(optimizer))


def spikes(step):
    """Now and then a batch whose gradients are ten times as large."""
    return 10.0 if step % 7 == 3 else 1.0


def overflow_at(*steps):
    def after_backward(model, step):
        if step in steps:
            model.dense.grad[0, 0] = math.inf if step % 2 else math.nan

    return after_backward


LONG = {
    "clip off": dict(settings={"clip_grad": 0.0}),
    "clip never, 7 groups": dict(groups=7, settings={"clip_grad": 1e6}),
    "clip sometimes": dict(settings={"clip_grad": 0.16}, scale=spikes),
    "clip sometimes, 7 groups, 4 micro-batches": dict(groups=7, settings={"clip_grad": 0.16}, scale=spikes, micro=4,
                                                      use_no_sync=True),
    "clip always, 4 micro-batches": dict(settings={"clip_grad": 1e-3}, micro=4),
    "skip threshold": dict(groups=7, settings={"clip_grad": 0.0, "grad_norm_skip_threshold": 0.3}, scale=spikes),
    "fp16, overflows": dict(precision="fp16", settings={"clip_grad": 0.16, "loss_scale_window": 20, "hysteresis": 1},
                            scale=lambda step: 1e30 if step in (5, 6, 70) else spikes(step),
                            after_backward=overflow_at(20, 21, 120)),
}


@pytest.mark.parametrize("name", LONG)
def test_two_hundred_steps_are_the_same_bits(name):
    case = dict(LONG[name])
    settings, precision, groups = case.pop("settings"), case.pop("precision", "bf16"), case.pop("groups", 0)
    expected, outcomes = None, None
    for mode in MODES:
        model, optimizer = build_mode(mode, precision, groups=groups, lr=1e-3, **settings)
        with delays([0.0, 0.0, 0.0005, 0.0, 0.001]):
            results = run(model, optimizer, 200, **case)
        now = results, snapshot(model, optimizer)
        if mode == "sync":
            expected = now
            outcomes = [success for _, success, _ in results]
        assert now[0] == expected[0], mode
        assert differing(now[1], expected[1]) == [], mode
    if "skip" in name or "overflow" in name:
        assert 0 < outcomes.count(False) < 60
    if "always" in name:
        assert counts(optimizer, "paused") > 180
    else:
        assert counts(optimizer, "hits") > 200
    assert (counts(optimizer, "redone") > 0) == (name.split(",")[0] in ("clip sometimes", "clip always", "fp16"))


FORMS = ["bf16", "fp16", "fp32", *(f"bf16-{form}" for form in COMPACT if form not in ("fp16", "bf16"))]


@pytest.mark.parametrize("rule", ["adam", "lamb", "sgd", "lion"])
@pytest.mark.parametrize("precision", FORMS)
def test_every_rule_and_form_of_state(precision, rule):
    """Half of the steps clip, so that halves are flipped, redone and stepped in place in turn."""
    settings = {"optimizer": rule, "clip_grad": 0.16, "lr": 1e-3 if rule == "lion" else 1e-2}
    if "-" in precision and rule in ("sgd", "lion"):
        form = {key: value for key, value in COMPACT[precision.split("-")[1]].items() if key != "exp_avg_sq_dtype"}
        if precision == "bf16-stochastic":
            form = {**form, "param_remainder_bits": 8}
        precision, settings = "bf16", {**settings, "use_precision_aware_optimizer": True, **form}
    expected = None
    for mode in MODES:
        model, optimizer = build_mode(mode, precision, 0.6, **settings)
        results = run(model, optimizer, 12, scale=lambda step: 10.0 if step % 4 == 3 else 0.5)
        now = results, snapshot(model, optimizer)
        expected = expected or now
        assert now[0] == expected[0], mode
        assert differing(now[1], expected[1]) == [], mode
    assert counts(optimizer, "hits") > 0 and counts(optimizer, "redone") > 0


# -- what may happen between backward and step ---------------------------------------------------------------


def between(model, optimizer, what):
    """One of the things that people do there."""
    if what == "lower the rate":
        for group in optimizer.param_groups:
            group["lr"] = group["lr"] * 0.5
    elif what == "other betas":
        optimizer.param_groups[0]["betas"] = (0.8, 0.95)
    elif what == "scale gradients":
        for param in model.parameters():
            if param.grad is not None:
                param.grad.mul_(0.5)
    elif what == "gradients of their own":
        for param in model.parameters():
            param.grad = param.grad.clone() * 0.25 if param.grad is not None else None
    elif what == "drop a gradient":
        model.dense.grad = None
    elif what == "replace a parameter":
        old = model.dense
        model.dense = nn.Parameter(old.detach().clone())
        model.dense.grad = old.grad
        for group in optimizer.param_groups:
            group["params"] = [model.dense if param is old else param for param in group["params"]]
    elif what == "write a parameter":
        with torch.no_grad():
            model.dense.mul_(0.5)
    elif what == "read state":
        optimizer.state_dict()
    elif what == "write state":
        state = optimizer.state[model.dense]
        state[sorted(key for key in state if key != "step")[0]].data.mul_(0.5)
    elif what == "load state":
        optimizer.load_state_dict(optimizer.state_dict())
    elif what == "zero and again":
        optimizer.zero_grad()
        optimizer.scale_loss(model(tokens_of(77))).backward()
    elif what == "backward again":
        optimizer.scale_loss(model(tokens_of(78))).backward()
    elif what == "zero in place and again":
        optimizer.zero_grad(set_to_none=False)
        optimizer.scale_loss(model(tokens_of(79))).backward()
    elif what == "zero":
        optimizer.zero_grad()
    elif what == "move out and in":
        optimizer.offload_to_cpu()
        optimizer.restore_from_cpu()
    elif what == "discard":
        optimizer.discard_early_work()
    elif what == "step twice":
        optimizer.step()
    elif what == "reload":
        optimizer.reload_model_params()
    else:
        assert what == "nothing"


EVENTS = ["nothing", "lower the rate", "other betas", "scale gradients", "gradients of their own", "drop a gradient",
          "replace a parameter", "write a parameter", "read state", "write state", "load state", "zero and again",
          "backward again", "zero in place and again", "zero", "move out and in", "discard", "step twice", "reload"]


def run_events(mode, events, waits=(), precision="bf16", **settings):
    model, optimizer = build_mode(mode, precision, **settings)
    found = []
    with delays(waits):
        for step, event in enumerate(events):
            optimizer.zero_grad()
            loss = model(tokens_of(step)) * 0.3
            optimizer.scale_loss(loss).backward()
            between(model, optimizer, event)
            found.append((loss.item(), tuple(optimizer.step())))
    return found, snapshot(model, optimizer), optimizer


@pytest.mark.parametrize("precision", ["bf16", "fp32", "bf16-8bit8"])
@pytest.mark.parametrize("event", EVENTS)
def test_between_backward_and_step(event, precision):
    events = ["nothing", "nothing", event, "nothing", event, "nothing"]
    expected = run_events("sync", events, precision=precision, clip_grad=0.0)
    for mode in EARLY:
        found = run_events(mode, events, [0.001, 0.0], precision=precision, clip_grad=0.0)
        assert found[0] == expected[0], mode
        assert differing(found[1], expected[1]) == [], mode
        assert all(math.isfinite(loss) for loss, _ in found[0])
    assert counts(found[2], "hits") > 0


@pytest.mark.parametrize("seed", range(12))
def test_random_schedules(seed):
    """Any order of events, with any delays of the worker, with clipping that fires now and then."""
    draw = torch.Generator().manual_seed(seed)
    events = [EVENTS[int(i)] for i in torch.randint(len(EVENTS), (8,), generator=draw)]
    waits = (torch.rand(7, generator=draw) * 0.003).tolist()
    settings = {"precision": ["bf16", "fp16", "fp32"][seed % 3], "groups": 7 if seed % 2 else 0, "clip_grad": 0.02}
    expected = run_events("sync", events, **settings)
    for mode in EARLY:
        found = run_events(mode, events, waits, **settings)
        assert found[0] == expected[0], (mode, events)
        assert differing(found[1], expected[1]) == [], (mode, events)


@each_early
def test_closures(mode):
    results = []
    for which in ("sync", mode):
        model, optimizer = build_mode(which)
        for step in range(6):
            def closure(step=step):
                optimizer.zero_grad()
                loss = model(tokens_of(step))
                loss.backward()
                return loss

            optimizer.step(closure)
        results.append(snapshot(model, optimizer))
    assert differing(*results) == []
