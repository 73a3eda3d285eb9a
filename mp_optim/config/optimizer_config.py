"""OptimizerConfig: the settings of an optimizer under Megatron's names.

Four names of torch and Hugging Face are accepted as aliases of fields. The config has no field that
is ignored in every case: each field has an effect in some config.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from mp_optim.config.combinations import check_config
from mp_optim.config.fields import ConfigFields, check_field
from mp_optim.config.other_names import hint
from mp_optim.config.rules import RULES


def _checked_arguments(cls: type[OptimizerConfig]) -> type[OptimizerConfig]:
    """Make a config's constructor check argument names and resolve aliases."""
    generated = cls.__init__
    known = [field.name for field in fields(cls)]

    @functools.wraps(generated)
    def init(self: OptimizerConfig, *positional: Any, **settings: Any) -> None:
        if positional:
            named = zip(known, positional, strict=False)
            shown = ", ".join(f"{name}={value!r}" for name, value in named)
            raise TypeError(
                f"OptimizerConfig takes its fields by name, as in OptimizerConfig({shown})"
            )
        settings = _in_fields(settings)
        for name in settings:
            if name not in known:
                raise TypeError(f"OptimizerConfig has no field {name!r}{hint(name, known)}")
        offloads = settings.get("optimizer_cpu_offload", False)
        if "optimizer_offload_fraction" not in settings and check_field(
            "optimizer_cpu_offload", offloads
        ):
            raise ValueError(
                "optimizer_cpu_offload=True without optimizer_offload_fraction: Megatron's default "
                "of 0 would offload nothing; set the fraction (1.0 for everything)"
            )
        rule = settings.get("optimizer")
        if isinstance(rule, str) and rule.lower() == "adamw":
            if settings.get("decoupled_weight_decay") is False:
                raise ValueError(
                    f"optimizer={rule!r} with decoupled_weight_decay=False: AdamW decouples "
                    "weight decay; write optimizer='adam'"
                )
            settings["optimizer"] = "adam"
        generated(self, **settings)

    cls.__init__ = init  # type: ignore[method-assign]
    return cls


@_checked_arguments
@dataclass(kw_only=True)
class OptimizerConfig(ConfigFields):
    """The settings of :func:`mp_optim.get_megatron_optimizer`, checked at construction.

    ``learning_rate``, ``max_grad_norm``, ``betas`` and ``eps`` are aliases of fields. Sizes may be
    text with a unit (``gpu_memory="60GiB"``), and numbers may be text.

    Raises:
        TypeError: a field is unknown, or is given under two names.
        ValueError: a value is out of range, or conflicts with another value.
    """

    def __post_init__(self) -> None:
        self.check()

    def check(self) -> None:
        """Check all fields, and convert values to Python numbers and torch dtypes in place.

        The constructor and :func:`mp_optim.get_megatron_optimizer` call this method, because fields
        may be assigned after construction.

        Raises:
            ValueError: a value is out of range, or conflicts with another value.
        """
        check_config(self)

    @classmethod
    def from_dict(cls, settings: Mapping[str, Any]) -> OptimizerConfig:
        """Return a config built from plain data, such as a YAML mapping.

        Args:
            settings: values by field name or alias.

        Raises:
            TypeError: a field is unknown, or is given under two names.
            ValueError: a value is out of range, or conflicts with another value.
        """
        return cls(**settings)


AdamOptimizerConfig = SGDOptimizerConfig = OptimizerConfig


# -- aliases --------------------------------------------------------------------------------------

_TAKEN_AS = {"learning_rate": "lr", "max_grad_norm": "clip_grad"}
"""The field for each alias from torch and Hugging Face."""
_TAKEN_AS_THE_RULES = ("betas", "eps")
"""Aliases whose fields depend on the rule. For example, ``betas`` stands for ``adam_beta1`` and
``adam_beta2``, or for ``lion_beta1`` and ``lion_beta2``."""


def _in_fields(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings with aliases replaced by fields; unknown names are kept.

    Raises:
        TypeError: a field is given under its own name and an alias, or the rule does not have the
            alias.
        ValueError: ``betas`` is not a sequence of two numbers.
    """
    # With muon, betas and eps are hyperparameters of the rule that steps all parameters except
    # hidden matrices.
    rule = str(settings.get("optimizer", "adam")).lower()
    if rule == "muon":
        rule = str(settings.get("muon_scalar_optimizer", "adam"))
    rule = rule if rule in RULES else "adam"
    read = RULES[rule].settings
    found = dict(settings)
    for name in (*_TAKEN_AS, *_TAKEN_AS_THE_RULES):
        if name not in settings:
            continue
        value, fields = found.pop(name), _TAKEN_AS.get(name) or read.get(name)
        if fields is None:
            raise TypeError(
                f"{name}={value!r}: optimizer={rule!r} has no such setting; remove {name}"
            )
        parts = (value,) if isinstance(fields, str) else value
        fields = (fields,) if isinstance(fields, str) else fields
        if not isinstance(parts, (tuple, list)) or len(parts) != len(fields):
            raise ValueError(
                f"{name}={value!r}: must be {len(fields)} numbers, for {' and '.join(fields)}"
            )
        for field, part in zip(fields, parts, strict=True):
            if field in settings:
                raise TypeError(
                    f"{name}={value!r} and {field}={settings[field]!r} are the same setting "
                    f"of OptimizerConfig; give one of the two names"
                )
            found[field] = part
    return found
