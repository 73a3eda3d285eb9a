"""Groups that are added one at a time make the optimizer that they would have made together."""

import pytest
import torch
from torch import nn

from mp_optim import get_megatron_optimizer
from support.models import config_for, same_bits

SETTINGS = [{}, {"lr": 0.5}, {"weight_decay": 0.0}, {"betas": (0.5, 0.9)}, {"eps": 1e-2}]


def model_of(count):
    generator = torch.Generator().manual_seed(0)
    return nn.ParameterDict(
        {
            f"p{index}": nn.Parameter(torch.randn(3 + index, generator=generator).bfloat16())
            for index in range(count)
        }
    )


def groups_of(model):
    return [
        {"params": [param], "param_names": [name], **settings}
        for (name, param), settings in zip(model.items(), SETTINGS, strict=True)
    ]


def trained(start, fraction, **settings):
    model = model_of(len(SETTINGS))
    first = nn.ParameterDict({name: model[name] for name in list(model)[:start]})
    groups, config = groups_of(model), config_for("bf16", fraction, **settings)
    optimizer = get_megatron_optimizer(config, first, param_groups=groups[:start])
    for group in groups[start:]:
        optimizer.add_param_group(group)
    for step in range(3):
        generator = torch.Generator().manual_seed(step)
        for param in model.values():
            param.grad = torch.randn(param.shape, generator=generator).bfloat16()
        optimizer.step()
    plain = [
        {key: value for key, value in group.items() if key != "params"}
        for group in optimizer.param_groups
    ]
    state = optimizer.state_dict()["state"]
    tensors = {
        f"{index}.{key}": value for index, entry in state.items() for key, value in entry.items()
    }
    return plain, {**tensors, **{name: param.detach() for name, param in model.items()}}


@pytest.mark.parametrize("fraction", [0.0, 1.0])
@pytest.mark.parametrize("rule", ["adam", "lamb"])
def test_groups_added_one_at_a_time_are_those_given_at_once(rule, fraction):
    plain, tensors = trained(len(SETTINGS), fraction, optimizer=rule)
    for start in range(1, len(SETTINGS)):
        later_plain, later = trained(start, fraction, optimizer=rule)
        assert later_plain == plain
        assert later.keys() == tensors.keys()
        assert [key for key, value in tensors.items() if not same_bits(later[key], value)] == []
