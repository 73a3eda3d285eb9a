"""Checks of param groups: adding, removing, merging, reordering, and settings of each group."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

from mp_optim.apps.conform.kit import (
    Make,
    backward,
    layers,
    make_or_refuse,
    must,
    noise,
    require,
    require_same,
    saved,
    should,
    step_or_refuse,
    train,
    weights,
)


def two_groups(params: Iterable[nn.Parameter]) -> list[dict[str, Any]]:
    return [{"params": [param]} for param in params]


def as_without(make: Make, change: Callable[[Any], None]) -> None:
    """Train with and without a change of the optimizer's param groups between two steps. Require
    equal parameters afterwards, or an error.

    All parameters have one shape, so an optimizer can distinguish them only by identity.
    """
    results = []
    for is_changed in (False, True):
        params = [nn.Parameter(noise(12, 8, seed=seed)) for seed in range(2)]
        optimizer = make_or_refuse(make, two_groups(params))
        for step in range(6):
            for seed, param in enumerate(params):
                param.grad = noise(12, 8, seed=10 * step + seed) * 10.0**seed
            torch.manual_seed(step)
            if step == 3 and is_changed:
                change(optimizer)
            step_or_refuse(optimizer, params)
        results.append(params)
    require_same(results[1], results[0], "three steps after the change")


@must("adam", "adamw", "sgd", "lion")
def each_group_has_its_settings(make: Make) -> None:
    """lr and weight_decay of a group apply to that group alone."""
    params = [nn.Parameter(noise(6, 8, seed=seed)) for seed in range(2)]
    groups = [{"params": params[:1]}, {"params": params[1:], "lr": 0.05, "weight_decay": 0.5}]
    both = make(groups, lr=0.01, weight_decay=0.0)
    alone = [nn.Parameter(noise(6, 8, seed=seed)) for seed in range(2)]
    singles = [make(alone[:1], lr=0.01, weight_decay=0.0)]
    singles.append(make(alone[1:], lr=0.05, weight_decay=0.5))
    for step in range(3):
        for seed, param in enumerate((*params, *alone)):
            param.grad = noise(6, 8, seed=2 * step + seed % 2)
        for optimizer in (both, *singles):
            optimizer.step()
    require_same(params, alone, "in two groups, against two optimizers")


@must()
def a_group_may_be_added_later(make: Make) -> None:
    """A group added with add_param_group after some steps is trained, with the optimizer's
    defaults for missing settings."""
    model = layers()
    first, second = model.parameters()
    optimizer = make([first])
    train(model, optimizer, 2)
    before = weights(model)
    optimizer.add_param_group({"params": [second]})
    missing = set(optimizer.defaults) - set(optimizer.param_groups[-1])
    require(not missing, f"the new group lacks {sorted(missing)}")
    train(model, optimizer, 2, 2)
    for old, new in zip(before, weights(model), strict=True):
        require((old != new).any(), f"a parameter of {tuple(old.shape)} is not trained")


@must("adam", "adamw", "sgd", "lion")
def a_group_added_later_steps_as_new(make: Make) -> None:
    """A group that is added before the first step, or after three steps, is stepped as in an
    optimizer of its own. The other groups continue unchanged."""
    for first in (0, 3):
        params = [nn.Parameter(noise(6, 8, seed=seed)) for seed in range(2)]
        alone = [nn.Parameter(noise(6, 8, seed=seed)) for seed in range(2)]
        optimizer, singles = make(params[:1]), [make([param]) for param in alone]
        for step in range(5):
            if step == first:
                optimizer.add_param_group({"params": params[1:]})
            for index in range(2 if step >= first else 1):
                params[index].grad = noise(6, 8, seed=step)
                alone[index].grad = noise(6, 8, seed=step)
                singles[index].step()
            optimizer.step()
        require_same(
            params, alone, f"a group added after {first} steps, against an optimizer of its own"
        )


@should()
def groups_may_be_reordered(make: Make) -> None:
    """State stays with its parameters when groups change places, or the change is refused."""
    as_without(make, lambda optimizer: optimizer.param_groups.reverse())


@should()
def groups_may_be_merged(make: Make) -> None:
    """State stays with a parameter that is moved into another group, or the move is refused."""

    def merge(optimizer: Any) -> None:
        optimizer.param_groups[0]["params"].extend(optimizer.param_groups[1]["params"])
        del optimizer.param_groups[1]

    as_without(make, merge)


@should()
def a_group_may_be_removed(make: Make) -> None:
    """A removed group is no longer stepped and the other groups continue, or the removal is
    refused."""
    model = layers()
    optimizer = make_or_refuse(make, two_groups(model.parameters()))
    train(model, optimizer, 2)
    del optimizer.param_groups[1]
    before = weights(model)
    backward(model, 2)
    step_or_refuse(optimizer, list(model.parameters()))
    first, second = weights(model)
    require((first != before[0]).any(), "the remaining group is not trained")
    require_same([second], before[1:], "the group that was removed")


@should()
def keys_of_others_are_kept(make: Make) -> None:
    """A key that a program writes into a param group, such as a name, is saved and loaded."""
    model = layers()
    optimizer = make_or_refuse(make, two_groups(model.parameters()))
    for index, group in enumerate(optimizer.param_groups):
        group["its_name"] = f"group {index}"
    train(model, optimizer, 1)
    fresh = make(two_groups(layers().parameters()))
    fresh.load_state_dict(saved(optimizer))
    found = [group.get("its_name") for group in fresh.param_groups]
    require(found == ["group 0", "group 1"], f"after loading, its_name of the groups is {found}")


@should()
def a_parameter_in_two_groups_is_refused(make: Make) -> None:
    """A parameter in two groups raises an error, because it would be stepped twice."""
    model = layers()
    try:
        make([*two_groups(model.parameters()), {"params": list(model.parameters())[:1]}])
    except Exception:
        return
    require(False, "a parameter in two groups was accepted")
