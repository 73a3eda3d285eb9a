"""A load of a state dict matches the present model, or raises and changes nothing."""

import copy
import itertools

import pytest
import torch
from torch import nn

import mp_optim
from mp_optim import get_megatron_optimizer
from support.models import build, config_for, same_bits, train
from support.prints import differing, print_of

PLACES = [(0.0, "sync"), (0.4, "speculative")]


def make(precision, place, seed=0):
    fraction, mode = place
    settings = {"offload_mode": mode} if fraction else {}
    return build(precision, fraction, seed=seed, clip_grad=0.0, **settings)


NAN = float("nan")


def set_group(**settings):
    return lambda state: state["param_groups"][0].update(settings)


def set_state(**tensors):
    return lambda state: state["state"][1].update(tensors)


def set_scaler(**values):
    return lambda state: state["grad_scaler"].update(
        {key: torch.tensor(value) for key, value in values.items()}
    )


def like(dtype):
    return lambda state: state["state"][1].update(
        exp_avg=state["state"][1]["exp_avg"].to(dtype) + 1
    )


def master_like(dtype):
    return lambda state: state["state"][1].update(
        master_param=state["state"][1]["master_param"].to(dtype)
    )


REFUSED = {
    "no state": (lambda s: s.pop("state"), "'state'"),
    "no groups": (lambda s: s.pop("param_groups"), "'param_groups'"),
    "one empty": (lambda s: s["state"][1].clear(), "no state for 1 of 7 parameters: dense"),
    "foreign index": (
        lambda s: s["param_groups"][0].update(params=[77, 78, 79]),
        "none of its param groups",
    ),
    "one index twice": (lambda s: s["param_groups"][0].update(params=[0, 0, 2]), "more than once"),
    "a name twice": (
        lambda s: s["param_groups"][0].update(param_names=["embed", "embed", "x"]),
        "the name embed is not unique",
    ),
    "too few names": (lambda s: s["param_groups"][0].update(param_names=["embed"]), "param_names"),
    "lr None": (set_group(lr=None), "lr=None"),
    "lr infinite": (set_group(lr=10**400), "lr=1000"),
    "lr tensor": (set_group(lr=torch.tensor(NAN)), "lr=tensor"),
    "betas None": (set_group(betas=None), "betas=None"),
    "decay text": (set_group(weight_decay="1"), "weight_decay='1'"),
    "a flag": (set_group(adam_w_mode="no"), "adam_w_mode='no'"),
    "max_lr": (set_group(max_lr=NAN), "max_lr=nan"),
    "step 2.5": (set_state(step=2.5), r"step=2\.5"),
    "step 1e30": (set_state(step=1e30), "step"),
    "moment int64": (like(torch.int64), "int64"),
    "moment None": (set_state(exp_avg=None), "NoneType"),
    "moment list": (set_state(exp_avg=[1.0]), "list"),
    "moment on meta": (set_state(exp_avg=torch.empty(8, 8, device="meta")), "meta"),
    "negative square": (set_state(exp_avg_sq=-torch.ones(8, 8)), "negative"),
    "main int": (master_like(torch.int32), "int32"),
    "scaler None": (lambda s: s.update(grad_scaler=None), "grad_scaler"),
    "scaler empty": (lambda s: s.update(grad_scaler={}), "grad_scaler"),
    "scaler text": (lambda s: s["grad_scaler"].update(scale="a"), "scale='a'"),
    "two scales": (set_scaler(scale=[1.0, 1.0]), "scale"),
    "tracker -5": (set_scaler(hysteresis_tracker=[-5]), "hysteresis_tracker"),
}


@pytest.mark.parametrize("fraction", [0.0, 0.5])
def test_load_state_dict_names_the_cause_of_a_refusal_and_changes_nothing(fraction):
    model, source = build("fp16", 0.0, initial_loss_scale=8.0)
    train(model, source, 2)
    good = source.state_dict()
    model, optimizer = build("fp16", fraction, seed=1)
    train(model, optimizer, 1)
    before = print_of(model, optimizer)
    for label, (spoil, named) in REFUSED.items():
        bad = copy.deepcopy(good)
        spoil(bad)
        with pytest.raises(ValueError, match=named):
            optimizer.load_state_dict(bad)
        assert differing(before, print_of(model, optimizer)) == [], label
    for nothing in (None, [], {}):
        with pytest.raises(ValueError, match=r"state.dict"):
            optimizer.load_state_dict(nothing)
    with pytest.warns(UserWarning, match="overwritten with these values"):
        optimizer.load_state_dict(good)
    assert all(
        same_bits(value, optimizer.state_dict()["state"][index][key])
        for index, state in good["state"].items()
        for key, value in state.items()
    )


def test_load_state_dict_rounds_state_only_with_convert():
    model, optimizer = build("fp16", initial_loss_scale=8.0)
    train(model, optimizer, 1)
    state = copy.deepcopy(optimizer.state_dict())
    for slot_state in state["state"].values():
        for key in slot_state.keys() & {"exp_avg", "master_param"}:
            slot_state[key] = slot_state[key].double() * (1 + 1e-12)
    del state["grad_scaler"]
    with pytest.raises(ValueError, match=r"float64|grad_scaler"):
        optimizer.load_state_dict(state)
    optimizer.load_state_dict(state, convert=True)
    assert optimizer.get_loss_scale() == 8.0
    state["state"][1]["master_param"] = state["state"][1]["master_param"].to(torch.complex64)
    with pytest.raises(ValueError, match="complex64"):
        optimizer.load_state_dict(state, convert=True)


