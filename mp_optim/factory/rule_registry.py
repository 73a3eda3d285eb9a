"""Conversion of a config into its rule and the arguments of the rule's optimizer.

CONTRIBUTING.md describes how to write another rule.
"""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from mp_optim.config import OptimizerConfig
from mp_optim.config.rules import RULES
from mp_optim.kernels.state_format import StatePrecision
from mp_optim.muon.muon import MuonRule
from mp_optim.rules.rule import NAMED_RULES, Rule

assert {*NAMED_RULES, MuonRule.name} == {*RULES}


def rule_of(config: OptimizerConfig) -> Rule:
    """Return the rule of a config."""
    if config.optimizer == MuonRule.name:
        return MuonRule(config.muon_scalar_optimizer)
    return NAMED_RULES[config.optimizer]


def settings_of(config: OptimizerConfig) -> dict[str, Any]:
    """Return learning rate, weight decay and hyperparameters of the config's rule, by name."""
    rule, scalar = RULES[config.optimizer], RULES[config.elementwise_rule]
    sources = dict(rule.settings)
    if scalar is not rule:
        sources |= {name: scalar.settings[name] for name in scalar.overrides}
    settings: dict[str, Any] = {"lr": config.lr, "weight_decay": config.weight_decay, **rule.fixed}
    for name, source in sources.items():
        if isinstance(source, str):
            settings[name] = getattr(config, source)
        else:
            settings[name] = tuple(getattr(config, part) for part in source)
    return settings


def construction_of(config: OptimizerConfig) -> dict[str, Any]:
    """Return the rule optimizer's other arguments: storage formats, backend, audits, seed."""
    same = [spec.name for spec in fields(StatePrecision) if spec.name != "seed"]
    return {
        **{name: getattr(config, name) for name in same},
        "store_param_remainders": config.keeps_remainders,
        "seed": config.stochastic_rounding_seed,
        "backend": config.fused_backend,
        "audit_rate": config.audit_rate,
        "audit_action": config.audit_action,
    }
