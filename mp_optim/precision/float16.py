"""The mixed-precision wrapper: 16-bit model params, FP32 main params, a loss scale where FP16 needs
one."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from mp_optim.config import OptimizerConfig
from mp_optim.precision.grad_scaler import MegatronGradScaler
from mp_optim.precision.wrapped_optimizer import WrappedOptimizer
from mp_optim.quantized import FLOAT8_DTYPES
from mp_optim.ranks.process_groups import ProcessGroups
from mp_optim.slots import Slot


class Float16OptimizerWithFloat16Params(WrappedOptimizer):
    """Keeps an FP32 main param for every 16-bit model param; FP32 params among them are stepped as
    they are.

    The wrapped optimizer's ``param_groups`` hold the main params afterwards, born where the layer
    below steps them; this object's hold the model's own parameters.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        config: OptimizerConfig,
        grad_scaler: MegatronGradScaler | None = None,
        init_state_fn: Any = None,
        *,
        process_groups: ProcessGroups | None = None,
    ) -> None:
        if config.fp16 and grad_scaler is None:
            raise ValueError(
                "grad_scaler=None with fp16=True: pass a ConstantGradScaler or DynamicGradScaler, "
                "or let get_megatron_optimizer build one from the config"
            )
        super().__init__(
            optimizer, config, grad_scaler, init_state_fn, process_groups=process_groups
        )

    def check_param(self, slot: Slot, param: Tensor) -> None:
        allowed = (torch.float16, torch.bfloat16, torch.float32, *FLOAT8_DTYPES)
        if param.dtype not in allowed:
            raise TypeError(
                f"{self.slot_name(slot)} is {param.dtype}: a Float16 optimizer takes float16, "
                "bfloat16, "
                "float32 and float8 parameters; convert the model, or freeze the parameter"
            )
        if (param.dtype == torch.float16 and self.config.bf16) or (
            param.dtype == torch.bfloat16 and self.config.fp16
        ):
            raise ValueError(
                f"{self.slot_name(slot)} is {param.dtype} but the config says "
                f"bf16={self.config.bf16}, "
                f"fp16={self.config.fp16}; set the flag that matches the model"
            )
