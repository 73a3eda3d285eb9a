"""Torch's optimizer contract, chains, tied parameters, several chunks, timers."""

import copy
import pickle

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

from mp_optim import (
    ChainedOptimizer,
    Float16OptimizerWithFloat16Params,
    FP32Optimizer,
    FusedAdam,
    HybridDeviceOptimizer,
    checkpoint,
    get_megatron_optimizer,
)
from mp_optim.checkpoint.common import from_json
from mp_optim.offload.buckets import plan_offload
from support.models import DTYPES, build, config_for, same_bits, tokens_of, train
from support.offload import finish_early_work


def test_outer_groups_are_live_and_hold_the_models_parameters():
    model, optimizer = build("bf16", 0.5)
    held = [p for group in optimizer.param_groups for p in group["params"]]
    assert isinstance(optimizer, torch.optim.Optimizer) and {id(p) for p in held} == {
        id(p) for p in model.parameters()
    }
    names = [name for group in optimizer.param_groups for name in group["param_names"]]
    assert sorted(names) == sorted(name for name, _ in model.named_parameters())
    assert all(
        p.main_param is not p and p.main_param.dtype == torch.float32
        for p in held
        if p.dtype != torch.float32
    )


def test_state_is_a_view_by_current_tensor():
    model, optimizer = build("bf16", 0.5)
    assert len(optimizer.state) == len(list(model.parameters())) and model.dense in optimizer.state
    stranger = torch.zeros(1)
    assert stranger not in optimizer.state and "dense" not in optimizer.state
    with pytest.raises(KeyError, match="not a parameter"):
        optimizer.state[stranger]
    with pytest.raises(KeyError, match="not a parameter"):
        del optimizer.state[stranger]
    optimizer.state = {model.dense: {**optimizer.state[model.dense], "exp_avg": torch.ones(8, 8)}}
    assert optimizer.state[model.dense]["exp_avg"].eq(1).all()


def test_what_a_hook_adds_goes_into_a_checkpoint_and_state_beside_it_does_not(tmp_path):
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


def test_model_chunks_are_one_optimizer():
    chunks = [nn.Linear(4, 4).bfloat16(), nn.Linear(4, 4).bfloat16()]
    optimizer = get_megatron_optimizer(config_for("bf16", 0.5), chunks)
    assert {name for name, _ in optimizer.named_main_params()} == {
        "0.weight",
        "0.bias",
        "1.weight",
        "1.bias",
    }
    chunks[1](chunks[0](torch.ones(1, 4).bfloat16())).sum().backward()
    assert optimizer.step().success


def test_a_chain_grows_by_kind_and_answers_for_its_parts():
    model, optimizer = build("bf16", 0.5)
    dense, experts = optimizer.chained_optimizers
    late = nn.Parameter(torch.ones(3, dtype=torch.bfloat16))
    optimizer.add_param_group({"params": [("late", late)], "is_expert_parallel": True})
    assert len(experts.param_groups) == 2 and optimizer.param_groups[-1]["params"][0] is late
    late.grad = torch.ones_like(late)
    train_loss = train(model, optimizer, 2)
    assert train_loss and optimizer.state[late]["step"] == 0  # zero_grad came first
    optimizer.reload_model_params()
    optimizer.offload_to_cpu()
    optimizer.restore_from_cpu()
    assert dict(optimizer.named_main_params()).keys() == {
        n for n, _ in model.named_parameters()
    } | {"late"}
    assert optimizer.device == torch.device("cpu") and not optimizer.is_stub_optimizer
    assert optimizer.init_state() is None and optimizer.has_separate_main(optimizer.slots()[0])
    with pytest.raises(AttributeError, match="chained_optimizers"):
        _ = optimizer.optimizer
    assert ChainedOptimizer([dense]).optimizer is dense.optimizer


@pytest.mark.parametrize("edit", ["param", "group"])
def test_edited_lists_of_a_chain_are_refused(edit):
    model, optimizer = build("bf16")
    if edit == "param":
        optimizer.param_groups[0]["params"].pop()
    else:
        optimizer.param_groups.pop()
    for param in model.parameters():
        param.grad = torch.ones_like(param)
    before = model.embed.detach().clone()
    for use in (optimizer.step, optimizer.state_dict):
        with pytest.raises(ValueError, match="param_groups"):
            use()
    assert torch.equal(model.embed, before)


