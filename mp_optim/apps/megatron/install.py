"""Replacement of Megatron's optimizer factories by this package's factories, and wrappers with
Megatron's arguments."""

from __future__ import annotations

import copy
import dataclasses
import importlib
import inspect
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from mp_optim import mixed_precision as precision
from mp_optim.apps.megatron.adapter import MegatronAdapter
from mp_optim.apps.megatron.config import config_from_megatron
from mp_optim.apps.megatron.patches import (
    check_replacements,
    full_name,
    is_replaced,
    replaced_groups,
)
from mp_optim.apps.megatron.torch_format import SavedSettings, groups_elsewhere
from mp_optim.config import OptimizerConfig
from mp_optim.core import iter_slots
from mp_optim.core.param_attributes import is_expert_param
from mp_optim.factory import get_optimizer as api
from mp_optim.mixed_precision import MegatronGradScaler, MegatronOptimizer
from mp_optim.offload import hybrid
from mp_optim.process_groups.process_groups import ProcessGroups
from mp_optim.rules.fused import FusedAdam
from mp_optim.zero import composite

_HOME = "megatron.core.optimizer"
_REQUIRED_GROUPS = ("dp", "expt_dp", "mp", "tp_ep_pp")
"""Process groups that ``pg_collection`` must have. Megatron requires these groups, too."""
_theirs: dict[str, Any] = {}
"""Megatron's own factories by name, while :func:`install` is in effect; else empty."""
_settings: dict[str, Any] = {}
"""Fields of this package's config that the caller gave to :func:`install`."""


def get_megatron_optimizer(
    config: Any,
    model_chunks: Sequence[nn.Module],
    config_overrides: Mapping[Any, Any] | None = None,
    use_gloo_process_groups: bool = True,
    pg_collection: Any = None,
    dump_param_to_param_group_map: str | None = None,
) -> ChainedOptimizer:
    """Build a stack of this package from the arguments of Megatron's factory.

    Args:
        config: Megatron's ``OptimizerConfig``.
        model_chunks: modules, wrapped in Megatron's DDP or not.
        config_overrides: settings by parameter key; None for Megatron's standard overrides.
        use_gloo_process_groups: ignored, because this package needs no such groups.
        pg_collection: Megatron's process groups; None for the groups of ``parallel_state``.
        dump_param_to_param_group_map: only None is supported.

    Raises:
        ValueError: a Megatron setting is not supported; the message names the setting.
        RuntimeError: the program has replaced a Megatron function that this package bypasses; the
            message names the function.
    """
    if dump_param_to_param_group_map is not None:
        raise ValueError(
            f"dump_param_to_param_group_map={dump_param_to_param_group_map!r}: is not "
            "supported; leave the argument unset, and print optimizer.describe() instead"
        )
    if type(model_chunks[0]).__name__ == "MimoModel":
        raise ValueError(
            "model_chunks[0]=MimoModel: MimoModel steps its modules one by one and computes their "
            "gradient norm itself, which this optimizer does not support; call "
            "mp_optim.megatron.uninstall() before the program builds its optimizer"
        )
    optimizer = importlib.import_module(_HOME)
    if config_overrides is None:
        config_overrides = optimizer.get_standard_config_overrides(config)
    ours = config_from_megatron(config, model_chunks, _settings)
    has_rate = ours.lr is not None
    if not has_rate:  # A scheduler sets the rate before the first step, as in Megatron.
        ours = dataclasses.replace(ours, lr=ours.min_lr or 0.0)
    check_replacements()
    groups = replaced_groups(config, ours, model_chunks, config_overrides)
    kept = None if groups else _without_idle(config_overrides, config, model_chunks)
    stack = api.get_megatron_optimizer(
        ours,
        list(model_chunks),
        kept,
        process_groups=_groups(pg_collection),
        # With one expert-parallel rank Megatron sets ``allreduce``, and experts count as dense.
        expert_predicate=lambda param, name: (
            is_expert_param(param, name) and not getattr(param, "allreduce", False)
        ),
        param_groups=groups,
    )
    for group in stack.param_groups:
        rates = group.get("max_lr", ours.lr), group.get("min_lr", ours.min_lr)
        # Megatron logs the learning rate of the groups that have ``default_config``.
        group["default_config"] = rates == (ours.lr, ours.min_lr)
        if not has_rate and group["default_config"]:
            group["lr"] = None
            group.pop("max_lr", None)  # Without this key the scheduler uses its own max_lr.
    return ChainedOptimizer.over(stack, model_chunks, groups_elsewhere(stack))


