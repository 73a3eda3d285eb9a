"""Other libraries' optimizers for the same work, each with its best settings. A library that is not
installed is reported as missing."""

from __future__ import annotations

import importlib
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from benchmarks.section import Step

LR, BETAS, EPS, DECAY, CLIP = 1e-4, (0.9, 0.95), 1e-8, 0.1, 1.0
CHUNK = 2048 * 32
"""Elements of a block of apex's kernels, as in Megatron."""

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
    """The sequence of operations that a training loop writes around a fused Adam: FP32 main params,
    moments and gradients of 16-bit params, kept between steps.

    With apex the norm, the clipping and the downcast are apex's kernels, too.
    """

    def __init__(
        self, params: Sequence[Tensor], grads: Sequence[Tensor], adam: str = "torch fused AdamW"
    ) -> None:
        self.params, self.grads = list(params), list(grads)
        self.mains = [torch.nn.Parameter(param.detach().float()) for param in params]
        self.main_grads = [torch.zeros_like(main) for main in self.mains]
        for main, grad in zip(self.mains, self.main_grads, strict=True):
            main.grad = grad
        self.adam = _fused_adam(adam, self.mains)
        self.kernels = importlib.import_module("amp_C") if adam.startswith("apex") else None
        self.flag = torch.zeros(1, dtype=torch.int32, device=params[0].device)

    @torch.no_grad()
    def usual(self, checks: bool = False) -> None:
        """Upcast, clip, step and downcast.

        Args:
            checks: True to check gradients for infinities and unscale them, as with a loss scale.
        """
        torch._foreach_copy_(self.main_grads, self.grads)
        if checks:
            found, scale = torch.zeros(1), torch.ones(1)
            torch._amp_foreach_non_finite_check_and_unscale_(self.main_grads, found, scale)
            if found.item():
                return
        if self.kernels is None:
            torch.nn.utils.clip_grad_norm_(self.mains, CLIP, foreach=True)
            self.adam.step()
            torch._foreach_copy_(self.params, self.mains)
            return
        norm, _ = self.kernels.multi_tensor_l2norm(CHUNK, self.flag, [self.main_grads], False)
        coefficient = CLIP / (norm.item() + 1e-6)
        if coefficient < 1.0:
            lists = [self.main_grads, self.main_grads]
            self.kernels.multi_tensor_scale(CHUNK, self.flag, lists, coefficient)
        self.adam.step()
        lists = [[main.detach() for main in self.mains], self.params]
        self.kernels.multi_tensor_scale(CHUNK, self.flag, lists, 1.0)

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


def _fused_adam(name: str, params: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
    if name.startswith("torch"):
        return torch.optim.AdamW(params, fused=True, **SETTINGS)
    module = "apex" if name.startswith("apex") else "transformer_engine.pytorch"
    adam = importlib.import_module(f"{module}.optimizers").FusedAdam
    made: torch.optim.Optimizer = adam(params, adam_w_mode=True, **SETTINGS)
    return made
