"""Param groups: which parameters share hyperparameters, decided by declared overrides."""

from __future__ import annotations

import fnmatch
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypedDict

from torch import Tensor, nn

from mp_optim.config import OptimizerConfig
from mp_optim.groups.group_settings import OF_THE_STACK, checked_override
from mp_optim.groups.muon import MuonAssignment, is_embedding_or_output
from mp_optim.slots.names import named_params
from mp_optim.slots.param_attributes import is_expert_param

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class ParamPredicate:
    """A named test of a parameter; two with one name are the same."""

    name: str
    fn: Callable[[Tensor], bool] = field(compare=False)


@dataclass(frozen=True)
class ParamWithNamePredicate:
    """A named test of a parameter and its FQN; two with one name are the same."""

    name: str
    fn: Callable[[Tensor, str], bool] = field(compare=False)


def _tuple(value: Any) -> tuple[Any, ...]:
    return tuple(value) if isinstance(value, (tuple, list)) else (value,)


@dataclass(frozen=True)
class ParamKey:
    """Which parameters an override is for: those that any of the conditions matches.

    Attributes:
        name: shell patterns of FQNs.
        attr: names of attributes that must be truthy.
        predicate: tests of a parameter.
        with_name_predicate: tests of a parameter and its FQN.
    """

    name: str | tuple[str, ...] = ()
    attr: str | tuple[str, ...] = ()
    predicate: ParamPredicate | tuple[ParamPredicate, ...] = ()
    with_name_predicate: (
        ParamWithNamePredicate | tuple[ParamWithNamePredicate, ...]
    ) = ()

    def matches(self, param: Tensor, param_name: str) -> bool:
        """Whether any condition holds."""
        if any(
            fnmatch.fnmatchcase(param_name, pattern) for pattern in _tuple(self.name)
        ):
            return True
        if any(bool(getattr(param, attr, False)) for attr in _tuple(self.attr)):
            return True
        if any(test.fn(param) for test in _tuple(self.predicate)):
            return True
        return any(
            test.fn(param, param_name) for test in _tuple(self.with_name_predicate)
        )


class ParamGroupOverride(TypedDict, total=False):
    """Settings of the parameters a :class:`ParamKey` matches; any hyperparameter of the rule may be
    among them."""

    max_lr: float
    min_lr: float
    start_wd: float
    end_wd: float
    wd_mult: float
    lr_mult: float
    eps: float
    betas: tuple[float, float]
    momentum: float
    optimizer: str
    """With muon: which of muon and ``muon_scalar_optimizer`` steps the parameters."""
    qkv_split_shapes: tuple[int, ...]
    head_rows: int | None


Overrides = Mapping[ParamKey, ParamGroupOverride]


def _no_weight_decay(param: Tensor, name: str) -> bool:
    return name.endswith(".bias") or name == "bias" or param.ndim <= 1


def _no_weight_decay_but_qk(param: Tensor, name: str) -> bool:
    qk = any(
        part in f".{name}"
        for part in (".q_layernorm.", ".k_layernorm.", ".q_norm.", ".k_norm.")
    )
    return _no_weight_decay(param, name) and not qk


def get_standard_config_overrides(
    config: OptimizerConfig,
) -> dict[ParamKey, ParamGroupOverride]:
    """No weight decay for biases and 1-D parameters; ``decoupled_lr`` for embedding and output
    parameters.

    The latter are those with a truthy ``is_embedding_or_output_parameter``, or, where the attribute
    is absent, with ``embed_tokens``, ``word_embeddings``, ``lm_head`` or ``output_layer`` in their
    FQN.
    """
    test = (
        ParamWithNamePredicate("no_weight_decay_but_qk", _no_weight_decay_but_qk)
        if config.apply_wd_to_qk_layernorm
        else ParamWithNamePredicate("no_weight_decay", _no_weight_decay)
    )
    overrides: dict[ParamKey, ParamGroupOverride] = {
        ParamKey(with_name_predicate=test): {"wd_mult": 0.0}
    }
    if config.decoupled_lr is not None:
        floor = config.decoupled_min_lr
        if floor is None and config.min_lr is not None:
            floor = min(config.min_lr, config.decoupled_lr)
        decoupled: ParamGroupOverride = {"max_lr": config.decoupled_lr}
        if floor is not None:
            decoupled["min_lr"] = floor
        key = ParamKey(
            with_name_predicate=ParamWithNamePredicate(
                "embedding_or_output", is_embedding_or_output
            )
        )
        overrides[key] = decoupled
    return overrides


