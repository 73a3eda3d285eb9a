"""Optimizers that end their process, never return, or fail on one rank."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

import torch
import torch.distributed as dist


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


class OneSidedAdamW(torch.optim.AdamW):
    """Fails on rank 1."""

    def step(self, closure: Any = None) -> Any:
        if dist.is_initialized() and dist.get_rank() == 1:
            raise RuntimeError("rank 1 is out of memory")
        return super().step(closure)
