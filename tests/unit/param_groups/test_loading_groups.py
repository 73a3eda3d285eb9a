"""Loads of a state dict with other groups than the live ones."""

import pytest
import torch
from torch import nn

from mp_optim import get_megatron_optimizer
from support.models import config_for, same_bits


def build(split, **second):
    model = nn.ParameterDict({name: nn.Parameter(torch.ones(3)) for name in "ab"})
    groups = [{"params": [param], "param_names": [name]} for name, param in model.items()]
    groups[1] |= second
    joint = [{"params": list(model.values()), "param_names": list(model)}]
    optimizer = get_megatron_optimizer(
        config_for("fp32"), model, param_groups=groups if split else joint
    )
    for param in model.values():
        param.grad = torch.ones(3)
    optimizer.step()
    return model, optimizer


@pytest.mark.parametrize(
    "differing", [{"lr": 0.5}, {"weight_decay": 0.0}, {"betas": (0.5, 0.9)}, {"eps": 1e-3}]
)
def test_group_made_of_groups_with_other_settings_is_refused(differing):
    _, saved = build(True, **differing)
    model, optimizer = build(False)
    before = [param.detach().clone() for param in model.values()]
    moments = [state["exp_avg"].clone() for state in optimizer.state.values()]
    settings = {key: value for key, value in optimizer.param_groups[0].items() if key != "params"}
    with pytest.raises(ValueError, match="group"):
        optimizer.load_state_dict(saved.state_dict())
    assert all(map(same_bits, model.values(), before))
    assert all(map(same_bits, [state["exp_avg"] for state in optimizer.state.values()], moments))
    assert settings == {
        key: value for key, value in optimizer.param_groups[0].items() if key != "params"
    }
