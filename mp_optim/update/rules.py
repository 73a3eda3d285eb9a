"""The class of each rule, and a config as its hyperparameters.

A new rule is written in four places: a row in :mod:`mp_optim.config.rules` (what it keeps, and what
it reads of the config), its fields in :mod:`mp_optim.config.fields`, a module with its class beside
this one, and a line in :data:`CLASSES`. The class says what a setting may be (``check_settings``)
and how it steps (``apply``). A rule in torch operations (``has_kernels=False`` in its row) does all
of it there, as :mod:`mp_optim.update.muon` does; one whose backends have kernels calls
the backend's method of its name, as :mod:`mp_optim.update.lion` does: its scalars stand in
:mod:`mp_optim.update.kernel_args`, its formula in :mod:`mp_optim.update.backends.reference`, which
is what carries it out until other backends have kernels for it. Those that lack some say which they
have in :data:`mp_optim.config.capabilities.CAPABILITIES`: one that names none claims them all.
Users find the class in ``mp_optim/__init__.py``; CONTRIBUTING.md lists the tests.
"""

from __future__ import annotations

from typing import Any

from mp_optim.config import OptimizerConfig
from mp_optim.config.rules import RULES
from mp_optim.update.adafactor import Adafactor
from mp_optim.update.adam import FusedAdam
from mp_optim.update.lamb import FusedLAMB
from mp_optim.update.lion import Lion
from mp_optim.update.muon import Muon
from mp_optim.update.rule import RuleOptimizer
from mp_optim.update.sgd import SGD
from mp_optim.update.stable_adamw import StableAdamW

CLASSES: dict[str, type[RuleOptimizer]] = {
    "adam": FusedAdam,
    "lamb": FusedLAMB,
    "sgd": SGD,
    "lion": Lion,
    "muon": Muon,
    "adafactor": Adafactor,
    "stable_adamw": StableAdamW,
}
assert CLASSES.keys() == RULES.keys()


def settings_of(config: OptimizerConfig) -> dict[str, Any]:
    """The hyperparameters of the config's rule, as its class takes them."""
    rule, scalar = RULES[config.optimizer], RULES[config.elementwise_rule]
    sources = dict(rule.settings)
    if scalar is not rule:
        sources |= {name: scalar.settings[name] for name in scalar.beside_muon}
    settings: dict[str, Any] = {
        "lr": config.lr,
        "weight_decay": config.weight_decay,
        **rule.fixed,
    }
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
        "store_param_remainders": config.keeps_remainders,
        "param_remainder_bits": config.param_remainder_bits,
        "stochastic_rounding": config.stochastic_rounding,
        "seed": config.stochastic_rounding_seed,
        "ema_decay": config.ema_decay,
        "ema_dtype": config.ema_dtype,
        **{name: getattr(config, source) for name, source in sources.items()},
    }
