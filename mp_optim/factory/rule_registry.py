"""The class of each rule, and a config as its hyperparameters. How to write another rule is said in
CONTRIBUTING.md."""

from __future__ import annotations

from typing import Any

from mp_optim.config import OptimizerConfig
from mp_optim.config.rules import RULES
from mp_optim.muon.muon import FusedMuon
from mp_optim.rules.elementwise import FusedAdam, FusedLion, FusedSGD
from mp_optim.rules.whole_param import FusedLAMB

CLASSES: dict[str, type[Any]] = {
    "adam": FusedAdam,
    "lamb": FusedLAMB,
    "sgd": FusedSGD,
    "lion": FusedLion,
    "muon": FusedMuon,
}
assert CLASSES.keys() == RULES.keys()


def settings_of(config: OptimizerConfig) -> dict[str, Any]:
    """The hyperparameters of the config's rule, as its class takes them."""
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
    """What else the class of the config's rule is constructed with: what carries it out, and how it
    stores state."""
    sources = RULES[config.optimizer].construction
    return {
        "backend": config.fused_backend,
        "exp_avg_dtype": config.exp_avg_dtype,
        "exp_avg_sq_dtype": config.exp_avg_sq_dtype,
        "fp32_state_below": config.fp32_state_below,
        "store_param_remainders": config.keeps_remainders,
        "param_remainder_bits": config.param_remainder_bits,
        "stochastic_rounding": config.stochastic_rounding,
        "seed": config.stochastic_rounding_seed,
        "ema_decay": config.ema_decay,
        "ema_dtype": config.ema_dtype,
        "audit_rate": config.audit_rate,
        "audit_action": config.audit_action,
        **{name: getattr(config, source) for name, source in sources.items()},
    }
