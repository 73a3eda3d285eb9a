"""Settings by name pattern: the argument ``overrides`` of the optimizer classes."""

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import nn

import mp_optim


def model() -> nn.Module:
    torch.manual_seed(0)
    made = nn.Module()
    made.layers = nn.ModuleList([nn.Linear(6, 6) for _ in range(3)])
    made.router = nn.Linear(6, 4)
    made.norm = nn.LayerNorm(6)
    return made.bfloat16()


OVERRIDES = {"router.*": {"lr": 3e-3}, "*.bias|*norm*": {"weight_decay": 0.0}}


def by_hand(module: nn.Module) -> list[dict[str, Any]]:
    """Return the param groups that OVERRIDES describe, written by hand."""
    groups: dict[tuple[bool, bool], dict[str, Any]] = {}
    for name, param in module.named_parameters():
        slow, bare = name.startswith("router"), name.endswith("bias") or "norm" in name
        own = ({"lr": 3e-3} if slow else {}) | ({"weight_decay": 0.0} if bare else {})
        groups.setdefault((slow, bare), {**own, "params": []})["params"].append((name, param))
    return list(groups.values())


def step(module: nn.Module, optimizer: torch.optim.Optimizer, number: int) -> None:
    generator = torch.Generator().manual_seed(number)
    for param in module.parameters():
        param.grad = torch.randn(param.shape, generator=generator).to(param.dtype)
    optimizer.step()


@pytest.mark.quick
@pytest.mark.parametrize("kind", ["Adam", "AdamW", "LAMB", "Lion", "SGD", "Muon"])
@pytest.mark.parametrize("offload", [0.0, 1.0])
def test_overrides_train_like_param_groups_written_by_hand(kind, offload):
    by_pattern, written = model(), model()
    cls = getattr(mp_optim, kind)
    one = cls(by_pattern.named_parameters(), lr=1e-2, overrides=OVERRIDES, offload=offload)
    other = cls(by_hand(written), lr=1e-2, offload=offload)
    for number in range(3):
        step(by_pattern, one, number)
        step(written, other, number)
    for (name, param), expected in zip(
        by_pattern.named_parameters(), written.parameters(), strict=True
    ):
        assert torch.equal(param, expected), name
    assert not torch.equal(by_pattern.router.weight, model().router.weight)


def test_overrides_apply_to_groups_added_later_and_survive_copies():
    module = model()
    optimizer = mp_optim.AdamW(module.named_parameters(), lr=1e-2, overrides=OVERRIDES)
    optimizer.param_groups[0]["lr"] = 0.5  # A schedule has set this rate.
    copied, _ = pickle.loads(pickle.dumps((optimizer, module)))
    assert [group["lr"] for group in copied.param_groups] == [0.5, 1e-2, 3e-3, 3e-3]
    for each in (optimizer, copied, copy.deepcopy(optimizer)):
        each.add_param_group({"params": [("head.bias", nn.Parameter(torch.ones(2)))]})
        assert each.param_groups[-1]["weight_decay"] == 0.0


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        ({"rooter.*": {"lr": 1.0}}, r"overrides\['rooter\.\*'\]: no parameter has such a name"),
        ({"router.*": {"lrr": 1.0}}, r"lrr=1\.0 is not a setting .*did you mean 'lr'"),
        ({"*.bias": {"lr": 1.0}, "router.*": {"lr": 2.0}}, r"router\.bias: overrides disagree"),
        ({"router.*": {"lr": -1.0}}, r"lr=-1\.0: must be a finite number"),
    ],
)
def test_overrides_refuse_unknown_patterns_and_conflicting_settings(overrides, words):
    with pytest.raises(ValueError, match=words):
        mp_optim.AdamW(model().named_parameters(), overrides=overrides)


def test_overrides_are_refused_when_params_have_no_names():
    with pytest.raises(ValueError, match=r"have no names; pass named_parameters\(\)"):
        mp_optim.AdamW(model().parameters(), overrides=OVERRIDES)
