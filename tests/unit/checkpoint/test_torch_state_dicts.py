"""Compact state keeps its bits through torch's state-dict functions and their collectives."""

import pytest
import torch

from support.launch import results_of_ranks
from support.models import build, train
from support.prints import differing, print_of


def test_compact_state_keeps_its_bits_through_torch_state_dict_functions(tmp_path):
    found = results_of_ranks("carried_state", 2, tmp_path, timeout=200)
    assert found[0].keys() == found[1].keys() and len(found[0]) == 36
    for of_rank in found:
        assert [name for name, is_same in of_rank.items() if not is_same] == []


def test_state_dict_widens_remainders_and_load_refuses_values_beyond_16_bits(one_rank):
    model, optimizer = build("bf16-remainder", 0.5)
    train(model, optimizer, 2)
    state = optimizer.state_dict()
    dtypes = {held["remainder"].dtype for held in state["state"].values() if "remainder" in held}
    assert dtypes == {torch.int32}
    assert optimizer.state[model.dense]["remainder"].dtype == torch.int16
    before = print_of(model, optimizer)
    train(model, optimizer, 1)
    model.load_state_dict(build("bf16-remainder", seed=5)[0].state_dict())
    index = list(dict(model.named_parameters())).index("dense")
    state["state"][index]["remainder"][0, 0] = 1 << 15
    after = print_of(model, optimizer)
    with pytest.raises(ValueError, match=r"dense\.remainder: has values beyond 16 bits"):
        optimizer.load_state_dict(state, convert=True)
    assert differing(after, print_of(model, optimizer)) == []
    assert differing(before, after)


@pytest.mark.parametrize("way", ["state", "load_slot_state"])
def test_load_slot_state_and_state_assignment_narrow_a_32_bit_remainder_to_16_bits(way):
    source, target = build("bf16-8bit", seed=1), build("bf16-8bit", seed=7)
    train(*source, 2)
    state = dict(source[1].state[source[0].dense])
    with torch.no_grad():
        target[0].dense.copy_(source[0].dense)
    expected = state["remainder"]
    state = {**state, "remainder": expected.int()}
    if way == "state":
        target[1].state[target[0].dense] = state
    else:
        names = map(target[1].slot_name, target[1].slots())
        target[1].load_slot_state(target[1].slots()[[*names].index("dense")], state)
    found = target[1].state[target[0].dense]["remainder"]
    assert found.dtype == torch.int16 and torch.equal(found, expected)
