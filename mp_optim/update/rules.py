"""The class of each rule, and a config as its hyperparameters.

A new rule is written in four places: a row in :mod:`mp_optim.config.rules` (what it keeps, and its
hyperparameters), its fields in :mod:`mp_optim.config.fields`, a module beside this one, and a line
in :data:`CLASSES`. The module has two classes. The :class:`~mp_optim.update.rule.Rule` says how it
steps (``apply``), and what settings may be together (``check_settings``; the row has what each may
be by itself); it keeps nothing. The torch optimizer, with the signature that users see, hands it to
:class:`~mp_optim.update.optimizer.RuleOptimizer`. A rule in torch operations (``has_kernels=False``
in its row) does all of the step in ``apply``, as :mod:`mp_optim.update.muon` does. One that steps
each element by itself is an :class:`~mp_optim.update.rule.ElementRule`, as
:mod:`mp_optim.update.lion` is: its scalars and its text stand in
:mod:`mp_optim.update.element_rules`, its kernels in ``csrc/rules.inl`` and
``backends/triton/kernels/rules.py``. Another one calls the methods of backends. Those that lack
kernels say which they have in :data:`mp_optim.config.rules.CAPABILITIES`: one that names none
claims them all. CONTRIBUTING.md lists the tests.
"""

from __future__ import annotations

from typing import Any

from mp_optim.config import OptimizerConfig
from mp_optim.config.rules import RULES
from mp_optim.update.adafactor import FusedAdafactor
from mp_optim.update.adam import FusedAdam
from mp_optim.update.ademamix import FusedAdEMAMix
from mp_optim.update.lamb import FusedLAMB
from mp_optim.update.lion import FusedLion
from mp_optim.update.muon import FusedMuon
from mp_optim.update.sgd import FusedSGD
from mp_optim.update.stable_adamw import FusedStableAdamW

CLASSES: dict[str, type[Any]] = {
    "adam": FusedAdam,
    "lamb": FusedLAMB,
    "sgd": FusedSGD,
    "lion": FusedLion,
    "muon": FusedMuon,
    "adafactor": FusedAdafactor,
    "stable_adamw": FusedStableAdamW,
    "ademamix": FusedAdEMAMix,
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
        **{name: getattr(config, source) for name, source in sources.items()},
    }
