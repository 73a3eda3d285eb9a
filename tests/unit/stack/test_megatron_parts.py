"""The parts of Megatron's chained optimizers, as its files number them."""

import pytest
import torch

from mp_optim.checkpoint import foreign


def part(value):
    return {"optimizer": {"state": {0: {"exp_avg": torch.full((2,), value)}},
                          "param_groups": [{"lr": 1e-3, "step": 4, "params": [0]}]}}


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
    chain = [part(1.0), {**part(2.0), "grad_scaler": scaler}, {**part(3.0), "grad_scaler": {"scale": torch.ones(1)}}]
    assert foreign.from_megatron(chain, list("abc")).grad_scaler == scaler
    assert foreign.from_megatron(chain[:1], ["a"]).grad_scaler is None
