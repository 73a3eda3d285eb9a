"""Param groups made from overrides, and checks of the settings in groups and overrides."""

from __future__ import annotations

import fnmatch
import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal, TypedDict

from torch import Tensor, nn

from mp_optim.config import OptimizerConfig
from mp_optim.config.rules import RULES
from mp_optim.config.setting_checks import RATE, SCHEDULED, check_setting, nearest
from mp_optim.core.names import named_params
from mp_optim.core.param_attributes import is_expert_param
from mp_optim.param_groups.tables import MuonAssignment, Tables

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class ParamPredicate:
    """A named test of a parameter. Predicates with equal names compare as equal.

    Attributes:
        name: name of the test.
        fn: function from a parameter to True if it passes.
    """

    name: str
    fn: Callable[[Tensor], bool] = field(compare=False)


@dataclass(frozen=True)
class ParamWithNamePredicate:
    """A named test of a parameter and its fully qualified name (FQN). Predicates with equal names
    compare as equal.

    Attributes:
        name: name of the test.
        fn: function from a parameter and its FQN to True if it passes.
    """

    name: str
    fn: Callable[[Tensor, str], bool] = field(compare=False)


def _tuple(value: Any) -> tuple[Any, ...]:
    return tuple(value) if isinstance(value, (tuple, list)) else (value,)


@dataclass(frozen=True)
class ParamKey:
    """Selector of the parameters of an override. A parameter matches if any condition holds.

    Attributes:
        name: shell pattern, or patterns, of fully qualified parameter names (FQNs).
        attr: name, or names, of attributes that are truthy on matching parameters.
        predicate: one or several :class:`ParamPredicate`, called with the parameter.
        with_name_predicate: one or several :class:`ParamWithNamePredicate`, called with the
            parameter and its FQN.
    """

    name: str | tuple[str, ...] = ()
    attr: str | tuple[str, ...] = ()
    predicate: ParamPredicate | tuple[ParamPredicate, ...] = ()
    with_name_predicate: ParamWithNamePredicate | tuple[ParamWithNamePredicate, ...] = ()

    def matches(self, param: Tensor, param_name: str) -> bool:
        """True if a parameter meets any condition of this key.

        Args:
            param: parameter to test.
            param_name: the parameter's FQN.
        """
        if any(fnmatch.fnmatchcase(param_name, pattern) for pattern in _tuple(self.name)):
            return True
        if any(bool(getattr(param, attr, False)) for attr in _tuple(self.attr)):
            return True
        if any(test.fn(param) for test in _tuple(self.predicate)):
            return True
        return any(test.fn(param, param_name) for test in _tuple(self.with_name_predicate))


class ParamGroupOverride(TypedDict, total=False):
    """Settings of the parameters that a :class:`ParamKey` matches.

    An override may also have other hyperparameters that the rule allows per param group.

    Attributes:
        max_lr: highest learning rate of the schedule.
        min_lr: lowest learning rate of the schedule.
        start_wd: weight decay at the start of its ramp.
        end_wd: weight decay at the end of its ramp.
        wd_mult: factor of the weight decay; 0.0 turns weight decay off.
        lr_mult: factor of the learning rate.
        eps: number added to the denominator.
        betas: decay per step of the moments.
        momentum: decay per step of the momentum.
        optimizer: with muon, the rule that steps the parameters: muon or ``muon_scalar_optimizer``.
        qkv_split_shapes: with muon, numbers of rows of query, key and value in a fused QKV weight.
    """

    max_lr: float
    min_lr: float
    start_wd: float
    end_wd: float
    wd_mult: float
    lr_mult: float
    eps: float
    betas: tuple[float, ...]
    momentum: float
    optimizer: str
    qkv_split_shapes: tuple[int, ...]


Overrides = Mapping[ParamKey, ParamGroupOverride]


def _key(name: str, fn: Callable[[Tensor, str], bool]) -> ParamKey:
    return ParamKey(with_name_predicate=ParamWithNamePredicate(name, fn))


@dataclass(frozen=True)
class _TableTest:
    """Test of a parameter that depends on whether the parameter is an embedding or output layer.

    Attributes:
        wanted: parameters that pass: tables (embeddings and output layers), hidden (other
            parameters of at least two dimensions), or vector_like (all except hidden).
        tables: embeddings and output layers of the model. Until the factory sets this attribute,
            attributes and names of parameters decide.
    """

    wanted: Literal["tables", "hidden", "vector_like"]
    tables: Tables = field(default_factory=Tables)

    def __call__(self, param: Tensor, name: str) -> bool:
        is_table = self.tables.why(param, name) is not None
        if self.wanted == "tables":
            return is_table
        is_hidden = param.ndim >= 2 and not is_table
        return is_hidden if self.wanted == "hidden" else not is_hidden


