"""Check for functions and classes of Megatron's optimizer that a program has replaced.

A program may replace the function that makes param groups: this package then uses the program's
groups. Any other replacement is refused by name.
"""

from __future__ import annotations

import importlib
import inspect
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torch import nn

from mp_optim.config import OptimizerConfig

_HOME = "megatron.core.optimizer"
_GROUPS = "_get_param_groups"
_OWNERS = ("megatron.core", "torch", "apex", "transformer_engine", "emerging_optimizers")
"""Packages whose objects Megatron imports into the modules of its optimizer."""
_NORMS = ("clip_grad_by_total_norm_fp32", "count_zeros_fp32", "get_grad_norm_fp32")
_CLASSES = ("Float16OptimizerWithFloat16Params", "FP32Optimizer", "ChainedOptimizer")
REPLACED_HERE: dict[str, tuple[str, ...]] = {
    _HOME: (
        *("Adam", "CPUAdam", "SGD", "DistributedOptimizer", "LayerWiseDistributedOptimizer"),
        *("HybridDeviceOptimizer", "_get_param_groups_and_buffers", "_create_emerging_optimizer"),
        *("_get_megatron_optimizer_based_on_param_groups", "_get_megatron_emerging_optimizer"),
        *_CLASSES,
    ),
    f"{_HOME}.distrib_optimizer": ("Adam", "DistributedOptimizer"),
    f"{_HOME}.optimizer": (*_NORMS, *_CLASSES, "MegatronOptimizer", "MixedPrecisionOptimizer"),
    f"{_HOME}.clip_grads": _NORMS,
}
"""Functions and classes of Megatron that this optimizer replaces, by module."""


def check_replacements() -> None:
    """Check that the program has not put its own code in place of a Megatron function, class or
    method that this package bypasses. The program's version would silently never run.

    Raises:
        RuntimeError: the program has replaced a function, class or method; the message names all
            replaced objects and their modules.
    """
    if found := sorted(set(_replacements())):
        raise RuntimeError(
            f"the program has replaced Megatron's code ({'; '.join(found)}), but this optimizer "
            "does not call the replacement; leave out the option that replaces the code (in "
            "slime --use-stateless-adam), or call mp_optim.megatron.uninstall() and train with "
            "Megatron's optimizer"
        )


def _replacements() -> Iterator[str]:
    for name, parts in REPLACED_HERE.items():
        module = sys.modules.get(name)
        for part in parts:
            value = getattr(module, part, None)
            if is_replaced(value):
                yield f"{name}.{part} is {full_name(value)}"
            # Allow replaced methods of HybridDeviceOptimizer, because steps of this package do not
            # use Megatron's class.
            if (
                not inspect.isclass(value)
                or not value.__module__.startswith(_HOME)
                or value.__name__ == "HybridDeviceOptimizer"
            ):
                continue
            # Copy the items, because reading an attribute of a lazy object may add attributes to
            # the class.
            for key, item in list(vars(value).items()):
                # A property has its function in fget, a static or class method in __func__.
                is_property = isinstance(item, property)
                method = item.fget if is_property else getattr(item, "__func__", item)
                if is_replaced(method := inspect.unwrap(method)):
                    yield f"{value.__module__}.{part}.{key} is {full_name(method)}"


def is_replaced(value: Any) -> bool:
    """True if ``value``, which has a name of Megatron, belongs neither to Megatron nor to a library
    that Megatron imports."""
    if not (inspect.isclass(value) or inspect.isroutine(value)):
        return False
    owner = f"{getattr(value, '__module__', None) or 'torch'}."
    return not any(owner.startswith(f"{package}.") for package in (*_OWNERS, "builtins", "abc"))


def full_name(value: Any) -> str:
    """Return the full name of a function or class."""
    return f"{value.__module__}.{getattr(value, '__qualname__', type(value).__name__)}"


def replaced_groups(
    config: Any, ours: OptimizerConfig, chunks: Sequence[nn.Module], overrides: Mapping[Any, Any]
) -> list[dict[str, Any]] | None:
    """Return the param groups of a program's own ``_get_param_groups``; None if the function is
    Megatron's.

    Args:
        config: Megatron's config.
        ours: this package's config, made from Megatron's.
        chunks: modules of the model.
        overrides: settings by parameter key.

    Raises:
        RuntimeError: the optimizer is Muon, because such groups do not name Muon's matrices.
    """
    function = getattr(importlib.import_module(_HOME), _GROUPS)
    if not is_replaced(function):
        return None
    if ours.optimizer == "muon":
        raise RuntimeError(
            f"the program has replaced {_HOME}.{_GROUPS} by {full_name(function)}, whose param "
            "groups do not name the matrices for Muon; leave out the option that replaces the "
            "function, or --optimizer muon"
        )
    groups = []
    for group in function(list(chunks), config, overrides):
        settings = {key: value for key, value in group.items() if value is not None}
        rate = settings.get("max_lr", ours.lr) * settings.get("lr_mult", 1.0)
        decay = ours.weight_decay * settings.get("wd_mult", 1.0)
        if group["params"]:
            groups.append({"lr": rate, "weight_decay": decay, **settings})
    return groups
