"""This package's optimizers in Megatron's own program: call :func:`install` before ``pretrain``.

Or run ``python -m mp_optim.megatron pretrain_gpt.py ARGS``. A program that builds its optimizer
itself can import the names of this module. Megatron's configs, keys, overrides and scheduler are
accepted unchanged. The module can be imported only if Megatron is installed.
"""

import importlib
from typing import Any

from mp_optim.apps.megatron.adapter import MegatronAdapter
from mp_optim.apps.megatron.config import config_from_megatron
from mp_optim.apps.megatron.install import (
    ChainedOptimizer,
    Float16OptimizerWithFloat16Params,
    FP32Optimizer,
    HybridDeviceOptimizer,
    get_megatron_optimizer,
    install,
    uninstall,
)
from mp_optim.mixed_precision import ConstantGradScaler, DynamicGradScaler

_MEGATRONS = {
    "optimizer": (
        *("check_config_overrides_consistency", "get_mup_config_overrides"),
        "get_standard_config_overrides",
    ),
    "optimizer.optimizer_config": (
        *("AdamOptimizerConfig", "OptimizerConfig", "ParamKey", "ParamPredicate"),
        *("ParamWithNamePredicate", "SGDOptimizerConfig"),
    ),
    "optimizer_param_scheduler": (
        *("OptimizerParamScheduler", "ParamGroupOverride", "combine_param_group_overrides"),
        *("get_canonical_lr_for_logging", "param_group_override_to_tuple"),
    ),
}
"""Names that this module imports from Megatron on demand, by their module in megatron.core."""

__all__ = [
    "ChainedOptimizer",
    "ConstantGradScaler",
    "DynamicGradScaler",
    "FP32Optimizer",
    "Float16OptimizerWithFloat16Params",
    "HybridDeviceOptimizer",
    "MegatronAdapter",
    "config_from_megatron",
    "get_megatron_optimizer",
    "install",
    "uninstall",
]


def __getattr__(name: str) -> Any:
    for module, names in _MEGATRONS.items():
        if name in names:
            return getattr(importlib.import_module(f"megatron.core.{module}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
