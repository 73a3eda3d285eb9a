"""A Megatron-style mixed-precision optimizer stack. Start at :func:`get_megatron_optimizer`."""

import mp_optim._torch_import  # noqa: F401  before any other import of torch
from mp_optim import checkpoint
from mp_optim.api import get_megatron_optimizer
from mp_optim.config import AdamOptimizerConfig, OptimizerConfig, SGDOptimizerConfig
from mp_optim.deltas import WeightDelta, WeightPatch, apply_delta
from mp_optim.distributed.composite import ChainedOptimizer
from mp_optim.distributed.optimizer import DistributedOptimizer
from mp_optim.groups.param_groups import (
    ParamGroupOverride,
    ParamKey,
    ParamPredicate,
    ParamWithNamePredicate,
    check_config_overrides_consistency,
    get_mup_config_overrides,
    get_standard_config_overrides,
)
from mp_optim.groups.scheduler import OptimizerParamScheduler
from mp_optim.placement import HybridDeviceOptimizer
from mp_optim.planner import plan
from mp_optim.precision import (
    ConstantGradScaler,
    DynamicGradScaler,
    Float16OptimizerWithFloat16Params,
    FP32Optimizer,
    MegatronOptimizer,
    StepResult,
)
from mp_optim.ranks.missing_ranks import MissingRanksError
from mp_optim.ranks.process_groups import ProcessGroups
from mp_optim.slots.interrupted_step import BrokenOffError
from mp_optim.slots.model_parallel import ModelParallel
from mp_optim.torch_style.classes import (
    LAMB,
    SGD,
    Adafactor,
    Adam,
    AdamW,
    AdEMAMix,
    Lion,
    Muon,
    StableAdamW,
)
from mp_optim.update import AuditError, AuditWarning, FusedAdam, FusedLAMB

__version__ = "0.1.0"

__all__ = [
    "LAMB",
    "SGD",
    "AdEMAMix",
    "Adafactor",
    "Adam",
    "AdamOptimizerConfig",
    "AdamW",
    "AuditError",
    "AuditWarning",
    "BrokenOffError",
    "ChainedOptimizer",
    "ConstantGradScaler",
    "DistributedOptimizer",
    "DynamicGradScaler",
    "FP32Optimizer",
    "Float16OptimizerWithFloat16Params",
    "FusedAdam",
    "FusedLAMB",
    "HybridDeviceOptimizer",
    "Lion",
    "MegatronOptimizer",
    "MissingRanksError",
    "ModelParallel",
    "Muon",
    "OptimizerConfig",
    "OptimizerParamScheduler",
    "ParamGroupOverride",
    "ParamKey",
    "ParamPredicate",
    "ParamWithNamePredicate",
    "ProcessGroups",
    "SGDOptimizerConfig",
    "StableAdamW",
    "StepResult",
    "WeightDelta",
    "WeightPatch",
    "apply_delta",
    "check_config_overrides_consistency",
    "checkpoint",
    "get_megatron_optimizer",
    "get_mup_config_overrides",
    "get_standard_config_overrides",
    "plan",
]