def test_fp32_optimizer_over_torch_adamw_has_no_state_after_loading_empty_state():
    def stack():
        torch.manual_seed(0)
        model = nn.Linear(3, 2)
        return model, mp_optim.FP32Optimizer(
            torch.optim.AdamW(model.parameters(), lr=0.1), config_for("fp32")
        )

    model, optimizer = stack()
    untouched = copy.deepcopy(optimizer.state_dict())
    assert untouched["state"] == {}
    for _ in range(2):
        model(torch.ones(1, 3)).sum().backward()
        optimizer.step()
    optimizer.load_state_dict(untouched)
    assert optimizer.state_dict()["state"] == {}


def test_set_optimizer_state_dict_takes_loss_scale_from_a_pre_hook():
    from torch.distributed.checkpoint.state_dict import (
        get_optimizer_state_dict,
        set_optimizer_state_dict,
    )

    model, optimizer = build("fp16")
    train(model, optimizer, 2)
    scaler = copy.deepcopy(optimizer.grad_scaler.state_dict())
    saved = copy.deepcopy(get_optimizer_state_dict(model, optimizer))
    train(model, optimizer, 1)
    with pytest.raises(ValueError, match="grad_scaler"):
        set_optimizer_state_dict(model, optimizer, saved)
    optimizer.register_load_state_dict_pre_hook(lambda _, state: {**state, "grad_scaler": scaler})
    with pytest.warns(UserWarning, match="overwritten with these values"):
        set_optimizer_state_dict(model, optimizer, saved)
    assert optimizer.grad_scaler.state_dict() == scaler
    assert optimizer.state[model.dense]["step"] == 2


def test_load_state_dict_merges_groups_only_when_their_settings_are_equal():
    model, optimizer = build("bf16")
    train(model, optimizer, 2)
    saved = copy.deepcopy(optimizer.state_dict())
    other_model, _ = build("bf16")
    other_model.load_state_dict(model.state_dict())
    other = get_megatron_optimizer(
        config_for("bf16", lr=0.5), other_model, expert_predicate=lambda param, name: False
    )
    assert len(other.param_groups) < len(optimizer.param_groups)
    other.load_state_dict(saved)
    assert [group["lr"] for group in other.param_groups] == [1e-2] * len(other.param_groups)
    assert train(other_model, other, 2, start=2) == train(model, optimizer, 2, start=2)
    optimizer.load_state_dict(other.state_dict())
    assert sum(group["is_expert_parallel"] for group in optimizer.param_groups) == 1
    saved["param_groups"][-1]["lr"] = 0.25
    with pytest.raises(ValueError, match=r"cannot be merged \(lr is \[0\.01, 0\.25\]\)"):
        other.load_state_dict(saved)


@pytest.mark.parametrize(
    ("precision", "place"), [*itertools.product(["bf16", "fp16", "bf16-master"], PLACES)]
)
def test_load_state_dict_writes_parameters_from_main_params_when_weights_differ(precision, place):
    model, optimizer = make(precision, place)
    train(model, optimizer, 3)
    other_model, other = make(precision, place, seed=5)
    half = {name: value for name, value in model.state_dict().items() if "experts" not in name}
    # A framework that renames parameters loads such a half, too.
    other_model.load_state_dict(half, strict=False)
    with pytest.warns(
        UserWarning, match=r"2 parameters .* experts\.(up, experts\.down|down, experts\.up)"
    ):
        other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert all(
        same_bits(a, b) for a, b in zip(model.parameters(), other_model.parameters(), strict=True)
    )
    assert train(other_model, other, 2, start=3) == train(model, optimizer, 2, start=3)


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("precision", ["bf16-remainder", "bf16-8bit8", "bf16-8bit"])
def test_step_refuses_remainders_and_changes_nothing_when_weights_differ(precision, place, recwarn):
    model, optimizer = make(precision, place)
    train(model, optimizer, 3)
    saved = copy.deepcopy(optimizer.state_dict())
    other_model, other = make(precision, place, seed=5)
    half = {name: value for name, value in model.state_dict().items() if "experts" not in name}
    other_model.load_state_dict(half, strict=False)
    other.load_state_dict(saved)
    before = [param.detach().clone() for param in other_model.parameters()]
    with pytest.raises(
        ValueError, match=r"2 parameters differ from those .* experts\..*reload_model_params"
    ):
        train(other_model, other, 1, start=3)
    for leave in (
        other.state_dict,
        lambda: list(other.named_main_params()),
        lambda: other.state[other_model.experts["up"]],
    ):
        with pytest.raises(ValueError, match="remainders were saved"):
            leave()
    # Weights and remainder of this parameter belong together.
    assert other.state[other_model.dense]["step"] == 3
    assert all(same_bits(a, b) for a, b in zip(before, other_model.parameters(), strict=True))
    # Loading the weights afterwards is as good as loading them first.
    other_model.load_state_dict(model.state_dict())
    assert train(other_model, other, 2, start=3) == train(model, optimizer, 2, start=3)
    assert not [w for w in recwarn if "written from" in str(w.message)]


def test_step_succeeds_when_remainders_of_other_weights_were_dropped():
    model, optimizer = build("bf16-remainder")
    train(model, optimizer, 3)
    saved = copy.deepcopy(optimizer.state_dict())
    for forget in ("reload", "convert", "old"):
        other_model, other = build("bf16-remainder", seed=5)
        state = copy.deepcopy(saved)
        if forget == "old":
            for group in state["param_groups"]:
                group.pop("param_checksums", None)
        other.load_state_dict(state, convert=forget == "convert")
        if forget == "reload":
            other.reload_model_params()
        train(other_model, other, 1, start=3)
    wide = {"store_param_remainders": False}
    _, other = build("bf16-remainder", seed=5, **wide)
    # FP32 main params would be joined from these remainders and the wrong upper halves.
    with pytest.raises(ValueError, match="remainders were saved"):
        other.load_state_dict(saved)
