"""torch's AdamW over FP32 copies: the reference for the torch-shaped classes."""

from typing import Any

import torch
from torch import Tensor


class Fp32AdamW(torch.optim.Optimizer):
    """``torch.optim.AdamW`` over an FP32 copy of each parameter; a step rounds the copies to
    parameters."""

    def __init__(self, params: Any, lr: float = 1e-3, weight_decay: float = 1e-2) -> None:
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay, "betas": (0.9, 0.999)})
        groups = [
            {
                "params": [param.detach().float() for param in group["params"]],
                "lr": group["lr"],
                "weight_decay": group["weight_decay"],
            }
            for group in self.param_groups
        ]
        self.inner = torch.optim.AdamW(groups)

    def _pairs(self) -> list[tuple[Tensor, Tensor]]:
        pairs = []
        for outer, inner in zip(self.param_groups, self.inner.param_groups, strict=True):
            pairs += zip(outer["params"], inner["params"], strict=True)
        return pairs

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for outer, inner in zip(self.param_groups, self.inner.param_groups, strict=True):
            inner["lr"], inner["betas"] = outer["lr"], outer["betas"]
        for param, copy in self._pairs():
            copy.grad = None if param.grad is None else param.grad.float()
        self.inner.step()
        for param, copy in self._pairs():
            param.copy_(copy)
        return loss
