"""A Megatron-style mixed-precision optimizer stack. Start at :func:`get_megatron_optimizer`."""

import mp_optim.host.torch_import
import mp_optim.monitor  # noqa: F401  registers the observers of every optimizer
from mp_optim import checkpoint
from mp_optim.apps.deltas import apply_delta
from mp_optim.apps.fit.model_plan import plan
from mp_optim.apps.replay import record_step
from mp_optim.checkpoint.digests import StepDigest
from mp_optim.config import AdamOptimizerConfig, OptimizerConfig, SGDOptimizerConfig
from mp_optim.core.interrupted_step import BrokenOffError
from mp_optim.core.model_parallel import ModelParallel
from mp_optim.core.weight_delta import WeightDelta, WeightPatch
from mp_optim.factory.get_optimizer import get_megatron_optimizer
from mp_optim.mixed_precision import (
    ConstantGradScaler,
    DynamicGradScaler,
    Float16OptimizerWithFloat16Params,
    FP32Optimizer,
    MegatronOptimizer,
    StepResult,
)
from mp_optim.offload import HybridDeviceOptimizer
from mp_optim.optimizers.classes import LAMB, SGD, Adafactor, Adam, AdamW, Lion, Muon
from mp_optim.optimizers.multi_tenant import MultiTenantOptimizer, TenantError
from mp_optim.param_groups.lr_scheduler import OptimizerParamScheduler
from mp_optim.param_groups.overrides import (
    ParamGroupOverride,
    ParamKey,
    ParamPredicate,
    ParamWithNamePredicate,
    check_config_overrides_consistency,
    get_mup_config_overrides,
    get_standard_config_overrides,
)
from mp_optim.process_groups.missing_ranks import MissingRanksError
from mp_optim.process_groups.process_groups import ProcessGroups
from mp_optim.rules.audit import AuditError, AuditWarning
from mp_optim.rules.fused import FusedAdam, FusedLAMB
from mp_optim.zero.composite import ChainedOptimizer
from mp_optim.zero.zero import DistributedOptimizer

__version__ = "0.1.0"

__all__ = [
    "LAMB",
    "SGD",
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
    "MultiTenantOptimizer",
    "Muon",
    "OptimizerConfig",
    "OptimizerParamScheduler",
    "ParamGroupOverride",
    "ParamKey",
    "ParamPredicate",
    "ParamWithNamePredicate",
    "ProcessGroups",
    "SGDOptimizerConfig",
    "StepDigest",
    "StepResult",
    "TenantError",
    "WeightDelta",
    "WeightPatch",
    "apply_delta",
    "check_config_overrides_consistency",
    "checkpoint",
    "get_megatron_optimizer",
    "get_mup_config_overrides",
    "get_standard_config_overrides",
    "plan",
    "record_step",
]