def _with_tables(key: ParamKey, tables: Tables) -> ParamKey:
    """Return a copy of a key, with a model's embeddings and output layers set in its tests."""
    tests = tuple(
        replace(test, fn=replace(test.fn, tables=tables))
        if isinstance(test.fn, _TableTest)
        else test
        for test in _tuple(key.with_name_predicate)
    )
    return replace(key, with_name_predicate=tests)


_QK_LAYERNORMS = (".q_layernorm.", ".k_layernorm.", ".q_norm.", ".k_norm.")


def _no_weight_decay(param: Tensor, name: str, spared: Sequence[str] = ()) -> bool:
    is_spared = any(part in f".{name}" for part in spared)
    return (name.endswith(".bias") or name == "bias" or param.ndim <= 1) and not is_spared


def get_standard_config_overrides(config: OptimizerConfig) -> dict[ParamKey, ParamGroupOverride]:
    """Return the default overrides of a config.

    Biases and 1-D parameters get no weight decay. Embedding and output parameters get
    ``decoupled_lr``, if the config sets it. A truthy attribute ``is_embedding_or_output_parameter``
    marks such a parameter. Without that attribute the module decides (``nn.Embedding`` and similar,
    tied parameters, Hugging Face's ``get_output_embeddings()``), and then the names that model
    families use.

    Args:
        config: ``apply_wd_to_qk_layernorm``, ``decoupled_lr``, ``decoupled_min_lr`` and ``min_lr``
            are read.
    """
    undecayed = (
        _key("no_weight_decay_but_qk", partial(_no_weight_decay, spared=_QK_LAYERNORMS))
        if config.apply_wd_to_qk_layernorm
        else _key("no_weight_decay", _no_weight_decay)
    )
    overrides: dict[ParamKey, ParamGroupOverride] = {undecayed: {"wd_mult": 0.0}}
    if config.decoupled_lr is not None:
        floor = config.decoupled_min_lr
        if floor is None and config.min_lr is not None:
            floor = min(config.min_lr, config.decoupled_lr)
        decoupled: ParamGroupOverride = {"max_lr": config.decoupled_lr}
        if floor is not None:
            decoupled["min_lr"] = floor
        overrides[_key("embedding_or_output", _TableTest("tables"))] = decoupled
    return overrides


def get_mup_config_overrides(
    config: OptimizerConfig, mup_width_mult: float, optimizer_type: str = "adam"
) -> dict[ParamKey, ParamGroupOverride]:
    """Return overrides for muP: learning rates that transfer across width (Yang et al. 2022,
    table 8).

    Adam: hidden matrices get ``lr / width`` and ``eps / width``. SGD: vector-like parameters and
    embeddings get ``lr * width``. For ``optimizer="muon"`` there are no overrides, because Muon's
    scale modes depend on the width.

    Args:
        config: config with ``lr``; its ``min_lr`` is scaled, too.
        mup_width_mult: width of this model divided by the width that ``lr`` was tuned at, > 0.
        optimizer_type: formula to use, adam or sgd.

    Raises:
        ValueError: an argument is out of range, or ``config.lr`` is None.
    """
    if not mup_width_mult > 0.0:
        raise ValueError(f"mup_width_mult={mup_width_mult!r}: must be > 0")
    if optimizer_type not in ("adam", "sgd"):
        raise ValueError(f"optimizer_type={optimizer_type!r}: must be 'adam' or 'sgd'")
    lr = _required_lr(config)
    if config.optimizer == "muon":
        return {}

    factor = mup_width_mult if optimizer_type == "sgd" else 1 / mup_width_mult
    override: ParamGroupOverride = {"max_lr": lr * factor}
    if config.min_lr is not None:
        override["min_lr"] = config.min_lr * factor
    if optimizer_type == "sgd":
        return {_key("mup_vector_like", _TableTest("vector_like")): override}
    override["eps"] = config.adam_eps / mup_width_mult
    return {_key("mup_hidden", _TableTest("hidden")): override}


def check_config_overrides_consistency(
    config: OptimizerConfig, config_overrides: Overrides | None
) -> None:
    """Check that no override changes a setting of the whole stack.

    Args:
        config: config of the stack.
        config_overrides: settings by :class:`ParamKey`; None for no overrides.

    Raises:
        ValueError: an override of ``optimizer``, ``optimizer_cpu_offload``, ``fp16`` or ``bf16``
            differs from the config. With a muon config, ``optimizer`` may be muon or
            ``muon_scalar_optimizer``.
    """
    rules = {config.optimizer, config.elementwise_rule}
    for override in (config_overrides or {}).values():
        for name, value in override.items():
            if name == "optimizer" and value in rules:
                continue
            if name in OF_THE_STACK and value != getattr(config, name):
                raise ValueError(
                    f"override {name}={value!r} differs from {getattr(config, name)!r} in the "
                    "config, and all param groups must have the same value; remove the override"
                )


