"""Public entry points: they check the arguments, and choose the settings that were left open."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from mp_optim.config import OptimizerConfig
from mp_optim.config.setting_checks import nearest
from mp_optim.core.model_parallel import ModelParallel
from mp_optim.core.names import ModelParams, canonical_names, named_params, prefixed
from mp_optim.core.param_attributes import check_attributes
from mp_optim.factory.build import StackRequest, build, set_up_host
from mp_optim.factory.host_memory_check import check_host_memory
from mp_optim.factory.offload_fraction import with_chosen_fraction
from mp_optim.host.calls import in_own_modes, warn
from mp_optim.mixed_precision import MegatronOptimizer
from mp_optim.param_groups.overrides import (
    ParamKey,
    check_group_settings,
    get_mup_config_overrides,
    get_standard_config_overrides,
)
from mp_optim.process_groups.process_groups import ProcessGroups

_log = logging.getLogger(__name__)


@in_own_modes
def get_megatron_optimizer(
    config: OptimizerConfig,
    model: nn.Module | Sequence[nn.Module] = (),
    config_overrides: Mapping[ParamKey, Any] | None = None,
    *,
    process_groups: ProcessGroups | None = None,
    expert_predicate: Callable[..., bool] | None = None,
    param_groups: Sequence[dict[str, Any]] | None = None,
    global_names: Callable[[str], str] | None = None,
    **settings: Any,
) -> MegatronOptimizer:
    """Build the optimizer stack for a model.

    Args:
        config: what to build.
        model: a module or a list of model chunks, in their final dtype and on their final device.
        config_overrides: per-parameter settings; by default :func:`get_standard_config_overrides`.
        process_groups: whom to agree with on gradient norms; none by default. DTensor parameters
            bring their own mesh.
        expert_predicate: ``(param, name) -> bool``, which parameters are experts.
        param_groups: groups to use instead of those made from the overrides.
        global_names: what a parameter or buffer is called in the whole model, from its name here:
            for state dicts and checkpoints, where ranks count layers or experts from 0. By default
            experts are counted over ``process_groups.ep``, and layers of stages (``pp``) have a
            ``layer_number``; see :meth:`mp_optim.ModelParallel.of`.
        settings: none; whatever comes here is named as a field of the config.

    Returns:
        One optimizer; a :class:`ChainedOptimizer` of a dense and an expert part for a MoE. Its
        ``config`` is the one given, except that ``optimizer_offload_fraction="auto"`` has become
        the number that was chosen.

    Raises:
        ValueError, TypeError: the config or the model does not fit, naming the field or parameter.
    """
    if settings:
        shown = ", ".join(f"{name}={value!r}" for name, value in settings.items())
        raise TypeError(
            f"get_megatron_optimizer takes no {', '.join(settings)}: settings are fields of the "
            f"config, as in get_megatron_optimizer(OptimizerConfig({shown}), model)"
        )
    if not isinstance(config, OptimizerConfig):
        raise TypeError(
            f"config is a {type(config).__name__}: the arguments are an OptimizerConfig, then the "
            "model"
        )
    config.check()
    chunks = _chunks_of(model)
    if param_groups is not None:
        param_groups = _checked_groups(config, chunks, param_groups)
    _check_model(config, chunks, param_groups)
    groups = process_groups or ProcessGroups()
    if groups.grad_stats is None or groups.grad_stats.size() == 1:
        _check_overrides_match(config, chunks, config_overrides)
    request = StackRequest(config, chunks, config_overrides, groups, expert_predicate, param_groups)
    if config.optimizer_offload_fraction == "auto":
        if param_groups is not None:
            raise ValueError(
                "optimizer_offload_fraction='auto' with param_groups=: the planner makes the "
                "groups itself; give config_overrides instead, or a number (see mp_optim.plan)"
            )
        config = with_chosen_fraction(request)
        request = dataclasses.replace(request, config=config)
    check_host_memory(request)
    parallel = ModelParallel.of(chunks, groups, global_names, expert_predicate)
    set_up_host(config)
    optimizer = build(request)
    params = ModelParams(chunks)
    for stack in (optimizer, *optimizer.chained_optimizers):
        stack.model_params = params
        stack.model_parallel = parallel
    for line in optimizer.choice_notes():
        _log.info(line)
    return optimizer


def _chunks_of(model: Any) -> list[nn.Module]:
    if isinstance(model, nn.Module):
        return [model]
    chunks = list(model) if isinstance(model, (list, tuple)) else [model]
    if chunks and all(isinstance(chunk, nn.Module) for chunk in chunks):
        return chunks
    kinds = sorted({type(chunk).__name__ for chunk in chunks if not isinstance(chunk, nn.Module)})
    what = f"made of {kinds}" if chunks else "missing or empty"
    raise TypeError(
        f"model is {what}: it must be a module or a list of modules; parameters of your own "
        'choosing go into param_groups=[{"params": [...]}]'
    )


def _check_model(config: OptimizerConfig, chunks: Sequence[nn.Module], param_groups: Any) -> None:
    """Raise if there is nothing to train yet; warn if the config asks for mixed precision of a
    model without any."""
    named = list(named_params(chunks))
    trained = [(name, param) for name, param in named if param.requires_grad]
    for name, param in trained:
        check_attributes(name, param)
    # One process of several may hold nothing that is trained: a stage, an expert's rank.
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
            "params. For mixed precision convert the model first (model.bfloat16()); under "
            "autocast leave bf16 off"
        )


def _check_overrides_match(
    config: OptimizerConfig, chunks: Sequence[nn.Module], overrides: Mapping[ParamKey, Any] | None
) -> None:
    """Raise if an override of the caller's matches no parameter at all; the standard ones may."""
    if not overrides:
        return
    standard = {*get_standard_config_overrides(config)}
    if config.lr is not None:
        for rule in ("adam", "sgd"):
            standard.update(get_mup_config_overrides(config, 1.0, rule))
    named = list(named_params(chunks))
    for key in overrides:
        if key in standard or any(key.matches(param, name) for name, param in named):
            continue
        pattern = key.name if isinstance(key.name, str) else " ".join(key.name)
        given = {field.name: getattr(key, field.name) for field in dataclasses.fields(key)}
        shown = ", ".join(
            f"{field}={getattr(value, 'name', value)!r}"
            for field, value in given.items()
            if value != ()
        )
        raise ValueError(
            f"override ParamKey({shown}) matches no "
            f"parameter{nearest(pattern, [name for name, _ in named])}; correct it, or pass "
            "process_groups= with grad_stats if another rank holds its parameters"
        )


def _checked_groups(
    config: OptimizerConfig, chunks: Sequence[nn.Module], groups: Any
) -> list[dict[str, Any]]:
    """The caller's param groups with names: the model's, canonical ones, where they have none."""
    given = [groups] if isinstance(groups, Mapping) else list(groups)
    for index, group in enumerate(given):
        if not isinstance(group, Mapping) or "params" not in group:
            what = sorted(group) if isinstance(group, Mapping) else f"a {type(group).__name__}"
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
    params = [group["params"]] if isinstance(group["params"], Tensor) else list(group["params"])
    given = list(group.get("param_names", ()))
    if params and all(isinstance(item, tuple) for item in params):
        given = [name for name, _ in params]
        params = [param for _, param in params]
    wanted = []
    for index, param in enumerate(params):
        own = given[index] if index < len(given) else None
        called, canonical = names.get(id(param), (set(), None))
        wanted.append(canonical if own is None or own in called else own)
    named = {key: value for key, value in group.items() if key != "param_names"}
    named["params"] = params
    if params and None not in wanted:
        named["param_names"] = wanted
    return named
