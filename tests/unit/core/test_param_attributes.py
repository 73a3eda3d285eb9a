"""Every entry point refuses parameter attributes that are not supported."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import mp_optim
from mp_optim import (
    Float16OptimizerWithFloat16Params,
    FP32Optimizer,
    FusedAdam,
    OptimizerConfig,
    ProcessGroups,
    get_megatron_optimizer,
)
from mp_optim.core.param_attributes import REFUSED

pytestmark = pytest.mark.usefixtures("one_rank")


CONFIG = OptimizerConfig(lr=1e-2)


def _wrapper(wrapper: Any, **settings: Any) -> Callable[[nn.Module], Any]:
    def build(model: nn.Module) -> Any:
        config = OptimizerConfig(lr=1e-2, **settings)
        return wrapper(FusedAdam(model.parameters(), lr=1e-2), config)

    return build


def _stepped(optimizer: Any, model: nn.Module) -> None:
    for param in model.parameters():
        param.grad = torch.ones_like(param)
    optimizer.step()


ENTRY_POINTS: dict[str, Callable[[nn.Module], Any]] = {
    "factory": lambda model: get_megatron_optimizer(CONFIG, model),
    "distributed": lambda model: get_megatron_optimizer(
        OptimizerConfig(lr=1e-2, use_distributed_optimizer=True), model
    ),
    "groups": lambda model: get_megatron_optimizer(
        CONFIG, model, param_groups=[{"params": list(model.parameters())}]
    ),
    "fp32": _wrapper(FP32Optimizer),
    "bf16": _wrapper(Float16OptimizerWithFloat16Params, bf16=True),
    "adamw": lambda model: _stepped(mp_optim.AdamW(model.named_parameters()), model),
    "muon": lambda model: _stepped(mp_optim.Muon(model.named_parameters()), model),
}


@pytest.mark.parametrize("entry_point", ENTRY_POINTS)
@pytest.mark.parametrize("attribute", REFUSED)
def test_optimizer_names_a_parameter_attribute_when_the_attribute_is_not_supported(
    attribute, entry_point
):
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    if entry_point == "bf16":
        model.bfloat16()
    setattr(model[1].weight, attribute, False)
    ENTRY_POINTS[entry_point](model)
    again = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)).to(model[0].weight.dtype)
    setattr(again[1].weight, attribute, True)
    before = [param.detach().clone() for param in again.parameters()]
    with pytest.raises(ValueError, match=rf"{attribute}=True on ") as refusal:
        ENTRY_POINTS[entry_point](again)
    assert REFUSED[attribute] in str(refusal.value)
    assert all(map(torch.equal, again.parameters(), before))


@pytest.mark.parametrize("name", ["gtp_remat", "expt_gtp_remat"])
def test_process_groups_refuse_ranks_of_generalised_tensor_parallelism(name):
    groups = {"gtp_remat": None, "expt_gtp_remat": SimpleNamespace(size=lambda: 1)}
    ProcessGroups.from_attributes(SimpleNamespace(**groups))
    groups[name] = SimpleNamespace(size=lambda: 2)
    with pytest.raises(ValueError, match=rf"^{name} has 2 ranks: .*weight-shards"):
        ProcessGroups.from_attributes(SimpleNamespace(**groups))
