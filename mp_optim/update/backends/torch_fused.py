"""Torch's fused kernels, fed with FP32 gradients batch by batch so that no full copy is ever made.

Within the tolerance docs/numerics.md states of ``reference``, not equal to it: torch contracts
multiply-adds and applies weight decay first.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from mp_optim.update.backends.reference import ReferenceBackend
from mp_optim.update.chunking import batches, first_moments, mark_written, publish
from mp_optim.update.kernel_args import AdamScalars, SgdScalars, TensorLists
from mp_optim.update.stored_values import take_averages


class TorchBackend(ReferenceBackend):
    """Adam by ``torch._fused_adam(w)_``, SGD by ``torch._fused_sgd_``; LAMB is reference's."""

    name = "torch"

    def adam(self, lists: TensorLists, scalars: AdamScalars, multiplier: float) -> None:
        """Torch's kernels derive the bias corrections from a step count, and ours are in the
        scalars.

        At step infinity theirs are exactly 1; ours go into lr and eps:
        ``(lr/bias1) * m / (sqrt(v)*c + eps) = (lr/bias1/c) * m / (sqrt(v) + eps/c)``.
        """
        kernel: Callable[..., Any] = (
            torch._fused_adamw_ if scalars.l2 == 0.0 else torch._fused_adam_
        )
        lr = scalars.step_size / scalars.inv_sqrt_bias2
        weight_decay = (
            scalars.l2
            if scalars.l2 != 0.0
            else scalars.decay / lr
            if lr != 0.0
            else 0.0
        )
        for batch in (cut.lists for cut in batches(lists)):
            settled = torch.full((), math.inf, device=batch.main[0].device)
            kernel(
                batch.main,
                _scaled(batch, multiplier),
                first_moments(batch),
                batch.state["exp_avg_sq"],
                [],
                [settled] * len(batch.main),
                lr=lr,
                beta1=scalars.beta1,
                beta2=scalars.beta2,
                weight_decay=weight_decay,
                eps=scalars.eps / scalars.inv_sqrt_bias2,
                amsgrad=False,
                maximize=False,
            )
            publish(batch)
            take_averages(batch)
        mark_written(lists)

    def sgd(self, lists: TensorLists, scalars: SgdScalars, multiplier: float) -> None:
        for batch in (cut.lists for cut in batches(lists)):
            torch._fused_sgd_(
                batch.main,
                _scaled(batch, multiplier),
                batch.state.get("momentum_buffer", []),
                weight_decay=scalars.decay,
                momentum=scalars.momentum,
                lr=scalars.lr,
                dampening=1.0 - scalars.one_minus_dampening,
                nesterov=scalars.nesterov,
                maximize=False,
                is_first_step=scalars.first,
            )
            publish(batch)
            take_averages(batch)
        mark_written(lists)

    def sum_of_squares(self, tensors: Sequence[Tensor]) -> Tensor:
        if not tensors:
            return torch.zeros(0, dtype=torch.float64, device="cpu")
        # Row-major, as staged copies of gradients are: torch adds up in the order of memory.
        norms = torch._foreach_norm(
            [tensor.contiguous() for tensor in tensors], 2, dtype=torch.float64
        )
        return torch.stack(list(norms)).square()


def _scaled(batch: TensorLists, multiplier: float) -> list[Tensor]:
    grads = [grad.to(torch.float32, copy=True) for grad in batch.grad]
    if multiplier != 1.0:
        torch._foreach_mul_(grads, multiplier)
    return grads
