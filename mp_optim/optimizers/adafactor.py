"""Adafactor: ``torch.optim.Adafactor`` inside the mixed-precision wrapper."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from mp_optim.config import OptimizerConfig
from mp_optim.mixed_precision import Float16OptimizerWithFloat16Params
from mp_optim.offload.hybrid import HybridDeviceOptimizer


class Adafactor(Float16OptimizerWithFloat16Params):
    """``torch.optim.Adafactor`` (Shazeer & Stern 2018) on FP32 main params.

    Main params are on the accelerator or in host memory. The settings of this package's own
    optimizers (``state``, ``main_params``, ``backend`` and so on) do not apply. A rank that holds a
    shard of a parameter keeps the row and column means of that shard.

    Args:
        params: parameters, named parameters or param groups; bf16 and FP32 in any mix.
        lr: upper limit of the relative step size, a number or a tensor.
        beta2_decay: exponent of the weight ``t ** beta2_decay`` that a gradient has in the second
            moment at step ``t``.
        eps: two floors: of the second moment's square root (None: FP32's machine epsilon), and of
            a parameter's root mean square.
        d: upper limit of the update direction's root mean square.
        weight_decay: factor of the decoupled weight decay.
        foreach: True for torch's multi-tensor implementation; None lets torch choose.
        maximize: True to maximize the loss.
        offload: share of the parameters' elements that have their state and their step in host
            memory, 0.0 to 1.0.
        offload_mode: work during backward: ``"sync"`` (none) or ``"overlap"`` (gradients are copied
            to the host).
        max_grad_norm: limit of the global gradient norm; None does not clip.

    Raises:
        TypeError: a parameter's dtype is not supported.
        ValueError: a setting is out of range or not supported.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | Tensor = 1e-2,
        beta2_decay: float = -0.8,
        eps: tuple[float | None, float] = (None, 1e-3),
        d: float = 1.0,
        weight_decay: float = 0.0,
        *,
        foreach: bool | None = None,
        maximize: bool = False,
        offload: float = 0.0,
        offload_mode: str = "sync",
        max_grad_norm: float | None = None,
    ) -> None:
        cls = torch.optim.Adafactor
        settings: dict[str, Any] = {"lr": lr, "beta2_decay": beta2_decay, "eps": eps, "d": d}
        settings |= {"weight_decay": weight_decay, "foreach": foreach, "maximize": maximize}
        how: dict[str, Any] = {"param_update_in_fp32": True, "offload_mode": offload_mode}
        inner = HybridDeviceOptimizer(params, offload, cls, cls, **how, **settings)
        super().__init__(inner, OptimizerConfig(lr=0.0, bf16=True, clip_grad=max_grad_norm or 0.0))
