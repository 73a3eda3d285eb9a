"""Megatron's ``OptimizerConfig`` in the terms of ours.

Megatron's sets every field for every optimizer and reads those that count; ours refuses a field
that would be ignored. So what means nothing for the optimizer at hand is left out here, and what
ours has no use for is accepted at Megatron's default and refused by name otherwise.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from torch import nn

from mp_optim.config import OptimizerConfig
from mp_optim.config.combinations import inert_fields
from mp_optim.config.fields import ConfigFields
from mp_optim.config.other_names import elsewhere

OTHER_NAMES = {"muon_nesterov": "muon_use_nesterov"}
"""Megatron's fields that have another name here."""
WITHOUT_EFFECT = frozenset({"config_logger_dir", "fp8_recipe"})
"""Megatron's fields that change no number: they are accepted as they are."""
_OF_DDP = ("overlap_param_gather",)
"""Fields that Megatron's DDP config decides where the model is wrapped in its DDP."""


def config_from_megatron(
    config: Any, model_chunks: Sequence[nn.Module] = ()
) -> OptimizerConfig:
    """Our config from Megatron's.

    Args:
        config: ``megatron.core.optimizer.OptimizerConfig``, or any dataclass with such fields.
        model_chunks: the model; Megatron's DDP brings settings of its own.

    Raises:
        ValueError: a field asks for what there is none of here, naming it and what to use.
    """
    if isinstance(config, OptimizerConfig):
        return config
    ours = {spec.name: spec.default for spec in dataclasses.fields(ConfigFields)}
    settings: dict[str, Any] = {}
    for spec in dataclasses.fields(config):
        value, name = getattr(config, spec.name), OTHER_NAMES.get(spec.name, spec.name)
        if name in ours:
            settings[name] = value
        elif spec.name not in WITHOUT_EFFECT and value != _default_of(spec):
            _check_unused(config, spec.name, value)
    if model_chunks and (ddp := getattr(model_chunks[0], "ddp_config", None)):
        settings |= {name: getattr(ddp, name) for name in _OF_DDP if hasattr(ddp, name)}
    return OptimizerConfig(**without_inert(settings))


def without_inert(settings: dict[str, Any]) -> dict[str, Any]:
    """The settings but for those that would have no effect beside the others."""
    config = ConfigFields(**settings)
    while inert := inert_fields(config):
        settings = {key: settings[key] for key in settings if key not in inert}
        config = ConfigFields(**settings)
    return settings


def _default_of(spec: Any) -> Any:
    if spec.default_factory is not dataclasses.MISSING:
        return spec.default_factory()
    return spec.default


def _check_unused(config: Any, name: str, value: Any) -> None:
    """Refuse a field that ours has not, unless it belongs to an optimizer that is not asked for."""
    for optimizer in ("soap", "adaptive_muon"):
        if name.startswith(f"{optimizer}_") and config.optimizer != optimizer:
            return
    raise ValueError(f"{name}={value!r} of Megatron's OptimizerConfig{elsewhere(name)}")
