"""Formats of other libraries in detail: the parts of Megatron's chained optimizers, DeepSpeed's
groups."""

import pytest
import torch

from mp_optim.apps import convert as foreign
from mp_optim.apps.convert import ForeignGroup, ForeignState


def part(value):
    return {
        "optimizer": {
            "state": {0: {"exp_avg": torch.full((2,), value)}},
            "param_groups": [{"lr": 1e-3, "step": 4, "params": [0]}],
        }
    }


@pytest.mark.parametrize("key", [int, str])
def test_parts_are_in_the_order_of_their_numbers(key):
    names = [f"w{index}" for index in range(12)]
    chain = {key(index): part(float(index)) for index in reversed(range(12))}
    state = foreign.from_megatron(chain, names)
    assert [float(state.state[name]["exp_avg"][0]) for name in names] == list(range(12))
    assert [group.names for group in state.groups] == [(name,) for name in names]


def test_numbers_beside_other_keys_are_no_chain():
    with pytest.raises(ValueError, match=r"no state of Megatron's .*'0', 'common'"):
        foreign.from_megatron({0: part(1.0), "common": {}}, ["w"])
    with pytest.raises(ValueError, match=r"no state of Megatron's"):
        foreign.from_megatron({}, [])


def test_the_loss_scale_of_the_first_part_that_has_one():
    scaler = {"scale": torch.tensor([8.0])}
    chain = [
        part(1.0),
        {**part(2.0), "grad_scaler": scaler},
        {**part(3.0), "grad_scaler": {"scale": torch.ones(1)}},
    ]
    assert foreign.from_megatron(chain, list("abc")).grad_scaler == scaler
    assert foreign.from_megatron(chain[:1], ["a"]).grad_scaler is None


@pytest.mark.parametrize("groups", [None, [["c"], ["a"], [], ["b"]]])
def test_deepspeeds_groups_have_adams_settings_and_no_others(tmp_path, groups):
    settings = {
        "lr": 0.5,
        "betas": (0.8, 0.9),
        "eps": 1e-3,
        "weight_decay": 0.25,
        "bias_correction": True,
    }
    state = {
        name: {
            "step": torch.tensor(3.0),
            "master_param": torch.ones(2),
            "exp_avg": torch.ones(2),
            "exp_avg_sq": torch.ones(2),
        }
        for name in "abc"
    }
    own = (
        ForeignGroup(("a", "b"), {**settings, "max_lr": 9.0}),
        ForeignGroup(("c",), {"lr": 0.125, "is_expert": True}),
    )
    foreign.to_deepspeed(ForeignState(own, state, None), tmp_path, groups=groups)
    written = torch.load(tmp_path / "zero/optimizer_state.pt", weights_only=True)["param_groups"]
    if groups is None:
        assert written == [{**settings, "params": [0, 1]}, {"lr": 0.125, "params": [2]}]
    else:
        assert written == [
            {"lr": 0.125, "params": [2]},
            {**settings, "params": [0]},
            {**settings, "params": [1]},
        ]