def _required_lr(config: OptimizerConfig) -> float:
    if config.lr is None:
        raise ValueError("lr=None: param groups need a learning rate; set OptimizerConfig.lr")
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
                    f"{name}: overrides disagree on {setting}: {result[setting]!r} and {value!r}; "
                    "remove one of the overrides"
                )
    return result


def get_param_groups(
    model_chunks: Sequence[nn.Module],
    config: OptimizerConfig,
    config_overrides: Overrides | None = None,
    expert_predicate: Callable[[Tensor, str], bool] | None = None,
) -> list[dict[str, Any]]:
    """Build one param group per combination of overrides, separately for experts.

    Dense groups come first, then groups are in order of appearance. Frozen parameters are omitted.
    Tied parameters appear once, under their first name.

    Args:
        model_chunks: modules of the model.
        config: config with ``lr``.
        config_overrides: settings by :class:`ParamKey`; None for no overrides.
        expert_predicate: ``(param, name) -> bool``, True for expert parameters. The default reads
            the parameter's attributes and name.

    Returns:
        Groups with ``params``, ``param_names``, ``lr``, ``max_lr``, ``min_lr``, ``weight_decay``,
            ``wd_mult``, ``lr_mult``, ``is_expert_parallel``, ``is_decoupled_lr`` and other settings
            of overrides. ``min_lr`` is present only if config or override set it.

    Raises:
        TypeError: a trainable parameter is complex or not floating-point.
        ValueError: ``lr`` is None, an override is not valid, or two overrides of a parameter
            disagree.
    """
    lr = _required_lr(config)
    check_config_overrides_consistency(config, config_overrides)
    tables = Tables(model_chunks)
    overrides = {
        _with_tables(key, tables): checked_override(config, override)
        for key, override in (config_overrides or {}).items()
    }
    expert = expert_predicate or is_expert_param
    muon = MuonAssignment(model_chunks, config, tables) if config.optimizer == "muon" else None
    members: dict[tuple[bool, tuple[Any, ...]], list[tuple[str, Tensor]]] = {}
    trained = [(name, param) for name, param in named_params(model_chunks) if param.requires_grad]
    for name, param in trained:
        if param.is_complex() or not param.is_floating_point():
            raise TypeError(
                f"{name} is {param.dtype}: only real floating-point parameters can be trained; "
                "freeze the parameter with requires_grad_(False)"
            )
        override = _combined(param, name, overrides)
        is_expert = bool(expert(param, name))
        if muon is not None:
            override = muon.settings(param, name, is_expert, override)
        key = (is_expert, tuple(sorted(override.items())))
        members.setdefault(key, []).append((name, param))
    for unmatched in overrides:
        if (unmatched.name or unmatched.attr) and not any(
            unmatched.matches(param, name) for name, param in trained
        ):
            _log.warning("override %s matches no trainable parameter", unmatched)
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
    decoupled = config.decoupled_lr is not None and settings["max_lr"] == config.decoupled_lr != lr
    return {
        "params": [param for _, param in named],
        "param_names": [name for name, _ in named],
        "lr": settings["max_lr"] * settings["lr_mult"],
        "weight_decay": config.weight_decay * settings["wd_mult"],
        "is_expert_parallel": is_expert,
        "is_decoupled_lr": decoupled,
        **settings,
    }


def keys_of_patterns(
    overrides: Mapping[str, Mapping[str, Any]], rule: str
) -> dict[ParamKey, dict[str, Any]]:
    """Return the overrides of an optimizer class, by :class:`ParamKey`.

    Args:
        overrides: settings by shell pattern of parameter names; ``|`` separates several patterns.
        rule: ``optimizer`` of the config.

    Raises:
        ValueError: a param group of the rule cannot override a setting.
    """
    known = ["lr", "weight_decay", "optimizer", *RULES[rule].overrides]
    for pattern, override in overrides.items():
        for name, value in override.items():
            if name not in known:
                raise ValueError(
                    f"overrides[{pattern!r}]: {name}={value!r} is not a setting of a param group"
                    f"{nearest(name, known)}; use one of {known}"
                )
    return {
        ParamKey(name=tuple(pattern.split("|"))): dict(override)
        for pattern, override in overrides.items()
    }


