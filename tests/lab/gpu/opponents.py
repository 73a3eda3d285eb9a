"""The sequence of kernels that Megatron's mixed-precision step launches, with each Adam that is
installed."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from benchmarks.opponents import BETAS, CLIP, DECAY, EPS, LR


def adams() -> list[str]:
    """Names of the Adams to try."""
    return ["torch fused", "apex FusedAdam", "Transformer Engine FusedAdam"]


def _adam(name: str, params: list[Tensor]) -> torch.optim.Optimizer:
    settings: dict[str, Any] = {"lr": LR, "betas": BETAS, "eps": EPS, "weight_decay": DECAY}
    if name == "torch fused":
        return torch.optim.AdamW(params, fused=True, **settings)
    module = (
        "apex.optimizers" if name.startswith("apex") else "transformer_engine.pytorch.optimizers"
    )
    optimizer: torch.optim.Optimizer = importlib.import_module(module).FusedAdam(
        params, adam_w_mode=True, **settings
    )
    return optimizer


CHUNK = 2048 * 32
"""Elements of a block of apex's kernels, as Megatron has it."""


class MegatronStyle:
    """bf16 params and gradients: widen, check and unscale, norm, clip, Adam on FP32 main params,
    narrow. Beside apex its kernels do all of this but the first two, as in Megatron."""

    def __init__(self, params: Sequence[Tensor], adam: str) -> None:
        self.params = list(params)
        self.grads = [torch.full_like(param, 1e-3) for param in params]
        self.mains = [torch.nn.Parameter(param.float()) for param in params]
        for main in self.mains:
            main.grad = torch.zeros_like(main)
        self.adam = _adam(adam, self.mains)
        self.kernels = importlib.import_module("amp_C") if adam.startswith("apex") else None
        self.flag = torch.zeros(1, dtype=torch.int32, device=params[0].device)
        self.found_inf = torch.zeros(1, device=params[0].device)
        self.inv_scale = torch.ones(1, device=params[0].device)

    @torch.no_grad()
    def step(self) -> None:
        """One step."""
        main_grads = [main.grad for main in self.mains]
        torch._foreach_copy_(main_grads, self.grads)
        self.found_inf.zero_()
        torch._amp_foreach_non_finite_check_and_unscale_(main_grads, self.found_inf, self.inv_scale)
        if self.kernels is None:
            torch.nn.utils.clip_grad_norm_(self.mains, CLIP, foreach=True)
            self.adam.step()
            torch._foreach_copy_(self.params, self.mains)
            return
        norm, _ = self.kernels.multi_tensor_l2norm(CHUNK, self.flag, [main_grads], False)
        coefficient = CLIP / (norm.item() + 1e-6)
        if coefficient < 1.0:
            lists = [main_grads, main_grads]
            self.kernels.multi_tensor_scale(CHUNK, self.flag, lists, coefficient)
        self.adam.step()
        lists = [[main.detach() for main in self.mains], self.params]
        self.kernels.multi_tensor_scale(CHUNK, self.flag, lists, 1.0)
