"""What ``get_megatron_optimizer`` is given beside the config: is it a model to train, and do the
rest fit it."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from mp_optim.config import OptimizerConfig
from mp_optim.groups.group_settings import check_group_settings
from mp_optim.groups.overrides import (
    ParamKey,
    get_mup_config_overrides,
    get_standard_config_overrides,
)
from mp_optim.process.caller_warnings import warn
from mp_optim.slots.names import canonical_names, named_params, prefixed
from mp_optim.slots.param_attributes import check_attributes

_CLOSE = 0.75
"""How alike a name in an override and a parameter's have to be to be worth showing."""


def chunks_of(model: Any) -> list[nn.Module]:
    """A model as its chunks.

    Raises:
        TypeError: it is no module and no list of modules.
    """
    if isinstance(model, nn.Module):
        return [model]
    chunks = list(model) if isinstance(model, (list, tuple)) else [model]
    if chunks and all(isinstance(chunk, nn.Module) for chunk in chunks):
        return chunks
    kinds = sorted(
        {type(chunk).__name__ for chunk in chunks if not isinstance(chunk, nn.Module)}
    )
    what = f"made of {kinds}" if chunks else "missing or empty"
    raise TypeError(
        f"model is {what}: it must be a module or a list of modules; parameters of your own "
        "choosing go "
        'into param_groups=[{"params": [...]}]'
    )


def check_model(
    config: OptimizerConfig, chunks: Sequence[nn.Module], param_groups: Any
) -> None:
    """Raise if there is nothing to train yet; warn if the config asks for mixed precision of a
    model without any.

    A process of a job of several may hold nothing that is trained (a stage, an expert's rank);
    alone it may not, unless the caller's own groups say so.

    Raises:
        ValueError: naming the parameter, and what to do.
    """
    named = list(named_params(chunks))
    trained = [(name, param) for name, param in named if param.requires_grad]
    for name, param in trained:
        check_attributes(name, param)
    alone = not dist.is_initialized() or dist.get_world_size() == 1
    if not trained and param_groups is None and alone:
        raise ValueError(
            f"the model has no trainable parameter ({len(named)} are frozen): unfreeze some with "
            "requires_grad_(True), or add adapters (peft) before the optimizer is built. To begin "
            "with nothing and add groups later, pass param_groups=[]"
        )
    kinds = {param.dtype for _, param in named if param.is_floating_point()}
    if config.bf16 and kinds == {torch.float32}:
        warn(
            "bf16=True, but all parameters are float32: they are stepped as they are, without main "
            "params. For mixed "
            "precision convert the model first (model.bfloat16()); under autocast leave bf16 off"
        )


# -- overrides ------------------------------------------------------------------------------------


def check_overrides_match(
    config: OptimizerConfig,
    chunks: Sequence[nn.Module],
    overrides: Mapping[ParamKey, Any] | None,
) -> None:
    """Raise if an override of the caller's matches no parameter at all; the standard ones may.

    Raises:
        ValueError: naming it, and the nearest names.
    """
    if not overrides:
        return
    standard = {*get_standard_config_overrides(config)}
    for rule in ("adam", "sgd"):
        standard |= (
            get_mup_config_overrides(config, 1.0, rule).keys()
            if config.lr is not None
            else set()
        )
    named = list(named_params(chunks))
    for key in overrides:
        if key in standard or any(key.matches(param, name) for name, param in named):
            continue
        raise ValueError(
            f"override {_said(key)} matches no "
            f"parameter{_nearest(key, [name for name, _ in named])}. "
            "Where another rank holds what it is for, say so with process_groups= (grad_stats)"
        )


def _said(key: ParamKey) -> str:
    fields = {
        "name": key.name,
        "attr": key.attr,
        "predicate": key.predicate,
        "with_name_predicate": key.with_name_predicate,
    }
    said = [
        f"{field}={getattr(value, 'name', value)!r}"
        for field, value in fields.items()
        if value != ()
    ]
    return f"ParamKey({', '.join(said)})"


def _nearest(key: ParamKey, names: Sequence[str]) -> str:
    patterns = [key.name] if isinstance(key.name, str) else list(key.name)
    close: dict[str, None] = {}
    for pattern in patterns:
        close |= dict.fromkeys(
            difflib.get_close_matches(pattern, names, n=3, cutoff=0.4)
        )
    shown = list(close) or list(names[:3])
    return (
        f"; the {'nearest' if close else 'first'} are {', '.join(map(repr, shown))}"
        if shown
        else ""
    )


# -- param groups ---------------------------------------------------------------------------------


def checked_groups(
    config: OptimizerConfig, chunks: Sequence[nn.Module], groups: Any
) -> list[dict[str, Any]]:
    """Param groups of the caller's with names: the model's, canonical ones, where they have none.

    Raises:
        TypeError: they are no dicts with ``params``. ValueError: a setting is misspelt or out of
            range.
    """
    given = [groups] if isinstance(groups, Mapping) else list(groups)
    for index, group in enumerate(given):
        if not isinstance(group, Mapping) or "params" not in group:
            what = (
                sorted(group)
                if isinstance(group, Mapping)
                else f"a {type(group).__name__}"
            )
            raise TypeError(
                f'param_groups[{index}] is {what}: give dicts with "params", as in '
                'param_groups=[{"params": [...], "lr": 1e-4}]'
            )
        check_group_settings(f"param_groups[{index}]", group, config.optimizer)
    names = _names(chunks)
    named = [_with_names(group, names) for group in given]
    if all("param_names" in group for group in named if group["params"]):
        return named
    if not any("param_names" in group for group in given):
        for group in named:
            group.pop("param_names", None)
    return named


def _names(chunks: Sequence[nn.Module]) -> dict[int, tuple[set[str], str]]:
    """By parameter: what it is called in its module, and canonically."""
    found: dict[int, tuple[set[str], str]] = {}
    for prefix, chunk in prefixed(chunks):
        own = dict(chunk.named_parameters(remove_duplicate=False))
        short = canonical_names(chunk, own)
        for name, param in own.items():
            called, _ = found.setdefault(id(param), (set(), prefix + short[name]))
            called |= {name, prefix + name}
    return found


def _with_names(
    group: Mapping[str, Any], names: Mapping[int, tuple[set[str], str]]
) -> dict[str, Any]:
    params = (
        [group["params"]]
        if isinstance(group["params"], Tensor)
        else list(group["params"])
    )
    given = list(group.get("param_names", ()))
    if params and all(isinstance(item, tuple) for item in params):
        given = [name for name, _ in params]
        params = [param for _, param in params]
    wanted = []
    for index, param in enumerate(params):
        own = given[index] if index < len(given) else None
        called, canonical = names.get(id(param), (set(), None))
        wanted.append(canonical if own is None or own in called else own)
    rest = {key: value for key, value in group.items() if key != "param_names"}
    return {
        **rest,
        "params": params,
        **({"param_names": wanted} if None not in wanted and params else {}),
    }