def get_mup_config_overrides(
    config: OptimizerConfig, mup_width_mult: float, optimizer_type: str = "adam"
) -> dict[ParamKey, ParamGroupOverride]:
    """Learning rates that transfer across width (Yang et al. 2022, table 8).

    Adam: hidden matrices get ``lr / width`` and ``eps / width``. SGD: vector-like parameters and
    embeddings get ``lr * width``. With ``optimizer="muon"`` hidden matrices are Muon's, whose scale
    modes take care of width: nothing is overridden.

    Args:
        mup_width_mult: width of this model over the width the rates were tuned at, > 0.
        optimizer_type: whose rule, adam or sgd.
    """
    if not mup_width_mult > 0.0:
        raise ValueError(f"mup_width_mult={mup_width_mult!r}: must be > 0")
    if optimizer_type not in ("adam", "sgd"):
        raise ValueError(f"optimizer_type={optimizer_type!r}: must be 'adam' or 'sgd'")
    lr = _required_lr(config)
    if config.optimizer == "muon":
        return {}

    def limits(factor: float) -> ParamGroupOverride:
        floor: ParamGroupOverride = (
            {} if config.min_lr is None else {"min_lr": config.min_lr * factor}
        )
        return {"max_lr": lr * factor, **floor}

    def hidden(param: Tensor, name: str) -> bool:
        return param.ndim >= 2 and not is_embedding_or_output(param, name)

    if optimizer_type == "sgd":
        key = ParamKey(
            with_name_predicate=ParamWithNamePredicate(
                "mup_vector_like", lambda p, n: not hidden(p, n)
            )
        )
        return {key: limits(mup_width_mult)}
    key = ParamKey(with_name_predicate=ParamWithNamePredicate("mup_hidden", hidden))
    return {
        key: {**limits(1 / mup_width_mult), "eps": config.adam_eps / mup_width_mult}
    }


def check_config_overrides_consistency(
    config: OptimizerConfig, config_overrides: Overrides | None
) -> None:
    """Raise ValueError if an override sets what only the whole stack can have."""
    rules = {config.optimizer, config.elementwise_rule}
    for override in (config_overrides or {}).values():
        for name, value in override.items():
            if name == "optimizer" and value in rules:
                continue
            if name in OF_THE_STACK and value != getattr(config, name):
                raise ValueError(
                    f"override {name}={value!r} differs from the config's "
                    f"{getattr(config, name)!r}; "
                    "it is one setting for the whole stack"
                )


def _named_params(model_chunks: Sequence[nn.Module]) -> Iterator[tuple[str, Tensor]]:
    return (
        (name, param)
        for name, param in named_params(model_chunks)
        if param.requires_grad
    )


def _required_lr(config: OptimizerConfig) -> float:
    if config.lr is None:
        raise ValueError("lr=None: set OptimizerConfig.lr")
    return config.lr


def _combined(
    param: Tensor, name: str, overrides: Mapping[ParamKey, Mapping[str, Any]]
) -> dict[str, Any]:
    result: dict[str, Any] = {}
    for key, override in overrides.items():
        if not key.matches(param, name):
            continue
        for setting, value in override.items():
            if result.setdefault(setting, value) != value:
                raise ValueError(
                    f"{name}: overrides disagree on {setting}: {result[setting]!r} and {value!r}"
                )
    return result


