"""``optimizer.state`` as a mapping."""

import pytest
import torch
from torch import nn

from mp_optim import get_megatron_optimizer
from support.models import build, config_for, same_bits, train


@pytest.mark.parametrize("fraction", [0.0, 1.0])
def test_state_view_lists_exactly_the_trainable_params(fraction):
    model = nn.ParameterDict(
        {name: nn.Parameter(torch.ones(3, dtype=torch.bfloat16)) for name in "abc"}
    )
    model["b"].requires_grad_(False)
    optimizer = get_megatron_optimizer(config_for("bf16", fraction), model)
    optimizer.add_param_group(
        {"params": [("late", nn.Parameter(torch.ones(2), requires_grad=False))]}
    )
    late = optimizer.param_groups[-1]["params"][0]
    expected = [model["a"], model["c"]]
    assert len(optimizer.state) == 2
    assert list(map(id, optimizer.state)) == list(map(id, expected))
    assert [id(param) for param, _ in optimizer.state.items()] == list(map(id, expected))
    assert all(param in optimizer.state for param in expected)
    assert model["b"] not in optimizer.state and late not in optimizer.state
    assert torch.ones(3) not in optimizer.state
    assert "a" not in optimizer.state
    assert None not in optimizer.state
    assert optimizer.state.get(torch.ones(3)) is None
    with pytest.raises(KeyError, match="replaced"):
        optimizer.state[torch.ones(3)]
    with pytest.raises(TypeError, match=r"call clear\(\)"):
        optimizer.state.popitem()
    del optimizer.state[model["a"]]
    assert len(optimizer.state) == 2  # Deleting an entry resets its state.


READINGS = {
    "item": lambda state: {"exp_avg": state["exp_avg"]},
    "get": lambda state: {"exp_avg": state.get("exp_avg")},
    "items": lambda state: dict(state.items()),
    "values": lambda state: dict(zip(state, state.values(), strict=True)),
    "dict": dict,
    "copy": lambda state: state.copy(),
    "or": lambda state: state | {},
}


@pytest.mark.parametrize("reading", READINGS)
def test_state_entry_reads_present_values_after_a_later_step(reading):
    model, optimizer = build("bf16-4bit", experts=False)
    train(model, optimizer, 1)
    state = optimizer.state[model.dense]
    train(model, optimizer, 1, start=1)
    found = READINGS[reading](state)
    now = optimizer.state_dict()["state"][1]
    full = optimizer.state_dict(full_precision=True)["state"][1]
    now = {key: full.get(key, value) for key, value in now.items()}
    assert "exp_avg" in found and found.keys() <= now.keys()
    assert all(same_bits(value, now[key]) for key, value in found.items())