def split_group(
    group: Mapping[str, Any], overrides: Mapping[ParamKey, Mapping[str, Any]]
) -> list[dict[str, Any]]:
    """Split a param group into one group per combination of overrides.

    Parameters without an override come first, then groups are in order of appearance.

    Args:
        group: param group; its parameters have names, in pairs or as ``param_names``.
        overrides: settings by :class:`ParamKey`.

    Raises:
        ValueError: the parameters have no names, or two overrides of one parameter disagree.
    """
    params = group["params"]
    members = [params] if isinstance(params, Tensor) else list(params)
    if any(isinstance(member, Tensor) for member in members):
        names = group.get("param_names")
        if names is None:
            raise ValueError("overrides: the parameters have no names; pass named_parameters()")
        members = list(zip(names, members, strict=True))
    rest = {key: value for key, value in group.items() if key not in ("params", "param_names")}
    parts: dict[tuple[Any, ...], list[tuple[str, Tensor]]] = {(): []}
    for name, param in members:
        override = _combined(param, name, overrides)
        parts.setdefault(tuple(sorted(override.items())), []).append((name, param))
    split = [{**rest, **dict(override), "params": part} for override, part in parts.items()]
    return [part for part in split if part["params"]] or split


def check_each_in_one_group(
    model_chunks: Sequence[nn.Module], param_groups: Sequence[Mapping[str, Any]]
) -> None:
    """Check that every trainable parameter is in exactly one param group.

    Args:
        model_chunks: modules of the model.
        param_groups: groups with parameters or (name, parameter) pairs as ``params``.

    Raises:
        ValueError: a parameter is in no group or in several groups; the message names the first
            such parameter.
    """
    counts: Counter[int] = Counter()
    for group in param_groups:
        counts.update(id(item[1] if isinstance(item, tuple) else item) for item in group["params"])
    for name, param in named_params(model_chunks):
        if param.requires_grad and (count := counts[id(param)]) != 1:
            raise ValueError(
                f"{name} is in {count} param groups; put every trainable parameter in exactly one "
                "group, or freeze the parameter with requires_grad_(False)"
            )


# -- settings -------------------------------------------------------------------------------------


OF_THE_STACK = ("optimizer", "optimizer_cpu_offload", "fp16", "bf16")
"""Settings that are equal for all param groups of a stack."""
_INSTEAD = {"lr": "max_lr", "weight_decay": "wd_mult, start_wd and end_wd"}
"""For each setting that a schedule overwrites, the settings to use in an override instead."""
_SETTINGS_OF_ANY = (
    *("params", "param_names", "is_expert_parallel", "is_decoupled_lr", "optimizer"),
    *SCHEDULED,
)
_AS_ELSEWHERE = {
    "learning_rate": "lr",
    **dict.fromkeys(("wd", "decay"), "weight_decay"),
    **dict.fromkeys(("beta1", "beta2", "adam_betas"), "betas"),
    **dict.fromkeys(("epsilon", "adam_eps"), "eps"),
}
_RATES = [name for name in SCHEDULED if name != "initial_lr"]


def checked_override(config: OptimizerConfig, override: Mapping[str, Any]) -> dict[str, Any]:
    """Check an override, except the rule's hyperparameters, which the executor checks.

    Args:
        config: config of the stack.
        override: settings by name.

    Returns:
        The override with tuples in place of lists.

    Raises:
        ValueError: a setting is unknown or has no effect, or a rate is out of range.
    """
    known = [*_RATES, *RULES[config.optimizer].overrides, *OF_THE_STACK]
    for name, value in override.items():
        if name in _INSTEAD:
            raise ValueError(
                f"override {name}={value!r}: schedules set {name}; use {_INSTEAD[name]}"
            )
        if name not in known:
            raise ValueError(
                f"override {name}={value!r}: param groups of {config.optimizer!r} have no such "
                f"setting{nearest(name, known)}; use one of {known}"
            )
    for name in override.keys() & set(_RATES):
        check_setting(name, override[name], RATE)
    top = override.get("max_lr", config.lr)
    floor = override.get("min_lr", config.min_lr)
    if top is not None and floor is not None and floor > top:
        raise ValueError(f"override max_lr={top!r}: below min_lr={floor!r}; override min_lr too")
    return {
        name: tuple(value) if isinstance(value, list) else value for name, value in override.items()
    }


def check_group_settings(where: str, group: Mapping[str, Any], rule: str) -> None:
    """Check for misspelt settings in a caller's param group.

    Keys that resemble no setting are allowed. The executor checks the values.

    Args:
        where: name of the group, for the error.
        group: settings by name.
        rule: ``optimizer`` of the config.

    Raises:
        ValueError: a key is not a setting, and resembles the name of a setting.
    """
    known = [*_SETTINGS_OF_ANY, *RULES[rule].overrides]
    for name, value in group.items():
        hint = nearest(name, known, 0.8)
        if name in _AS_ELSEWHERE:
            hint = f"; did you mean {_AS_ELSEWHERE[name]!r}?"
        if name not in known and hint:
            raise ValueError(f"{where}: {name}={value!r} is not a setting of a param group{hint}")
