"""``get_megatron_optimizer``: checks of the arguments, and choice of the offload fraction."""

from __future__ import annotations

import dataclasses
import itertools
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
        config: settings of the stack, checked again here.
        model: a module or a list of model chunks, in their final dtype and on their final device.
        config_overrides: settings by :class:`ParamKey`. The default is
            :func:`get_standard_config_overrides`; ``{}`` has no overrides.
        process_groups: ranks to reduce gradient norms and, with a distributed optimizer, gradients
            over. The default is one rank, or all ranks with a distributed optimizer; DTensors have
            their own mesh.
        expert_predicate: ``(param, name) -> bool``, True for expert parameters. The default reads
            the parameter's attributes and name.
        param_groups: param groups (dicts with ``"params"``). By default groups are made from the
            overrides.
        global_names: function from the name of a parameter or buffer on this rank to its name in
            the whole model. State dicts and checkpoints need the function if ranks number layers or
            experts from 0. By default expert numbers are offset by the rank in
            ``process_groups.ep``, and layer numbers of pipeline stages (``pp``) are read from
            ``layer_number``; see :meth:`mp_optim.ModelParallel.of`.
        settings: not supported: set fields of the config instead.

    Returns:
        One optimizer; for a mixture of experts, a :class:`ChainedOptimizer` of a dense and an
            expert optimizer. Its ``config`` is ``config``, with a number in place of
            ``optimizer_offload_fraction="auto"``.

    Raises:
        TypeError: an argument has the wrong type, or a parameter's dtype is not supported.
        ValueError: the config is not valid, does not fit the model or the process groups, or needs
            more host memory than this process may use; or an override matches no parameter.
    """
    if settings:
        shown = ", ".join(f"{name}={value!r}" for name, value in settings.items())
        raise TypeError(
            f"get_megatron_optimizer takes no {', '.join(settings)}, because settings are fields "
            f"of the config; write get_megatron_optimizer(OptimizerConfig({shown}), model)"
        )
    if not isinstance(config, OptimizerConfig):
        raise TypeError(
            f"config is a {type(config).__name__}: pass an OptimizerConfig first, then the model"
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
                "optimizer_offload_fraction='auto' with param_groups=: the planner makes its own "
                "groups; pass config_overrides instead, or set a number (see mp_optim.plan)"
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
    given = f"made of {kinds}" if chunks else "missing or empty"
    raise TypeError(
        f"model is {given}; pass a module or a list of modules. To select parameters, pass "
        'param_groups=[{"params": [...]}] in addition'
    )


def _check_model(config: OptimizerConfig, chunks: Sequence[nn.Module], param_groups: Any) -> None:
    """Check the attributes and dtypes of a model's parameters.

    Warn if ``bf16=True`` and all parameters are FP32.

    Raises:
        ValueError: an attribute is not valid, or no parameter is trainable.
    """
    named = list(named_params(chunks))
    trained = [(name, param) for name, param in named if param.requires_grad]
    for name, param in trained:
        check_attributes(name, param)
    # One rank of several, such as a pipeline stage, may have no trainable parameters. So the error
    # is raised only in a single process.
    alone = not dist.is_initialized() or dist.get_world_size() == 1
    if not trained and param_groups is None and alone:
        raise ValueError(
            f"the model has no trainable parameter ({len(named)} are frozen); unfreeze parameters "
            "with requires_grad_(True), or add adapters (peft) before the optimizer is built. To "
            "add all groups later, pass param_groups=[]"
        )
    kinds = {param.dtype for _, param in named if param.is_floating_point()}
    if config.bf16 and kinds == {torch.float32}:
        warn(
            "bf16=True, but all parameters are float32 and have no separate main params. For mixed "
            "precision convert the model first (model.bfloat16()); under autocast set bf16=False"
        )


def _check_overrides_match(
    config: OptimizerConfig, chunks: Sequence[nn.Module], overrides: Mapping[ParamKey, Any] | None
) -> None:
    """Raise ValueError if an override matches no parameter. Standard overrides need not match."""
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
            f"parameter{nearest(pattern, [name for name, _ in named])}; correct the key, or pass "
            "process_groups= with grad_stats if another rank holds its parameters"
        )


def _checked_groups(
    config: OptimizerConfig, chunks: Sequence[nn.Module], groups: Any
) -> list[dict[str, Any]]:
    """Check the caller's param groups, and add canonical parameter names to groups without names.

    Raises:
        TypeError: a group is not a dict with ``"params"``.
        ValueError: the name of a setting is misspelt.
    """
    given = [groups] if isinstance(groups, Mapping) else list(groups)
    for index, group in enumerate(given):
        if not isinstance(group, Mapping) or "params" not in group:
            given_as = sorted(group) if isinstance(group, Mapping) else f"a {type(group).__name__}"
            raise TypeError(
                f'param_groups[{index}] is {given_as}: pass dicts with "params", as in '
                'param_groups=[{"params": [...], "lr": 1e-4}]'
            )
        check_group_settings(f"param_groups[{index}]", group, config.optimizer)
    # The names of each parameter in its module, and its canonical name, by parameter id.
    names: dict[int, tuple[set[str], str]] = {}
    for prefix, chunk in prefixed(chunks):
        of_chunk = dict(chunk.named_parameters(remove_duplicate=False))
        short = canonical_names(chunk, of_chunk)
        for name, held in of_chunk.items():
            known, _ = names.setdefault(id(held), (set(), prefix + short[name]))
            known |= {name, prefix + name}
    named = []
    for group in given:
        params = [group["params"]] if isinstance(group["params"], Tensor) else list(group["params"])
        own = list(group.get("param_names", ()))
        if params and all(isinstance(item, tuple) for item in params):
            own, params = (list(column) for column in zip(*params, strict=True))
        wanted = []
        for given_name, param in itertools.zip_longest(own[: len(params)], params):
            known, canonical = names.get(id(param), (set(), None))
            is_default = given_name is None or given_name in known
            wanted.append(canonical if is_default else given_name)
        rest = {key: value for key, value in group.items() if key != "param_names"}
        named.append({**rest, "params": params})
        if params and None not in wanted:
            named[-1]["param_names"] = wanted
    if all("param_names" in group for group in named if group["params"]):
        return named
    if not any("param_names" in group for group in given):
        for group in named:
            group.pop("param_names", None)
    return named
