"""Mixed precision: main params, loss scale, gradient norm, the verdict on each step, and the
step."""

from mp_optim.mixed_precision.clip_and_skip import StepResult, Verdict
from mp_optim.mixed_precision.grad_scaler import (
    ConstantGradScaler,
    DynamicGradScaler,
    MegatronGradScaler,
)
from mp_optim.mixed_precision.megatron_optimizer import MegatronOptimizer
from mp_optim.mixed_precision.wrapped_optimizer import (
    Float16OptimizerWithFloat16Params,
    FP32Optimizer,
    WrappedOptimizer,
)

__all__ = [
    "ConstantGradScaler",
    "DynamicGradScaler",
    "FP32Optimizer",
    "Float16OptimizerWithFloat16Params",
    "MegatronGradScaler",
    "MegatronOptimizer",
    "StepResult",
    "Verdict",
    "WrappedOptimizer",
]
