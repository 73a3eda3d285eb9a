"""The front door: what a caller asks for is checked, and what was left open is decided."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import nn

from mp_optim.config import OptimizerConfig
from mp_optim.factory import build
from mp_optim.groups.arguments import (
    check_model,
    check_overrides_match,
    checked_groups,
    chunks_of,
)
from mp_optim.groups.overrides import ParamKey
from mp_optim.planner.auto import with_chosen_fraction
from mp_optim.precision import MegatronOptimizer
from mp_optim.process.torch_modes import in_own_modes
from mp_optim.ranks.process_groups import ProcessGroups
from mp_optim.slots.model_parallel import ModelParallel
from mp_optim.slots.names import ModelParams


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
            ``process_groups.ep`` and ``pp`` say so, for names like Megatron's; see
            :meth:`mp_optim.ModelParallel.of`.
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
    chunks = chunks_of(model)
    if param_groups is not None:
        param_groups = checked_groups(config, chunks, param_groups)
    check_model(config, chunks, param_groups)
    groups = process_groups or ProcessGroups()
    if groups.grad_stats is None or groups.grad_stats.size() == 1:
        check_overrides_match(config, chunks, config_overrides)
    if config.optimizer_offload_fraction == "auto":
        if param_groups is not None:
            raise ValueError(
                "optimizer_offload_fraction='auto' with param_groups=: the planner makes the "
                "groups itself; give config_overrides instead, or a number (see mp_optim.plan)"
            )
        config = with_chosen_fraction(
            config, chunks, config_overrides, groups, expert_predicate
        )
    parallel = ModelParallel.of(chunks, groups, global_names, expert_predicate)
    optimizer = build(
        config, chunks, config_overrides, groups, expert_predicate, param_groups
    )
    params = ModelParams(chunks)
    for stack in (optimizer, *optimizer.chained_optimizers):
        stack.watch.params = stack.model_params = params
        stack.model_parallel = parallel
    return optimizer