def get_megatron_muon_optimizer(
    config: Any,
    model_chunks: Sequence[nn.Module],
    config_overrides: Mapping[Any, Any] | None = None,
    use_gloo_process_groups: bool = True,
    layer_wise_distributed_optimizer: bool = False,
    pg_collection: Any = None,
) -> ChainedOptimizer:
    """Build a Muon stack from the arguments of ``get_megatron_muon_optimizer`` of Megatron core
    0.16.

    The stack is the result of :func:`get_megatron_optimizer` for a config with ``muon`` or
    ``dist_muon``.
    """
    of_muon = copy.copy(config)
    of_muon.optimizer = "dist_muon" if layer_wise_distributed_optimizer else "muon"
    return get_megatron_optimizer(
        of_muon, model_chunks, config_overrides, use_gloo_process_groups, pg_collection
    )


_FACTORIES: dict[str, tuple[str, Callable[..., ChainedOptimizer]]] = {
    "get_megatron_optimizer": (_HOME, get_megatron_optimizer),
    "get_megatron_muon_optimizer": (f"{_HOME}.muon", get_megatron_muon_optimizer),
}
"""Factories of this package, with the name and the module of each Megatron factory.

The factories accept the arguments of Megatron's factories, from core 0.16 on.
"""


def _without_idle(
    overrides: Mapping[Any, Any], config: Any, chunks: Sequence[nn.Module]
) -> dict[Any, Any]:
    """Return the overrides without those standard overrides of Megatron that match no parameter of
    the model.

    An override of the caller is kept, because the caller must learn if it matches no parameter.
    """
    optimizer = importlib.import_module(_HOME)
    standard = {*optimizer.get_standard_config_overrides(config)}
    if mup := getattr(optimizer, "get_mup_config_overrides", None):
        rules = ("adam", "sgd") if config.lr is not None else ()
        standard |= {key for rule in rules for key in mup(config, 2.0, rule)}
    named = [item for chunk in chunks for item in chunk.named_parameters()]
    kept = dict(overrides)
    for key in standard & kept.keys():
        if not any(key.matches(param, name) for name, param in named):
            del kept[key]
    return kept


def _groups(pg_collection: Any) -> ProcessGroups | None:
    """Return Megatron's process groups as this package's :class:`ProcessGroups`; None for a single
    process.

    Raises:
        ValueError: a given collection lacks a group; the message names it.
    """
    if pg_collection is not None:
        for name in _REQUIRED_GROUPS:
            if not hasattr(pg_collection, name):
                raise ValueError(
                    f"pg_collection.{name} is missing; set this process group (None for this "
                    "process alone)"
                )
        return ProcessGroups.from_attributes(pg_collection)
    state = importlib.import_module("megatron.core.parallel_state")
    if not state.model_parallel_is_initialized():
        return None
    config = importlib.import_module("megatron.core.process_groups_config")
    return ProcessGroups.from_attributes(config.ProcessGroupCollection.use_mpu_process_groups())


def install(**settings: Any) -> None:
    """Replace Megatron's factories in all modules that have imported the factories. Call this
    function before ``pretrain``.

    A second call only changes the settings.

    Args:
        settings: fields of :class:`mp_optim.OptimizerConfig` that Megatron's config does not have,
            such as ``offload_mode="speculative"``. The fields are added to Megatron's settings.

    Raises:
        ImportError: Megatron is not installed.
        RuntimeError: Megatron's factory has unknown arguments, or the program has replaced a
            Megatron function that this package bypasses; the message names the factory or function.
        TypeError: a setting is not a field of the config; the message names the setting.
    """
    names = {spec.name for spec in dataclasses.fields(OptimizerConfig)}
    if unknown := sorted(settings.keys() - names):
        raise TypeError(
            f"install({unknown[0]}=...): mp_optim.OptimizerConfig has no such field; remove "
            f"{unknown[0]}, or correct the name"
        )
    _settings.clear()
    _settings.update(settings)
    if _theirs:
        return
    present = {name: _present(name) for name in _FACTORIES}
    check_replacements()
    _theirs.update({name: theirs for name, theirs in present.items() if theirs})
    for name, theirs in _theirs.items():
        _put(theirs, _FACTORIES[name][1])
    # Megatron's callers test their optimizer with isinstance, so register this package's classes as
    # Megatron's.
    theirs = importlib.import_module(_HOME)
    theirs.MegatronOptimizer.register(MegatronAdapter)
    theirs.ChainedOptimizer.register(ChainedOptimizer)


