"""The mixed-precision wrapper: 16-bit model params, FP32 main params, a loss scale where FP16 needs one."""

from __future__ import annotations

import torch
from torch import Tensor

from mp_optim.precision.megatron_optimizer import MegatronOptimizer
from mp_optim.slots import Slot

__all__ = ["Float16OptimizerWithFloat16Params"]


class Float16OptimizerWithFloat16Params(MegatronOptimizer):
    """Keeps an FP32 main param for every 16-bit model param; FP32 params among them are stepped as they are.

    The wrapped optimizer's ``param_groups`` hold the main params afterwards, born where the layer
    below steps them; this object's hold the model's own parameters.
    """

    def check_param(self, slot: Slot, param: Tensor) -> None:
        allowed = (torch.float16, torch.bfloat16, torch.float32)
        if param.dtype not in allowed:
            raise TypeError(f"{self.slot_name(slot)} is {param.dtype}: a Float16 optimizer takes float16, bfloat16 "
                            "and float32 parameters; convert the model, or freeze the parameter")
        if (param.dtype == torch.float16 and self.config.bf16) or (param.dtype == torch.bfloat16 and self.config.fp16):
            raise ValueError(f"{self.slot_name(slot)} is {param.dtype} but the config says bf16={self.config.bf16}, "
                             f"fp16={self.config.fp16}; set the flag that matches the model")
