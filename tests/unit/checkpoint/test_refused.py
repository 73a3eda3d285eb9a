"""A refused load changes nothing on any rank."""

import re
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler

from mp_optim import BrokenOffError, checkpoint
from mp_optim.checkpoint.common import as_json, from_json
from support.forged import replaced
from support.launch import results_of_ranks
from support.models import COMPACT, build, train
from support.prints import differing, print_of

LOSING = sorted(set(COMPACT) - {"remainder"})
"""Storage formats that cannot hold FP32 state without loss."""

LOSS = r"cannot hold without loss|more bits than"


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    model, optimizer = build("bf16")
    train(model, optimizer, 2)
    path = tmp_path_factory.mktemp("source")
    checkpoint.save(path, model, optimizer)
    return path, optimizer.state_dict()


@pytest.mark.parametrize("form", LOSING)
def test_load_refuses_state_that_would_lose_bits_and_changes_nothing(source, form):
    path, state = source
    model, optimizer = build(f"bf16-{form}", 0.5, seed=7)
    train(model, optimizer, 1)
    before = print_of(model, optimizer)
    with pytest.raises(ValueError, match=LOSS):
        optimizer.load_state_dict(state)
    assert differing(before, print_of(model, optimizer)) == []
    with pytest.raises(ValueError, match=LOSS):
        checkpoint.load(path, model, optimizer)
    assert differing(before, print_of(model, optimizer)) == []


def lower_second_moment(state: dict[str, Any]) -> None:
    state["exp_avg_sq"].view(-1)[-1] = -1.0


def halve_step(state: dict[str, Any]) -> None:
    state["step"].fill_(1.5)


@pytest.mark.parametrize(
    ("damage", "message"),
    [(lower_second_moment, "negative elements"), (halve_step, "a whole number")],
    ids=["negative second moment", "half a step"],
)
@pytest.mark.parametrize("form", ["bf16", "bf16-remainder", "fp32"])
def test_load_refuses_negative_moments_and_fractional_steps(tmp_path, form, damage, message):
    """Only the state of the last parameter is wrong, so the load has accepted every other parameter
    before the refusal."""
    model, optimizer = build(form)
    train(model, optimizer, 2)
    damage(list(optimizer.state.values())[-1])
    checkpoint.save(tmp_path, model, optimizer)
    state = optimizer.state_dict()
    model, optimizer = build(form, 0.5, seed=7)
    train(model, optimizer, 1)
    before = print_of(model, optimizer)
    for load in (
        lambda: optimizer.load_state_dict(state),
        lambda: checkpoint.load(tmp_path, model, optimizer),
    ):
        with pytest.raises(ValueError, match=message):
            load()
        assert differing(before, print_of(model, optimizer)) == []


class Versioned(nn.Module):
    """A module that accepts extra state of one version only, as plain data or as a tensor."""

    def __init__(self, version: Any) -> None:
        super().__init__()
        self.version, self.taken = version, version

    def get_extra_state(self) -> Any:
        return self.taken

    def set_extra_state(self, state: Any) -> None:
        self.taken = deepcopy(state)
        if bool(torch.as_tensor(state != self.version).any()):
            raise LookupError(f"extra state of version {state}")


class Asking(nn.Module):
    """A module that calls a function in its ``_load_from_state_dict``."""

    def __init__(self, asks: Callable[[dict[str, Any], str], None]) -> None:
        super().__init__()
        self.asks = asks
        self.register_buffer("count", torch.zeros(3))

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *rest: Any) -> None:
        self.asks(state_dict, prefix)
        super()._load_from_state_dict(state_dict, prefix, *rest)


class HalfWay:
    def __init__(self, first: int, second: int) -> None:
        self.values = {"first": first, "second": second}

    def state_dict(self) -> dict[str, int]:
        return dict(self.values)

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.values["first"] = state["first"]
        self.last = state["first"]
        if state["second"] > self.values["second"]:
            raise LookupError("second is too large")
        self.values["second"] = state["second"]


def refuse(*_: Any) -> None:
    raise LookupError("a hook refuses")


def refuse_values(module: nn.Module, _: Any) -> None:
    if bool((module.dense != module.was).any()):
        raise LookupError("a hook refuses values")


def nothing(*_: Any) -> None:
    return None


Prepare = Callable[[nn.Module, Any, bool], Any]
"""Prepares a model and an optimizer for a save (False) or for a load that refuses that save (True).
Returns the scheduler."""


def with_extra(old: Any, new: Any) -> Prepare:
    def prepare(model: nn.Module, optimizer: Any, refuses: bool) -> None:
        model.first, model.second = Versioned(1), Versioned(new if refuses else old)

    return prepare


def with_module_code(model: nn.Module, optimizer: Any, refuses: bool) -> None:
    model.asking = Asking(refuse if refuses else nothing)


def with_hook(register: Callable[[nn.Module, Any], Any]) -> Prepare:
    def prepare(model: nn.Module, optimizer: Any, refuses: bool) -> None:
        if refuses:
            register(model, optimizer)

    return prepare