def get_param_groups(
    model_chunks: Sequence[nn.Module],
    config: OptimizerConfig,
    config_overrides: Overrides | None = None,
    expert_predicate: Callable[[Tensor, str], bool] | None = None,
) -> list[dict[str, Any]]:
    """One group per combination of overrides and expert or not; dense first, then in order of
    appearance.

    Frozen parameters are left out; tied ones appear once, under their first name.

    Returns:
        Groups with ``params``, ``param_names``, ``lr``, ``max_lr``, ``min_lr``, ``weight_decay``,
        ``wd_mult``, ``lr_mult``, ``is_expert_parallel``, ``is_decoupled_lr`` and what overrides
        add.

    Raises:
        ValueError: lr is missing, or two overrides disagree. TypeError: a complex parameter, by
            name.
    """
    lr = _required_lr(config)
    check_config_overrides_consistency(config, config_overrides)
    overrides = {
        key: checked_override(config, override)
        for key, override in (config_overrides or {}).items()
    }
    expert = expert_predicate or is_expert_param
    muon = MuonAssignment(model_chunks, config) if config.optimizer == "muon" else None
    members: dict[tuple[bool, tuple[Any, ...]], list[tuple[str, Tensor]]] = {}
    for name, param in _named_params(model_chunks):
        if param.is_complex() or not param.is_floating_point():
            raise TypeError(
                f"{name} is {param.dtype}: only real floating-point parameters can be trained; "
                "freeze it"
            )
        override = _combined(param, name, overrides)
        is_expert = bool(expert(param, name))
        if muon is not None:
            override = muon.settings(param, name, is_expert, override)
        key = (is_expert, tuple(sorted(override.items())))
        members.setdefault(key, []).append((name, param))
    _warn_unmatched(model_chunks, overrides)
    ordered = sorted(members.items(), key=lambda item: item[0][0])
    return [
        _group(config, lr, is_expert, dict(override), named)
        for (is_expert, override), named in ordered
    ]


def _group(
    config: OptimizerConfig,
    lr: float,
    is_expert: bool,
    override: dict[str, Any],
    named: list[tuple[str, Tensor]],
) -> dict[str, Any]:
    floor = {} if config.min_lr is None else {"min_lr": config.min_lr}
    settings = {"wd_mult": 1.0, "lr_mult": 1.0, "max_lr": lr, **floor, **override}
    decoupled = (
        config.decoupled_lr is not None
        and settings["max_lr"] == config.decoupled_lr != lr
    )
    names = [name for name, _ in named]
    return {
        "params": [param for _, param in named],
        "param_names": names,
        "lr": settings["max_lr"] * settings["lr_mult"],
        "weight_decay": config.weight_decay * settings["wd_mult"],
        "is_expert_parallel": is_expert,
        "is_decoupled_lr": decoupled,
        **settings,
    }


def _warn_unmatched(
    model_chunks: Sequence[nn.Module], overrides: Iterable[ParamKey]
) -> None:
    named = list(_named_params(model_chunks))
    for key in overrides:
        if (key.name or key.attr) and not any(
            key.matches(param, name) for name, param in named
        ):
            _log.warning("override %s matches no trainable parameter", key)


def check_claims(
    model_chunks: Sequence[nn.Module], param_groups: Sequence[Mapping[str, Any]]
) -> None:
    """Raise ValueError unless every trainable parameter is in exactly one group; names the first
    that is not."""
    claims: dict[int, int] = {}
    for group in param_groups:
        for param in group["params"]:
            tensor = param[1] if isinstance(param, tuple) else param
            claims[id(tensor)] = claims.get(id(tensor), 0) + 1
    for name, param in _named_params(model_chunks):
        count = claims.get(id(param), 0)
        if count != 1:
            raise ValueError(
                f"{name} is in {count} param groups; put every trainable parameter in exactly one, "
                "or "
                "freeze it with requires_grad_(False)"
            )