def test_numbers_of_a_chain_are_those_of_its_members():
    settings = {"offload_mode": "speculative", "clip_grad": 0.0}
    model, optimizer = build("bf16", 1.0, **settings)
    train(model, optimizer, 3)
    of_members = [member.metrics() for member in optimizer.chained_optimizers]
    metrics = optimizer.metrics()
    for name in ("speculation_hits", "speculation_redone", "bytes_down", "bytes_up"):
        assert metrics[name] == sum(each[name] for each in of_members)
    assert all(each["speculation_hits"] > 0 for each in of_members)
    assert metrics["steps"] == 3


def test_state_of_a_chain_follows_what_was_written():
    model, optimizer = build("bf16")
    train(model, optimizer, 1)
    written = model.dense, model.experts["up"]
    with torch.no_grad():
        for param in written:
            param.mul_(2.0)
    for param in written:
        assert same_bits(optimizer.state[param]["master_param"], param.detach().float())


@pytest.mark.parametrize("leaves", [False, True])
def test_a_chain_that_leaves_the_accelerator_lets_go_of_what_was_begun(leaves):
    model, optimizer = build("bf16", 1.0, offload_mode="speculative", clip_grad=0.0)
    train(model, optimizer, 1)
    model(tokens_of(1)).backward()
    finish_early_work(optimizer)
    if leaves:
        optimizer.offload_to_cpu()
        optimizer.restore_from_cpu()
    before = [member.metrics()["speculation_hits"] for member in optimizer.chained_optimizers]
    optimizer.step()
    hits = [member.metrics()["speculation_hits"] for member in optimizer.chained_optimizers]
    assert [now > then for now, then in zip(hits, before, strict=True)] == [not leaves] * 2


def test_a_chain_needs_parts_of_one_config():
    def part(**settings):
        return FP32Optimizer(
            FusedAdam([nn.Parameter(torch.ones(1))]), config_for("fp32", **settings)
        )

    with pytest.raises(ValueError, match="empty"):
        ChainedOptimizer([])
    with pytest.raises(ValueError, match="configs differ"):
        ChainedOptimizer([part(), part(clip_grad=0.5)])


def test_timers_are_started_and_stopped():
    events = []

    class Timer:
        def __init__(self, name):
            self.name = name

        def start(self, barrier):
            events.append((self.name, "start", barrier))

        def stop(self):
            events.append((self.name, "stop"))

    def timers(name, log_level):
        assert log_level == 1  # what barrier_with_L1_time goes by
        return Timer(name)

    for barrier in (True, False):
        events.clear()
        model, optimizer = build("bf16", timers=timers, barrier_with_L1_time=barrier)
        train(model, optimizer, 1)
        assert events == [
            ("optimizer-clip-main-grad", "start", barrier),
            ("optimizer-clip-main-grad", "stop"),
            ("optimizer-inner-step", "start", barrier),
            ("optimizer-inner-step", "stop"),
        ]


@pytest.mark.parametrize("fraction", [0.0, 1.0])
def test_a_parameter_that_was_frozen_at_first_is_taken_up(fraction):
    frozen, trained = (nn.Parameter(torch.ones(4, dtype=torch.bfloat16)) for _ in range(2))
    frozen.requires_grad_(False)
    inner = HybridDeviceOptimizer([frozen, trained], fraction, lr=0.1)
    optimizer = Float16OptimizerWithFloat16Params(inner, config_for("bf16", clip_grad=0.0))
    for expected in (0, 1):
        for param in (frozen, trained):
            param.grad = torch.ones_like(param) if param.requires_grad else None
        assert optimizer.step().success
        assert len(optimizer.state) == 1 + expected
        frozen.requires_grad_(True)
    assert optimizer.state[frozen]["step"] == 1 and optimizer.state[trained]["step"] == 2
    assert frozen.main_param.dtype == torch.float32 and (frozen.detach() < 1).all()


def test_copies_and_pickles_are_refused():
    _, optimizer = build("bf16")
    for attempt in (copy.copy, copy.deepcopy, pickle.dumps):
        with pytest.raises(TypeError, match="load_state_dict"):
            attempt(optimizer)


def test_fp16_needs_a_loss_scale():
    with pytest.raises(ValueError, match="grad_scaler=None with fp16=True"):
        Float16OptimizerWithFloat16Params(
            FusedAdam([nn.Parameter(torch.ones(2).half())]), config_for("fp16")
        )


