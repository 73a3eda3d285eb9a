"""OptimizerConfig: what to build, in Megatron's names.

A field exists only if setting it changes something; a setting that would be ignored raises.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from mp_optim.config.combinations import check_config
from mp_optim.config.field_checks import check_field
from mp_optim.config.field_kinds import nearest
from mp_optim.config.fields import ConfigFields
from mp_optim.config.other_names import elsewhere, in_fields


def _checked_arguments(cls: type[OptimizerConfig]) -> type[OptimizerConfig]:
    """Let a config's constructor say what is wrong with the names it is given."""
    generated = cls.__init__

    @functools.wraps(generated)
    def init(self: OptimizerConfig, *positional: Any, **settings: Any) -> None:
        settings = in_fields(settings)
        _check_names([field.name for field in fields(cls)], positional, settings)
        _check_offload(settings)
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


def _check_names(
    known: list[str], positional: tuple[Any, ...], settings: Mapping[str, Any]
) -> None:
    if positional:
        named = zip(known, positional, strict=False)
        shown = ", ".join(f"{name}={value!r}" for name, value in named)
        raise TypeError(
            f"OptimizerConfig takes its fields by name, as in OptimizerConfig({shown})"
        )
    for name in settings:
        if name not in known:
            hint = elsewhere(name) or nearest(name, known, 0.6)
            raise TypeError(f"OptimizerConfig has no field {name!r}{hint}")


def _check_offload(settings: Mapping[str, Any]) -> None:
    offloads = check_field(
        "optimizer_cpu_offload", settings.get("optimizer_cpu_offload", False)
    )
    if offloads and "optimizer_offload_fraction" not in settings:
        raise ValueError(
            "optimizer_cpu_offload=True without optimizer_offload_fraction: Megatron's default of "
            "0 would offload nothing; set the fraction (1.0 for everything)"
        )


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
