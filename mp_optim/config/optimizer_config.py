"""OptimizerConfig: the settings of an optimizer, in Megatron's names; four names of torch and
Hugging Face are taken as the fields that they mean.

A field exists only if setting it changes something in some config.
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
    """Let a config's constructor say what is wrong with the names it is given."""
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
        generated(self, **_with_rule(settings))

    cls.__init__ = init  # type: ignore[method-assign]
    return cls


@_checked_arguments
@dataclass(kw_only=True)
class OptimizerConfig(ConfigFields):
    """Everything :func:`mp_optim.get_megatron_optimizer` needs to know besides the model.

    ``learning_rate``, ``max_grad_norm``, ``betas`` and ``eps`` are taken as the fields they mean,
    sizes as text with a unit (``gpu_memory="60GiB"``), and numbers as text.

    Raises:
        TypeError: an unknown field, naming the nearest one; one that is given under two names.
        ValueError: a value out of range, contradictory or without effect, naming field and value.
    """

    def __post_init__(self) -> None:
        self.check()

    def check(self) -> None:
        """Raise if a value is out of range, contradictory or without effect; done at construction,
        and again by :func:`mp_optim.get_megatron_optimizer` for fields set since. Values are kept
        as Python's own numbers, and dtypes as torch's."""
        check_config(self)

    @classmethod
    def from_dict(cls, settings: Mapping[str, Any]) -> OptimizerConfig:
        """A config from plain data, such as a YAML mapping."""
        return cls(**settings)


AdamOptimizerConfig = SGDOptimizerConfig = OptimizerConfig


def _with_rule(settings: dict[str, Any]) -> dict[str, Any]:
    """The settings with the rule under its own name: AdamW is adam with decoupled decay."""
    rule = settings.get("optimizer")
    if not (isinstance(rule, str) and rule.lower() == "adamw"):
        return settings
    if settings.get("decoupled_weight_decay") is False:
        raise ValueError(
            f"optimizer={rule!r} with decoupled_weight_decay=False: AdamW decouples it; write "
            "optimizer='adam'"
        )
    return {**settings, "optimizer": "adam"}


# -- other names ----------------------------------------------------------------------------------

_TAKEN_AS = {"learning_rate": "lr", "max_grad_norm": "clip_grad"}
"""Names of torch and Hugging Face, and the field that each is taken as."""
_TAKEN_AS_THE_RULES = ("betas", "eps")
"""Names that are taken as the fields which the rule reads for it: ``betas`` as ``adam_beta1`` and
``adam_beta2``, or as ``lion_beta1`` and ``lion_beta2``."""


def _in_fields(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Settings under the names of fields; names that are no fields stay.

    Raises:
        TypeError: a field is given twice, under its own name and another, or the rule has nothing
            of that name.
        ValueError: ``betas`` that are not two.
    """
    # with muon, betas and eps are read by the rule of what is no matrix
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
            raise TypeError(f"{name}={value!r}: optimizer={rule!r} has none; leave it away")
        for field, part in _parts(name, value, fields):
            if field in settings:
                raise TypeError(
                    f"{name}={value!r} and {field}={settings[field]!r} are the same setting "
                    f"of OptimizerConfig; give one of them"
                )
            found[field] = part
    return found


def _parts(name: str, value: Any, fields: str | tuple[str, ...]) -> list[tuple[str, Any]]:
    """A setting as the fields that it is taken as."""
    if isinstance(fields, str):
        return [(fields, value)]
    if not isinstance(value, (tuple, list)) or len(value) != len(fields):
        raise ValueError(
            f"{name}={value!r}: must be {len(fields)} numbers, for {' and '.join(fields)}"
        )
    return list(zip(fields, value, strict=True))
