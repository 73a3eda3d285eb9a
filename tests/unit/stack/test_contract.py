"""Torch's optimizer contract, chains, model chunks and timers."""

import copy
import pickle
from unittest.mock import DEFAULT, Mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from mp_optim import (
    ChainedOptimizer,
    Float16OptimizerWithFloat16Params,
    FP32Optimizer,
    FusedAdam,
    checkpoint,
    get_megatron_optimizer,
)
from mp_optim.checkpoint.common import from_json
from mp_optim.offload.buckets import plan_offload
from support.models import build, config_for, train


def test_save_stores_the_result_of_state_dict_hooks(tmp_path):
    model, optimizer = build("bf16")
    states = []

    def marked(_, state):
        states.append(len(state["state"]))
        return {**state, "mark": 1}

    optimizer.register_state_dict_post_hook(marked)
    path = checkpoint.save(tmp_path, model, optimizer)
    common = from_json((path / "common.json").read_bytes())["optimizer"]
    assert states == [len(list(model.parameters()))]
    assert common["mark"] == 1 and not any("state" in key for key in common)


def test_chained_optimizer_refuses_an_empty_list_and_parts_with_different_configs():
    def part(**settings):
        return FP32Optimizer(
            FusedAdam([nn.Parameter(torch.ones(1))]), config_for("fp32", **settings)
        )

    with pytest.raises(ValueError, match="empty"):
        ChainedOptimizer([])
    with pytest.raises(ValueError, match="configs differ"):
        ChainedOptimizer([part(), part(clip_grad=0.5)])


def test_step_starts_and_stops_megatron_timers_and_counts_between_timers(monkeypatch):
    events = []

    class Timer:
        def __init__(self, name):
            self.name = name

        def start(self, barrier):
            events.append((self.name, "start", barrier))

        def stop(self):
            events.append((self.name, "stop"))

    def timers(name, log_level):
        assert log_level == 1  # Megatron's barrier_with_L1_time applies to this level.
        return Timer(name)

    for barrier in (True, False):
        events.clear()
        model, optimizer = build("bf16", timers=timers, barrier_with_L1_time=barrier)
        observed = Mock(
            side_effect=lambda *_: events.append("count") or DEFAULT, wraps=optimizer.counts.record
        )
        monkeypatch.setattr(optimizer.counts, "record", observed)
        train(model, optimizer, 1)
        assert events == [
            ("optimizer-clip-main-grad", "start", barrier),
            ("optimizer-clip-main-grad", "stop"),
            "count",  # Counting may wait for the device, which is no time of the inner step.
            ("optimizer-inner-step", "start", barrier),
            ("optimizer-inner-step", "stop"),
        ]


def test_megatron_optimizer_refuses_copy_and_pickle():
    _, optimizer = build("bf16")
    for attempt in (copy.copy, copy.deepcopy, pickle.dumps):
        with pytest.raises(TypeError, match="load_state_dict"):
            attempt(optimizer)


def test_float16_wrapper_refuses_fp16_without_a_grad_scaler():
    with pytest.raises(ValueError, match="grad_scaler=None with fp16=True"):
        Float16OptimizerWithFloat16Params(
            FusedAdam([nn.Parameter(torch.ones(2).half())]), config_for("fp16")
        )


def test_factory_refuses_invalid_values_set_on_a_config_and_wrong_argument_types():
    config = config_for("fp32")
    config.optimizer = "adamw"
    with pytest.raises(ValueError, match=r"optimizer='adamw'.*did you mean 'adam'"):
        get_megatron_optimizer(config, nn.Linear(1, 1))
    with pytest.raises(TypeError, match="config is a Linear"):
        get_megatron_optimizer(nn.Linear(1, 1), config_for("fp32"))
    with pytest.raises(TypeError, match="param_groups="):
        get_megatron_optimizer(config_for("fp32"), nn.Linear(1, 1).parameters())
    with pytest.warns(UserWarning, match="optimizer_cpu_offload=True offloads nothing"):
        get_megatron_optimizer(
            config_for("fp32", optimizer_cpu_offload=True, optimizer_offload_fraction=0.0),
            nn.Linear(1, 1),
        )


def test_step_succeeds_when_the_optimizer_has_no_params():
    optimizer = get_megatron_optimizer(config_for("bf16", 0.5), nn.Identity(), param_groups=[])
    assert optimizer.is_stub_optimizer and optimizer.step() == (True, 0.0, None)
    optimizer.load_state_dict(optimizer.state_dict())


@given(st.lists(st.integers(0, 1000), max_size=30), st.floats(0, 1))
def test_offload_plan_reaches_the_fraction_with_no_unneeded_param(sizes, fraction):
    chosen = plan_offload(sizes, fraction)
    held = sum(sizes[i] for i in chosen)
    assert held >= fraction * sum(sizes) - 1e-9 * sum(sizes)
    for index in chosen:
        assert held - sizes[index] < fraction * sum(sizes) + 1e-9 * sum(sizes)