def _present(name: str) -> Any:
    """Return Megatron's factory; None if this version of Megatron has no such factory, or if the
    factory only calls another factory.

    Raises:
        RuntimeError: the factory has arguments that are not supported, or a program has replaced
            the factory; the message names it.
    """
    home, ours = _FACTORIES[name]
    try:
        theirs = getattr(importlib.import_module(home), name)
    except ModuleNotFoundError:
        if home == _HOME:
            raise
        return None
    if is_replaced(theirs):
        raise RuntimeError(
            f"the program has replaced {home}.{name} by {full_name(theirs)}, which this optimizer "
            "would not call; call install() before the program replaces the function, or train "
            "with Megatron's optimizer"
        )
    known, taken = inspect.signature(ours).parameters, inspect.signature(theirs)
    if "config" not in taken.parameters:
        return None
    if others := [argument for argument in taken.parameters if argument not in known]:
        raise RuntimeError(
            f"Megatron's {name} has arguments {', '.join(others)}, which are not supported; "
            f"supported are {', '.join(known)} (megatron-core 0.16 to 0.20)"
        )
    return theirs


def uninstall() -> None:
    """Restore Megatron's own factories."""
    _settings.clear()
    for name, theirs in _theirs.items():
        _put(_FACTORIES[name][1], theirs)
    _theirs.clear()


def _put(present: Any, wanted: Any) -> None:
    """Replace a function in every module that has imported the function, under any name."""
    for of_module, module in list(sys.modules.items()):
        if of_module.startswith("mp_optim."):
            continue
        for known_as, value in list(getattr(module, "__dict__", {}).items()):
            if value is present:
                setattr(module, known_as, wanted)


def _stack_over(
    wrapper: Callable[..., MegatronOptimizer],
    optimizer: torch.optim.Optimizer | None,
    config: Any,
    grad_scaler: Any = None,
) -> MegatronOptimizer:
    """Return the stack that a wrapper builds over an optimizer.

    Args:
        wrapper: class of the stack.
        optimizer: any torch optimizer; None on a rank without parameters to step.
        config: Megatron's ``OptimizerConfig``, or this package's.
        grad_scaler: Megatron's grad scaler, or this package's; Megatron's is copied.

    Raises:
        TypeError: the grad scaler is neither constant nor dynamic.
    """
    if optimizer is None:
        optimizer = FusedAdam([{"params": []}], lr=0.0)
    if getattr(config, "lr", None) is None and not isinstance(config, OptimizerConfig):
        # Use the optimizer's own rate, because the config has none.
        config = dataclasses.replace(config, lr=float(optimizer.param_groups[0]["lr"] or 0.0))
    ours: MegatronGradScaler | None = grad_scaler
    if grad_scaler is not None and not isinstance(grad_scaler, MegatronGradScaler):
        scale, device = float(grad_scaler.scale), grad_scaler.scale.device
        kind = type(grad_scaler).__name__
        if kind not in ("ConstantGradScaler", "DynamicGradScaler"):
            raise TypeError(
                f"grad_scaler is a {kind}; pass a ConstantGradScaler or a DynamicGradScaler"
            )
        if kind == "ConstantGradScaler":
            ours = precision.ConstantGradScaler(scale, device)
        else:
            ours = precision.DynamicGradScaler(
                scale,
                float(grad_scaler.min_scale),
                growth_factor=float(grad_scaler.growth_factor),
                backoff_factor=float(grad_scaler.backoff_factor),
                growth_interval=grad_scaler.growth_interval,
                hysteresis=grad_scaler.hysteresis,
                device=device,
            )
            ours.load_state_dict(grad_scaler.state_dict())
    return wrapper(optimizer, config_from_megatron(config), ours)


