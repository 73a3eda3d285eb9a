"""Optimizer classes with ``overrides``, stepped next to an oracle of their own."""

from __future__ import annotations

import fnmatch
import tempfile
import warnings
from dataclasses import replace
from typing import Any

import numpy as np
from torch import nn

from lab.any_program.arithmetic import F
from lab.any_program.oracle import Group, Oracle, Slot
from lab.any_program.setups import Param, Place, Settings, Setup
from lab.any_program.starting import settings_of
from lab.any_program.stepping import compare_step
from lab.any_program.subject import (
    as_tensor,
    as_values,
    check_settings,
    dtype_of,
    expect_bits,
    name_of,
    random_values,
)
from mp_optim import SGD, AdamW, Lion

CLASSES: dict[str, tuple[type[Any], dict[str, Any]]] = {
    "adam": (AdamW, {"betas": (0.9, 0.999)}),
    "lion": (Lion, {"betas": (0.95, 0.98)}),
    "sgd": (SGD, {"momentum": 0.9}),
}
"""The class of each rule, and the hyperparameters of the config's defaults."""
FORMS: dict[str, dict[str, Any]] = {
    "plain": {},
    "bfloat16": {"state": "bf16"},
    "8bit": {"state": "8bit"},
    "remainders": {"main_params": "remainder16"},
}
"""Words of the classes for forms of state."""
OVERRIDES: tuple[dict[str, dict[str, Any]], ...] = (
    {"*.w0": {"lr": 0.3}},
    {"dense.*": {"weight_decay": 0.0}, "*.w0": {"lr": 0.001}},
    {"*.w1|*.w0": {"lr": 0.3, "weight_decay": 0.0}},
    {"*.w0|*.w2": {"weight_decay": 0.5}, "*.w[0-9]": {"lr": 0.02}},
)
STEPS = 3


def train(rule: str, params: list[Param], place: Place, choice: int, seed: int) -> None:
    """Step a class with overrides, and compare parameters, state and settings with the oracle.

    Args:
        choice: index of the overrides.
        seed: of values and gradients.
    """
    setup = Setup(tuple(params), rule=rule, place=place)
    slots, named = dict[str, Slot](), dict[str, nn.Parameter]()
    for index, param in enumerate(params):
        param = replace(param, expert=False)
        name, dtype = name_of(index, param), dtype_of(param, setup.precision)
        values = random_values(seed + index, param.shape, dtype).reshape(-1)
        slots[name] = Slot(name, param.shape, dtype, values)
        named[name] = nn.Parameter(as_tensor(values, param.shape, dtype, param.transposed))
    kind, given = CLASSES[rule]
    words = {"lr": 0.01, "weight_decay": 0.1, "max_grad_norm": 1.0, "backend": place.backend}
    overrides = OVERRIDES[choice]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        optimizer = kind(named.items(), overrides=overrides, **words, **given, **_placed(place))
        optimizer.init_state()
    groups = [_group(setup, live["param_names"], overrides) for live in optimizer.param_groups]
    assert sorted(name for group in groups for name in group.names) == sorted(named)
    oracle = Oracle(rule, slots, groups, None, 1.0, float("inf"), False)
    oracle.keep_as(place)
    for step in range(STEPS):
        draw = np.random.RandomState(100 * seed + step)
        for param in named.values():
            value = draw.standard_normal(param.shape).astype(F)
            half = "bf16" if param.element_size() == 2 else "fp32"
            param.grad = as_tensor(np.asarray(value).reshape(-1), tuple(param.shape), half)
        grads = {
            name: as_values(param.grad) for name, param in named.items() if param.grad is not None
        }
        expected = oracle.step(grads, place)
        optimizer.step()
        compare_step(expected, optimizer.last_step)
    mains = dict(optimizer.named_main_params())
    for group, live in zip(groups, optimizer.param_groups, strict=True):
        check_settings(live, group)
        for name in group.names:
            expect_bits(f"parameter {name} of {kind.__name__}", named[name], slots[name].model)
            expect_bits(f"main param {name} of {kind.__name__}", mains[name], slots[name].value())


def _placed(place: Place) -> dict[str, Any]:
    words = dict(FORMS[place.form])
    if place.fraction:
        words |= {"offload": place.fraction, "offload_mode": place.mode}
        words |= {"offload_place": place.where}
        words |= {"optimizer_state_path": tempfile.gettempdir()} if place.on_disk else {}
    return words


def _group(setup: Setup, names: list[str], overrides: dict[str, dict[str, Any]]) -> Group:
    """Return a group with the settings that the patterns give to each of its parameters."""
    found = []
    for name in names:
        settings = settings_of(setup, Settings(betas=(0.9, 0.999)), explicit=True)
        for pattern, changed in overrides.items():
            if any(fnmatch.fnmatchcase(name, each) for each in pattern.split("|")):
                settings |= changed
        found.append(settings)
    assert all(settings == found[0] for settings in found), f"{names} are one group: {found}"
    return Group(list(names), False, found[0])
