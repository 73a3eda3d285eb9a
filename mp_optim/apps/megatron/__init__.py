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

_CONFIG = "megatron.core.optimizer.optimizer_config"
_FACTORY = "megatron.core.optimizer"
_SCHEDULER = "megatron.core.optimizer_param_scheduler"
_MEGATRONS = {
    "AdamOptimizerConfig": _CONFIG,
    "OptimizerConfig": _CONFIG,
    "OptimizerParamScheduler": _SCHEDULER,
    "ParamGroupOverride": _SCHEDULER,
    "ParamKey": _CONFIG,
    "ParamPredicate": _CONFIG,
    "ParamWithNamePredicate": _CONFIG,
    "SGDOptimizerConfig": _CONFIG,
    "check_config_overrides_consistency": _FACTORY,
    "combine_param_group_overrides": _SCHEDULER,
    "get_canonical_lr_for_logging": _SCHEDULER,
    "get_mup_config_overrides": _FACTORY,
    "get_standard_config_overrides": _FACTORY,
    "param_group_override_to_tuple": _SCHEDULER,
}
"""Names that this module imports from Megatron on demand, and the Megatron module of each name."""

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
    if name in _MEGATRONS:
        return getattr(importlib.import_module(_MEGATRONS[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
