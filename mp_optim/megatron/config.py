"""Megatron's ``OptimizerConfig`` in the terms of ours.

Megatron's sets every field for every optimizer and reads those that count; ours refuses a field
that would be ignored. So what means nothing for the optimizer at hand is left out here, and what
ours has no use for is accepted at Megatron's default and refused by name otherwise
(:mod:`mp_optim.megatron.fields` says which is which).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from torch import nn

from mp_optim.config import OptimizerConfig
from mp_optim.config.combinations import inert_fields
from mp_optim.config.fields import ConfigFields
from mp_optim.megatron.fields import DDP_FIELDS, OPTIMIZER_FIELDS, SAME, Kind, Meaning
from mp_optim.process.caller_warnings import warn

_LAYER_WISE = "use_layer_wise_distributed_optimizer"
_OF_DDP = ("overlap_param_gather",)
"""Fields that Megatron's DDP config decides where the model is wrapped in its DDP."""
_UNKNOWN = Meaning(
    Kind.REFUSED,
    "this version of mp_optim does not know the field; leave it at its default",
)
_LION = (
    "optimizer='lion': every parameter is stepped by Lion, with lion_beta1 and lion_beta2; "
    "Megatron's own takes adam_beta1 and adam_beta2, and steps by Adam what is no matrix"
)


def config_from_megatron(
    config: Any,
    model_chunks: Sequence[nn.Module] = (),
    own_settings: Mapping[str, Any] = MappingProxyType({}),
) -> OptimizerConfig:
    """Our config from Megatron's.

    Args:
        config: ``megatron.core.optimizer.OptimizerConfig``, or any dataclass with such fields.
        model_chunks: the model; Megatron's DDP brings settings of its own.
        own_settings: fields of our config that are set beside them.

    Raises:
        ValueError: a field asks for what there is none of here, naming it and what to use.
    """
    if isinstance(config, OptimizerConfig):
        return config
    ours = {spec.name for spec in dataclasses.fields(ConfigFields)}
    settings: dict[str, Any] = {}
    for name, value in accepted_fields(config, OPTIMIZER_FIELDS):
        meaning = OPTIMIZER_FIELDS.get(name, SAME)
        if (meaning.name or name) in ours and meaning.kind is not Kind.WITHOUT_EFFECT:
            settings[meaning.name or name] = meaning.values.get(value, value)
    if config.optimizer == "dist_muon":
        settings[_LAYER_WISE] = True
    for chunk in model_chunks:
        if ddp_config := getattr(chunk, "ddp_config", None):
            settings |= _settings_of_ddp(ddp_config, settings, _shares(chunk))
    if config.optimizer == "lion":
        warn(_LION)
    settings = without_inert({**settings, **own_settings})
    return OptimizerConfig(**{**settings, **own_settings})


def accepted_fields(
    config: Any, meanings: Mapping[str, Meaning]
) -> Iterator[tuple[str, Any]]:
    """The fields of a dataclass of Megatron's, with their values.

    Raises:
        ValueError: one is set that is refused, or not known; naming it and what to use.
    """
    ours = {spec.name for spec in dataclasses.fields(ConfigFields)}
    for spec in dataclasses.fields(config):
        name, value = spec.name, getattr(config, spec.name)
        meaning = meanings.get(name, SAME if name in ours else _UNKNOWN)
        if meaning.kind is Kind.REFUSED and value != _default_of(spec):
            raise ValueError(
                f"{name}={value!r} of Megatron's {type(config).__name__}: {meaning.note}"
            )
        yield name, value


def without_inert(settings: dict[str, Any]) -> dict[str, Any]:
    """The settings but for those that would have no effect beside the others."""
    config = ConfigFields(**settings)
    while inert := inert_fields(config):
        settings = {key: settings[key] for key in settings if key not in inert}
        config = ConfigFields(**settings)
    return settings


def _shares(chunk: nn.Module) -> int:
    """Over how many ranks the buffers of Megatron's DDP are reduced, at most."""
    kinds = ("buffers", "expert_parallel_buffers")
    buffers = [buffer for kind in kinds for buffer in getattr(chunk, kind, ())]
    return max((buffer.data_parallel_group.size() for buffer in buffers), default=1)


def _settings_of_ddp(
    ddp_config: Any, settings: Mapping[str, Any], ranks: int
) -> dict[str, Any]:
    """What the config of Megatron's DDP decides.

    Args:
        settings: ours so far. ranks: over which its buffers are reduced.

    Raises:
        ValueError: it does not fit, naming the field.
    """
    values = dict(accepted_fields(ddp_config, DDP_FIELDS))
    decided = {name: values[name] for name in _OF_DDP if name in values}
    splits = ddp_config.use_distributed_optimizer
    if settings.get(_LAYER_WISE, False):
        # Megatron's DDP has laid every matrix out in the part of one rank, so the distributed
        # optimizer finds it whole there.
        if not splits and ranks > 1:
            raise ValueError(
                f"{_LAYER_WISE}=True, and the model's ddp_config has "
                "use_distributed_optimizer=False: its buffers are not laid out by rank. Leave out "
                "--no-use-layer-wise-param-layout (or set --use-layer-wise-param-layout, where "
                "there is one); a Megatron that has neither trains the same, with all state on "
                "every rank, by --optimizer muon without --use-distributed-optimizer"
            )
        return {**decided, _LAYER_WISE: False, "use_distributed_optimizer": splits}
    if splits and ranks > 1 and not settings.get("use_distributed_optimizer", False):
        raise ValueError(
            "use_distributed_optimizer=True of the model's ddp_config leaves each rank only its "
            "share of the gradients, and OptimizerConfig has False; set both alike"
        )
    return decided


def _default_of(spec: Any) -> Any:
    if spec.default_factory is not dataclasses.MISSING:
        return spec.default_factory()
    return spec.default
