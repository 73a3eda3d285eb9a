"""The wrapper for models whose parameters are FP32 already: no main params, no loss scale."""

from __future__ import annotations

import torch
from torch import Tensor

from mp_optim.precision.wrapped_optimizer import WrappedOptimizer
from mp_optim.slots import Slot


class FP32Optimizer(WrappedOptimizer):
    """Steps FP32 parameters; measuring, clipping and skipping are as in mixed precision."""

    def check_param(self, slot: Slot, param: Tensor) -> None:
        if param.dtype == torch.float64:
            raise TypeError(
                f"{self.slot_name(slot)} is float64: parameters are stepped in FP32; convert the "
                "model with .float(), or freeze it"
            )
        if param.dtype != torch.float32:
            raise TypeError(
                f"{self.slot_name(slot)} is {param.dtype}: FP32Optimizer takes float32 parameters; "
                "set bf16=True or fp16=True in OptimizerConfig for a 16-bit model"
            )
