"""Torch's fused kernels, fed with FP32 gradients batch by batch so that no full copy is ever made.

Within the tolerance docs/numerics.md states of ``reference``, not equal to it: torch contracts
multiply-adds and applies weight decay first.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from mp_optim.update.backends.reference import ReferenceBackend
from mp_optim.update.batches import batches
from mp_optim.update.lists import AdamScalars, SgdScalars, TensorLists

__all__ = ["TorchBackend"]


class TorchBackend(ReferenceBackend):
    """Adam by ``torch._fused_adam(w)_``, SGD by ``torch._fused_sgd_``; LAMB is reference's."""

    name = "torch"

    def adam(self, lists: TensorLists, scalars: AdamScalars, multiplier: float) -> None:
        kernel: Callable[..., Any] = torch._fused_adamw_ if scalars.l2 == 0.0 else torch._fused_adam_
        for batch in batches(lists):
            # The kernels derive bias corrections from a step count; a step at which both are 1 to FP32
            # precision leaves them to us: the step size and eps below carry the corrections instead.
            settled = [torch.full((), 2.0**23, device=t.device) for t in batch.main]
            lr = scalars.step_size / scalars.inv_sqrt_bias2
            kernel(batch.main, _scaled(batch, multiplier), batch.state["exp_avg"], batch.state["exp_avg_sq"], [],
                   settled, lr=lr, beta1=scalars.beta1, beta2=scalars.beta2,
                   weight_decay=scalars.l2 or scalars.decay / lr if lr else 0.0,
                   eps=scalars.eps / scalars.inv_sqrt_bias2, amsgrad=False, maximize=False)
            self._publish(batch)

    def sgd(self, lists: TensorLists, scalars: SgdScalars, multiplier: float) -> None:
        for batch in batches(lists):
            torch._fused_sgd_(batch.main, _scaled(batch, multiplier), batch.state.get("momentum_buffer", []),
                              weight_decay=scalars.decay, momentum=scalars.momentum, lr=scalars.lr,
                              dampening=1.0 - scalars.one_minus_dampening, nesterov=scalars.nesterov,
                              maximize=False, is_first_step=scalars.first)
            self._publish(batch)

    @staticmethod
    def _publish(batch: TensorLists) -> None:
        for output, main in zip(batch.output, batch.main, strict=True):
            if output is not None:
                output.copy_(main)

    def sum_of_squares(self, tensors: Sequence[Tensor]) -> Tensor:
        if not tensors:
            return torch.zeros(0, dtype=torch.float64)
        norms = torch._foreach_norm(list(tensors), 2, dtype=torch.float64)
        return torch.stack(list(norms)).square()


def _scaled(batch: TensorLists, multiplier: float) -> list[Tensor]:
    grads = [grad.to(torch.float32, copy=True) for grad in batch.grad]
    if multiplier != 1.0:
        torch._foreach_mul_(grads, multiplier)
    return grads
