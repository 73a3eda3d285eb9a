"""The rule table, the config and the optimizer classes have the same names and defaults."""

import dataclasses
import inspect
from typing import Any

import pytest

from mp_optim import FusedAdam, FusedLAMB, OptimizerConfig
from mp_optim.config.rules import RULES
from mp_optim.optimizers import classes
from mp_optim.optimizers.settings import StackSettings

COMMON_ARGUMENTS = {"params", "lr", "weight_decay", "backend", "precision", "scalar_optimizer"}
MEGATRON_DEFAULTS = {"sgd_momentum": 0.9}
"""Config fields with Megatron's default, which differs from the default of the rule's class."""
TORCH_NAMES = {"ns_steps": "num_ns_steps", "adjust_lr_fn": "scale_mode"}
"""Hyperparameters by torch's name, with Megatron's name."""


def defaults(cls: type[Any]) -> dict[str, Any]:
    return {name: each.default for name, each in inspect.signature(cls).parameters.items()}


@pytest.mark.parametrize(("rule", "cls"), [("adam", FusedAdam), ("lamb", FusedLAMB)])
def test_fused_class_has_defaults_of_its_rule(rule, cls):
    taken = {k: v for k, v in defaults(cls).items() if k not in COMMON_ARGUMENTS}
    assert taken == RULES[rule].defaults


@pytest.mark.parametrize("rule", RULES)
def test_config_fields_have_defaults_of_their_rule(rule):
    config = {field.name: field.default for field in dataclasses.fields(OptimizerConfig)}
    row = RULES[rule]
    for name, source in row.settings.items():
        fields = [source] if isinstance(source, str) else list(source)
        values = [config[field] for field in fields]
        value = values[0] if isinstance(source, str) else tuple(values)
        if source in MEGATRON_DEFAULTS:
            assert value == MEGATRON_DEFAULTS[source]
        elif (rule, name) == ("lamb", "eps"):  # Three rules share the field adam_eps.
            assert value == RULES["adam"].defaults["eps"]
        else:
            assert value == row.defaults[name]


@pytest.mark.parametrize("name", classes.__all__)
def test_optimizer_class_takes_only_hyperparameters_of_its_rule(name):
    cls = getattr(classes, name)
    shared = inspect.get_annotations(StackSettings)
    own = set(defaults(cls)) - {"params", "model", "lr", "weight_decay", *shared}
    assert {TORCH_NAMES.get(each, each) for each in own} <= set(RULES[cls.rule].defaults)


@pytest.mark.parametrize("rule", RULES)
def test_rule_accepts_its_defaults_and_names_invalid_hyperparameter(rule):
    row, wrong = RULES[rule], object()
    group = {"lr": 0.1, "weight_decay": 0.0, **row.defaults}
    row.check(group)
    for each in row.hyperparameters:
        if each.allowed is not None:
            with pytest.raises(ValueError, match=rf"^{each.name}=<object .*: must be "):
                row.check({**group, each.name: wrong})