def test_defaults_that_differ_by_place_have_to_be_given():
    params = [nn.Parameter(torch.ones(2)) for _ in range(2)]
    with pytest.raises(
        ValueError, match=r"weight_decay is 0\.0 by default on the device and 0\.01 on the host"
    ):
        HybridDeviceOptimizer(params, 0.5, torch.optim.AdamW, lr=0.1)
    HybridDeviceOptimizer(params, 0.5, torch.optim.AdamW, lr=0.1, weight_decay=0.0)


def test_describe_names_what_steps():
    inner = FusedAdam([("w", nn.Parameter(torch.ones(2, dtype=torch.bfloat16)))], backend="torch")
    rows = Float16OptimizerWithFloat16Params(inner, config_for("bf16")).describe().rows
    assert [row.backend for row in rows] == ["torch"]


def test_a_config_changed_since_and_wrong_arguments_are_refused():
    config = config_for("fp32")
    config.optimizer = "adamw"
    with pytest.raises(ValueError, match=r"optimizer='adamw'.*did you mean 'adam'"):
        get_megatron_optimizer(config, nn.Linear(1, 1))
    with pytest.raises(TypeError, match="config is a Linear"):
        get_megatron_optimizer(nn.Linear(1, 1), config_for("fp32"))
    with pytest.raises(TypeError, match="param_groups="):
        get_megatron_optimizer(config_for("fp32"), nn.Linear(1, 1).parameters())
    with pytest.warns(UserWarning, match="offloads nothing"):
        get_megatron_optimizer(
            config_for("fp32", optimizer_cpu_offload=True, optimizer_offload_fraction=0.0),
            nn.Linear(1, 1),
        )


def test_a_changed_shape_is_refused_by_name():
    model, optimizer = build("bf16", experts=False)
    train(model, optimizer, 1)
    smaller = nn.Parameter(torch.zeros(4, 8, dtype=torch.bfloat16))
    for group in optimizer.param_groups:
        group["params"] = [smaller if p is model.dense else p for p in group["params"]]
    with pytest.raises(
        ValueError, match=r"dense: the parameter's local shape changed from \(8, 8\) to \(4, 8\)"
    ):
        optimizer.step()


def test_meta_parameters_count_as_their_own_device():
    params = [nn.Parameter(torch.empty(2, device="meta"))]
    hybrid = HybridDeviceOptimizer(params, 0.0)
    assert hybrid.place(hybrid.slots()[0]) == "device"
    with pytest.raises(ValueError, match=r"offload_fraction=1\.5"):
        HybridDeviceOptimizer(params, 1.5)


def test_without_parameters_there_is_nothing_to_do():
    optimizer = get_megatron_optimizer(config_for("bf16", 0.5), nn.Identity(), param_groups=[])
    assert optimizer.is_stub_optimizer and optimizer.step() == (True, 0.0, None)
    optimizer.load_state_dict(optimizer.state_dict())


@given(st.lists(st.integers(0, 1000), max_size=30), st.floats(0, 1))
def test_a_plan_holds_at_least_the_fraction_and_needs_its_last_choice(sizes, fraction):
    chosen = plan_offload(sizes, fraction)
    held = sum(sizes[i] for i in chosen)
    assert held >= fraction * sum(sizes) - 1e-9 * sum(sizes)
    for index in chosen:
        assert held - sizes[index] < fraction * sum(sizes) + 1e-9 * sum(sizes)


shapes = st.lists(
    st.one_of(st.just(()), st.lists(st.integers(0, 40), min_size=1, max_size=3).map(tuple)),
    min_size=1,
    max_size=6,
)


@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    shapes,
    st.floats(0, 1),
    st.sampled_from(sorted(DTYPES)),
    st.sampled_from(["adam", "lamb", "sgd", "lion"]),
    st.integers(0, 2**16),
)
def test_any_shapes_give_the_same_bits_at_any_fraction(shapes, fraction, precision, rule, seed):
    def run(fraction):
        generator = torch.Generator().manual_seed(seed)
        model = nn.ParameterDict(
            {
                str(i): nn.Parameter(torch.randn(shape, generator=generator).to(DTYPES[precision]))
                for i, shape in enumerate(shapes)
            }
        )
        optimizer = get_megatron_optimizer(config_for(precision, fraction, optimizer=rule), model)
        for _ in range(2):
            for param in model.values():
                param.grad = torch.randn(param.shape, generator=generator).to(param.dtype) * 100
            optimizer.get_loss_scale()  # says that they are scaled
            assert optimizer.step().success
        return [p.detach() for p in model.values()]

    assert all(same_bits(a, b) for a, b in zip(run(0.0), run(fraction), strict=True))
