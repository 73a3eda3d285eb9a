"""Optimizer that ends its process or never returns."""

import os
import signal
import time
from typing import Any

import torch


class DyingAdamW(torch.optim.AdamW):
    """Ends its process in step() if lr is 0; zero_grad(set_to_none=False) never returns."""

    def __init__(self, params: Any, lr: float = 1e-3, **rest: Any) -> None:
        super().__init__(params, lr=lr, **rest)

    def step(self, closure: Any = None) -> Any:
        if self.param_groups[0]["lr"] == 0.0:
            os.kill(os.getpid(), signal.SIGSEGV)
        return super().step(closure)

    def zero_grad(self, set_to_none: bool = True) -> None:
        if not set_to_none:
            time.sleep(600)
        super().zero_grad(set_to_none)