def with_hook_for_values(model: nn.Module, optimizer: Any, refuses: bool) -> None:
    model.was = model.dense.detach().clone()
    if refuses:
        model.register_load_state_dict_post_hook(refuse_values)


def with_half_way(model: nn.Module, optimizer: Any, refuses: bool) -> HalfWay:
    return HalfWay(3, 0) if refuses else HalfWay(5, 6)


def with_other_scheduler(model: nn.Module, optimizer: Any, refuses: bool) -> Any:
    if not refuses:
        return lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    parts = [lr_scheduler.ConstantLR(optimizer), lr_scheduler.ConstantLR(optimizer)]
    return lr_scheduler.SequentialLR(optimizer, parts, [3])


REFUSALS: dict[str, Prepare] = {
    "extra state": with_extra(1, 2),
    "extra state, a tensor": with_extra(torch.tensor([1]), torch.tensor([2])),
    "a module's own code": with_module_code,
    "a module's hook before": with_hook(
        lambda model, _: model.register_load_state_dict_pre_hook(refuse)
    ),
    "a module's hook after": with_hook(
        lambda model, _: model.register_load_state_dict_post_hook(refuse)
    ),
    "a module's hook after, for values": with_hook_for_values,
    "the optimizer's hook before": with_hook(
        lambda _, optimizer: optimizer.register_load_state_dict_pre_hook(refuse)
    ),
    "the optimizer's hook after": with_hook(
        lambda _, optimizer: optimizer.register_load_state_dict_post_hook(refuse)
    ),
    "a scheduler": with_half_way,
    "another scheduler of torch's": with_other_scheduler,
}


@pytest.mark.parametrize("refusal", REFUSALS)
def test_optimizer_refuses_steps_after_user_code_failed_a_load(tmp_path, refusal):
    prepare = REFUSALS[refusal]

    def built(seed: int, steps: int, refuses: bool) -> tuple[nn.Module, Any, Any]:
        model, optimizer = build("bf16", 0.5, seed=seed)
        train(model, optimizer, steps)
        return model, optimizer, prepare(model, optimizer, refuses)

    checkpoint.save(tmp_path, *built(1, 3, False))
    plain = build("bf16", 0.5, seed=2)
    train(*plain, 1)
    saved = plain[1].state_dict()
    model, optimizer, scheduler = built(7, 1, True)
    with pytest.raises((LookupError, KeyError)):
        checkpoint.load(tmp_path, model, optimizer, scheduler)
    with pytest.raises(BrokenOffError):
        optimizer.step()
    optimizer._optimizer_load_state_dict_pre_hooks.clear()
    optimizer._optimizer_load_state_dict_post_hooks.clear()
    optimizer.load_state_dict(saved)
    train(model, optimizer, 1, start=1)


def twice(common: dict[str, Any]) -> None:
    groups = common["optimizer"]["param_groups"]
    groups.append(dict(groups[0]))


def no_tensor(common: dict[str, Any]) -> None:
    common["model"]["dense"] = 5


def other_tensor(common: dict[str, Any]) -> None:
    common["model"]["dense"] = torch.zeros(1)


def other_weights(common: dict[str, Any]) -> None:
    for group in common["optimizer"]["param_groups"]:
        group["param_checksums"] = [
            None if value is None else value ^ 1 for value in group["param_checksums"]
        ]


@pytest.mark.parametrize(
    ("damage", "form", "message"),
    [
        (twice, "bf16", "more than once"),
        (no_tensor, "bf16", "dense is a int"),
        (other_tensor, "fp32", "dense is a Tensor"),
        (other_weights, "bf16-remainder", "differ from those with which their remainders"),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_load_refuses_common_json_entries_that_do_not_fit_the_optimizer(
    tmp_path, damage, form, message
):
    model, optimizer = build(form, seed=1)
    train(model, optimizer, 2)
    version = checkpoint.save(tmp_path, model, optimizer)
    common = from_json((version / "common.json").read_bytes())
    damage(common)
    model, optimizer = build(form.removesuffix("-remainder"), seed=7)
    train(model, optimizer, 1)
    checkpoint.load(tmp_path, *build(form.removesuffix("-remainder")))
    replaced(version, "common.json", as_json(common))
    before = print_of(model, optimizer)
    with pytest.raises(ValueError, match=message):
        checkpoint.load(tmp_path, model, optimizer)
    assert differing(before, print_of(model, optimizer)) == []


def test_load_fails_on_all_ranks_when_one_rank_refuses(tmp_path):
    found = results_of_ranks("refused", 2, tmp_path, timeout=120)
    assert found[0].keys() == found[1].keys() and len(found[0]) == 4
    for of_rank in found:
        for name, (error, changed) in of_rank.items():
            assert re.search("cannot hold without loss|is too large", error), name
            assert changed == [], name
    assert all("rank 1: " in error for error, _ in found[0].values())
