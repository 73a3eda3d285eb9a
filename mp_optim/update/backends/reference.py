"""The numerics, in torch operations. docs/numerics.md says the same in words.

Every operation below is one IEEE operation in FP32, rounded once; nothing here may be replaced by an
operation that contracts (addcmul, addcdiv, lerp, ``alpha=``). Square roots go through FP64 because
torch's FP32 square root on the CPU is not correctly rounded.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from mp_optim.update.batches import batches
from mp_optim.update.lists import AdamScalars, LambScalars, SgdScalars, TensorLists
from mp_optim.update.sums import sum_of_squares

__all__ = ["ReferenceBackend"]

Lists = list[Tensor]


def _gradients(batch: TensorLists, multiplier: float, l2: float) -> Lists:
    """FP32(g) * multiplier, then + l2 * p: new tensors of one batch's size."""
    grads = [grad.to(torch.float32, copy=True) for grad in batch.grad]
    if multiplier != 1.0:
        torch._foreach_mul_(grads, multiplier)
    if l2 != 0.0:
        torch._foreach_add_(grads, torch._foreach_mul(batch.main, l2))
    return grads


def _moments(m: Lists, v: Lists, grads: Lists, s: AdamScalars | LambScalars, weight: float) -> None:
    """m = m*b1 + g*w and v = v*b2 + (g*(1-b2))*g."""
    torch._foreach_mul_(m, s.beta1)
    torch._foreach_add_(m, torch._foreach_mul(grads, weight))
    squares = torch._foreach_mul(grads, s.one_minus_beta2)
    torch._foreach_mul_(squares, grads)
    torch._foreach_mul_(v, s.beta2)
    torch._foreach_add_(v, squares)


def _denominators(v: Lists, s: AdamScalars | LambScalars) -> Lists:
    """sqrt(v) * (1/sqrt(bias2)) + eps."""
    roots = [value.double().sqrt_().float() for value in v]
    torch._foreach_mul_(roots, s.inv_sqrt_bias2)
    torch._foreach_add_(roots, s.eps)
    return roots


def _directions(batch: TensorLists, s: LambScalars) -> Lists:
    """u = (m * (1/bias1)) / denominator + decay * p."""
    u = torch._foreach_mul(batch.state["exp_avg"], s.inv_bias1)
    torch._foreach_div_(u, _denominators(batch.state["exp_avg_sq"], s))
    if s.decay != 0.0:
        torch._foreach_add_(u, torch._foreach_mul(batch.main, s.decay))
    return list(u)


def _publish(batch: TensorLists) -> None:
    """Round to nearest even into the model's dtype."""
    for output, main in zip(batch.output, batch.main, strict=True):
        if output is not None:
            output.copy_(main)


class ReferenceBackend:
    """What every other backend is measured against."""

    name = "reference"

    def adam(self, lists: TensorLists, scalars: AdamScalars, multiplier: float) -> None:
        for batch in batches(lists):
            m, v = batch.state["exp_avg"], batch.state["exp_avg_sq"]
            _moments(m, v, _gradients(batch, multiplier, scalars.l2), scalars, scalars.one_minus_beta1)
            updates = torch._foreach_div(m, _denominators(v, scalars))
            torch._foreach_mul_(updates, scalars.step_size)
            if scalars.decay != 0.0:
                torch._foreach_sub_(batch.main, torch._foreach_mul(batch.main, scalars.decay))
            torch._foreach_sub_(batch.main, updates)
            _publish(batch)

    def lamb_moments(self, lists: TensorLists, scalars: LambScalars, multiplier: float) -> Tensor:
        sums = []
        for index in range(len(lists.main)):
            directions = []
            for batch in batches(_only(lists, index)):
                m, v = batch.state["exp_avg"], batch.state["exp_avg_sq"]
                _moments(m, v, _gradients(batch, multiplier, scalars.l2), scalars, scalars.grad_weight)
                directions += _directions(batch, scalars)
            u = torch.cat(directions) if directions else lists.main[index].reshape(-1)
            sums.append(self.sum_of_squares([lists.main[index], u]))
        return torch.stack(sums)

    def lamb_apply(self, lists: TensorLists, scalars: LambScalars, ratios: Sequence[float]) -> None:
        for index, ratio in enumerate(ratios):
            for batch in batches(_only(lists, index)):
                u = _directions(batch, scalars)
                torch._foreach_mul_(u, ratio)
                torch._foreach_sub_(batch.main, u)
                _publish(batch)

    def sgd(self, lists: TensorLists, scalars: SgdScalars, multiplier: float) -> None:
        for batch in batches(lists):
            grads = _gradients(batch, multiplier, scalars.decay)
            if "momentum_buffer" in batch.state:
                grads = self._momentum(batch.state["momentum_buffer"], grads, scalars)
            torch._foreach_mul_(grads, scalars.lr)
            torch._foreach_sub_(batch.main, grads)
            _publish(batch)

    @staticmethod
    def _momentum(buffers: Lists, grads: Lists, s: SgdScalars) -> Lists:
        if s.first:
            torch._foreach_copy_(buffers, grads)
        else:
            torch._foreach_mul_(buffers, s.momentum)
            torch._foreach_add_(buffers, torch._foreach_mul(grads, s.one_minus_dampening))
        if not s.nesterov:
            return [buffer.clone() for buffer in buffers]
        torch._foreach_add_(grads, torch._foreach_mul(buffers, s.momentum))
        return grads

    def sum_of_squares(self, tensors: Sequence[Tensor]) -> Tensor:
        return sum_of_squares(tensors)


def _only(lists: TensorLists, index: int) -> TensorLists:
    return TensorLists([lists.main[index]], [lists.grad[index]], {k: [v[index]] for k, v in lists.state.items()},
                       [lists.output[index]])