class Float16OptimizerWithFloat16Params(MegatronAdapter):
    """:class:`mp_optim.Float16OptimizerWithFloat16Params` with Megatron's arguments.

    Args:
        optimizer: any torch optimizer; None on a rank without parameters to step.
        config: Megatron's ``OptimizerConfig``, or this package's.
        grad_scaler: Megatron's grad scaler, or this package's.
        init_state_fn: stored for callers that read it; this package allocates state itself.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer | None,
        config: Any,
        grad_scaler: Any,
        init_state_fn: Callable[..., Any] | None = None,
    ) -> None:
        wrapper = precision.Float16OptimizerWithFloat16Params
        super().__init__(_stack_over(wrapper, optimizer, config, grad_scaler))
        self.init_state_fn = init_state_fn


class FP32Optimizer(MegatronAdapter):
    """:class:`mp_optim.FP32Optimizer` with Megatron's arguments."""

    def __init__(
        self,
        optimizer: torch.optim.Optimizer | None,
        config: Any,
        init_state_fn: Callable[..., Any] | None = None,
    ) -> None:
        super().__init__(_stack_over(precision.FP32Optimizer, optimizer, config))
        self.init_state_fn = init_state_fn


class ChainedOptimizer(MegatronAdapter):
    """:class:`mp_optim.ChainedOptimizer` with Megatron's arguments.

    As in Megatron, the factory returns a chain for any number of parts, and a chain without parts
    does nothing. After :func:`install`, ``isinstance`` accepts a chain as Megatron's class.

    Args:
        chained_optimizers: objects of the wrappers here, or of :func:`get_megatron_optimizer`.

    Raises:
        TypeError: an object has another class.
    """

    def __init__(self, chained_optimizers: Sequence[Any]) -> None:
        members: list[MegatronOptimizer] = []
        for member in chained_optimizers:
            if not isinstance(member, MegatronAdapter):
                raise TypeError(
                    f"chained_optimizers has a {type(member).__name__}; wrap it in a "
                    "Float16OptimizerWithFloat16Params or an FP32Optimizer of mp_optim.megatron"
                )
            members += member.stack.chained_optimizers
        if not members:
            nothing = FusedAdam([{"params": []}], lr=0.0)
            members = [precision.FP32Optimizer(nothing, OptimizerConfig(lr=0.0))]
        super().__init__(composite.ChainedOptimizer(members))

    @classmethod
    def over(
        cls,
        stack: MegatronOptimizer,
        chunks: Sequence[nn.Module],
        elsewhere: Sequence[Sequence[SavedSettings]],
    ) -> ChainedOptimizer:
        """Return a chain over an existing stack. The arguments are those of
        :class:`MegatronAdapter`."""
        chain = cls.__new__(cls)
        MegatronAdapter.__init__(chain, stack, chunks, elsewhere)
        return chain

    @property
    def chained_optimizers(self) -> list[MegatronAdapter]:
        """The parts of the chain. Each read returns the same objects. A stack without members has
        one part."""
        stacks = self.stack.chained_optimizers
        members: list[MegatronAdapter] = self.__dict__.setdefault("_members", [])
        if [member.stack for member in members] != stacks:
            members[:] = [MegatronAdapter(stack) for stack in stacks]
        return members

    @property
    def model_chunks(self) -> list[nn.Module]:
        """The modules that the optimizer was built for."""
        return list(self._chunks)


class HybridDeviceOptimizer(hybrid.HybridDeviceOptimizer):
    """:class:`mp_optim.HybridDeviceOptimizer` with the attributes that Megatron's callers read."""

    @property
    def param_to_fp32_param(self) -> dict[Tensor, Tensor]:
        """The FP32 copy of each parameter that has a copy."""
        copies: dict[Tensor, Tensor] = {}
        for slot, param in iter_slots(self.param_groups):
            main = self.main_param(slot)
            if main is not param and param.dtype != torch.float32:
                copies[param] = main
        return copies

    def dummy_step(self) -> None:
        """Allocate all state. No parameter is stepped."""
        self.init_state()

    def update_fp32_param_by_new_param(self) -> None:
        """Do nothing. A step refreshes the FP32 copies itself if a program wrote the parameters."""
