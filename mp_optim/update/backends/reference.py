"""The numerics, in torch operations. docs/numerics.md says the same in words.

Every operation below is one IEEE operation in FP32, rounded once; nothing here may be replaced by an
operation that contracts (addcmul, addcdiv, lerp, ``alpha=``). Square roots go through FP64 because
torch's FP32 square root on the CPU is not correctly rounded.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from mp_optim.update.batches import batches, publish
from mp_optim.update.lists import AdamScalars, LambScalars, LionScalars, SgdScalars, TensorLists
from mp_optim.update.sums import combine_pieces, sum_of_squares

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


def _wide(stored: Lists) -> Lists:
    """FP32 values of a state: the tensors themselves if they are FP32, else copies."""
    return [tensor if tensor.dtype == torch.float32 else tensor.float() for tensor in stored]


def _store(stored: Lists, values: Lists) -> None:
    """Write FP32 values back, rounded to nearest even into the state's dtype."""
    for tensor, value in zip(stored, values, strict=True):
        if tensor is not value:
            tensor.copy_(value)


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
    """u = (m * (1/bias1)) / denominator + decay * p, of the moments as they are stored."""
    u = torch._foreach_mul(_wide(batch.state["exp_avg"]), s.inv_bias1)
    torch._foreach_div_(u, _denominators(_wide(batch.state["exp_avg_sq"]), s))
    if s.decay != 0.0:
        torch._foreach_add_(u, torch._foreach_mul(batch.main, s.decay))
    return list(u)


class ReferenceBackend:
    """What every other backend is measured against."""

    name = "reference"

    def adam(self, lists: TensorLists, scalars: AdamScalars, multiplier: float) -> None:
        for batch in (cut.lists for cut in batches(lists)):
            m, v = _wide(batch.state["exp_avg"]), _wide(batch.state["exp_avg_sq"])
            _moments(m, v, _gradients(batch, multiplier, scalars.l2), scalars, scalars.one_minus_beta1)
            _store(batch.state["exp_avg"], m)
            _store(batch.state["exp_avg_sq"], v)
            updates = torch._foreach_div(m, _denominators(v, scalars))
            torch._foreach_mul_(updates, scalars.step_size)
            if scalars.decay != 0.0:
                torch._foreach_sub_(batch.main, torch._foreach_mul(batch.main, scalars.decay))
            torch._foreach_sub_(batch.main, updates)
            publish(batch)

    def lamb_moments(self, lists: TensorLists, scalars: LambScalars, multiplier: float) -> Tensor:
        owners: list[int] = []
        found: list[Tensor] = []
        for cut in batches(lists):
            batch = cut.lists
            m, v = _wide(batch.state["exp_avg"]), _wide(batch.state["exp_avg_sq"])
            _moments(m, v, _gradients(batch, multiplier, scalars.l2), scalars, scalars.grad_weight)
            _store(batch.state["exp_avg"], m)
            _store(batch.state["exp_avg_sq"], v)
            squares = sum_of_squares([*batch.main, *_directions(batch, scalars)])
            owners += cut.owners
            found.append(squares.view(2, -1).T)
        if not found:
            device = lists.main[0].device if lists.main else torch.device("cpu")
            return torch.zeros(len(lists.main), 2, dtype=torch.float64, device=device)
        return combine_pieces(owners, torch.cat(found), len(lists.main))

    def lamb_apply(self, lists: TensorLists, scalars: LambScalars, ratios: Sequence[float]) -> None:
        for cut in batches(lists):
            batch = cut.lists
            u = _directions(batch, scalars)
            torch._foreach_mul_(u, [ratios[owner] for owner in cut.owners])
            torch._foreach_sub_(batch.main, u)
            publish(batch)

    def sgd(self, lists: TensorLists, scalars: SgdScalars, multiplier: float) -> None:
        for batch in (cut.lists for cut in batches(lists)):
            grads = _gradients(batch, multiplier, scalars.decay)
            if "momentum_buffer" in batch.state:
                buffers = _wide(batch.state["momentum_buffer"])
                grads = self._momentum(buffers, grads, scalars)
                _store(batch.state["momentum_buffer"], buffers)
            torch._foreach_mul_(grads, scalars.lr)
            torch._foreach_sub_(batch.main, grads)
            publish(batch)

    def lion(self, lists: TensorLists, scalars: LionScalars, multiplier: float) -> None:
        for batch in (cut.lists for cut in batches(lists)):
            m, grads = _wide(batch.state["exp_avg"]), _gradients(batch, multiplier, 0.0)
            blend = torch._foreach_mul(m, scalars.beta1)
            torch._foreach_add_(blend, torch._foreach_mul(grads, scalars.one_minus_beta1))
            steps = [torch.where(u.isnan(), u, u.sign()) for u in blend]
            torch._foreach_mul_(steps, scalars.lr)
            if scalars.decay != 0.0:
                torch._foreach_sub_(batch.main, torch._foreach_mul(batch.main, scalars.decay))
            torch._foreach_sub_(batch.main, steps)
            torch._foreach_mul_(m, scalars.beta2)
            torch._foreach_add_(m, torch._foreach_mul(grads, scalars.one_minus_beta2))
            _store(batch.state["exp_avg"], m)
            publish(batch)

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
