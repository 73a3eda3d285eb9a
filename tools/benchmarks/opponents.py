"""What others offer for the same work, each at its best settings. One that is not installed is
reported as missing."""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

Step = Callable[[], object]

LR, BETAS, EPS, DECAY, CLIP = 1e-4, (0.9, 0.95), 1e-8, 0.1, 1.0


SETTINGS: dict[str, Any] = {"lr": LR, "betas": BETAS, "eps": EPS, "weight_decay": DECAY}


def _params(tensors: Sequence[Tensor], grads: Sequence[Tensor]) -> list[torch.nn.Parameter]:
    params = [torch.nn.Parameter(tensor) for tensor in tensors]
    for param, grad in zip(params, grads, strict=True):
        param.grad = grad
    return params


def torch_adamw(mains: Sequence[Tensor], grads: Sequence[Tensor], **kwargs: Any) -> Step:
    return torch.optim.AdamW(_params(mains, grads), **SETTINGS, **kwargs).step


def deepspeed_cpu_adam(mains: Sequence[Tensor], grads: Sequence[Tensor]) -> Step:
    adam = importlib.import_module("deepspeed.ops.adam").DeepSpeedCPUAdam
    step: Step = adam(_params(mains, grads), **SETTINGS, adamw_mode=True).step
    return step


def low_bit_adam(kind: str, params: Sequence[Tensor], grads: Sequence[Tensor]) -> Step:
    """An AdamW with compact moments, over FP32 or bfloat16 params with gradients of the same dtype.

    Args:
        kind: ``torchao`` or ``bitsandbytes`` and the name of a class in its ``optim``. torchao
            rounds bfloat16 params stochastically here, as they have no FP32 main param to gather
            small updates in; its first step compiles (``torch.compile``, which needs a C++
            compiler).
    """
    library, name = kind.split()
    rounding = (
        {"bf16_stochastic_round": params[0].dtype == torch.bfloat16} if library == "torchao" else {}
    )
    adam = getattr(importlib.import_module(f"{library}.optim"), name)
    step: Step = adam(_params(params, grads), **SETTINGS, **rounding).step
    return step


class Composite:
    def __init__(self, params: Sequence[Tensor], grads: Sequence[Tensor]) -> None:
        self.params, self.grads = list(params), list(grads)
        self.mains = [torch.nn.Parameter(param.detach().float()) for param in params]
        self.main_grads = [torch.empty_like(main) for main in self.mains]
        for main, grad in zip(self.mains, self.main_grads, strict=True):
            main.grad = grad
        self.adam = torch.optim.AdamW(self.mains, **SETTINGS, fused=True)
        self.found_inf, self.inv_scale = torch.zeros(1), torch.ones(1)

    @torch.no_grad()
    def usual_bf16(self) -> None:
        torch._foreach_copy_(self.main_grads, self.grads)
        torch.nn.utils.clip_grad_norm_(self.mains, CLIP, foreach=True)
        self.adam.step()
        torch._foreach_copy_(self.params, self.mains)

    @torch.no_grad()
    def usual_fp16(self) -> None:
        torch._foreach_copy_(self.main_grads, self.grads)
        self.found_inf.zero_()
        torch._amp_foreach_non_finite_check_and_unscale_(
            self.main_grads, self.found_inf, self.inv_scale
        )
        if self.found_inf.item():
            return
        torch.nn.utils.clip_grad_norm_(self.mains, CLIP, foreach=True)
        self.adam.step()
        torch._foreach_copy_(self.params, self.mains)

    @torch.no_grad()
    def best_torch(self) -> None:
        norms = torch._foreach_norm(self.grads, 2, dtype=torch.float32)
        norm = float(torch.linalg.vector_norm(torch.stack(list(norms))))
        if not math.isfinite(norm):
            return
        self.adam.grad_scale = torch.tensor(max(1.0, (norm + 1e-6) / CLIP))  # type: ignore[attr-defined]
        self.adam.found_inf = torch.zeros(())  # type: ignore[attr-defined]
        torch._foreach_copy_(self.main_grads, self.grads)
        self.adam.step()
        torch._foreach_copy_(self.params, self.mains)
