"""Update rules that step each element independently, in torch operations. These functions define
the bits of the rules.

:mod:`mp_optim.kernels.kernel_args` computes the scalars of a step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from mp_optim.kernels.chunking import Lists, read_mains, read_moment, write_mains, write_moment
from mp_optim.kernels.kernel_args import (
    AdamScalars,
    LambScalars,
    LionScalars,
    SgdScalars,
    TensorLists,
)

# -- arithmetic -----------------------------------------------------------------------------------
#
# Every operation is one IEEE operation in FP32, rounded once: see ``kernels/reference.py``.

_LARGEST = torch.finfo(torch.float32).max
AnyAdam = AdamScalars | LambScalars


def gradients(batch: TensorLists, mains: Lists, multiplier: float, l2: float) -> Lists:
    """Return FP32(g) * multiplier + l2 * p for each gradient of a batch, as new tensors."""
    grads = [grad.to(torch.float32, copy=True) for grad in batch.grad]
    if multiplier != 1.0:
        torch._foreach_mul_(grads, multiplier)
    if l2 != 0.0:
        torch._foreach_add_(grads, torch._foreach_mul(mains, l2))
    return grads


def average(m: Lists, grads: Lists, keep: float, weight: float) -> None:
    """Compute m = m*keep + g*weight in place."""
    torch._foreach_mul_(m, keep)
    torch._foreach_add_(m, torch._foreach_mul(grads, weight))


def bound(value: Tensor, *made_of: Tensor) -> None:
    """Clamp infinite results of finite inputs to FP32's largest magnitude, in place.

    Args:
        value: results.
        *made_of: the inputs, in the shape of ``value``.
    """
    overflown = value.isinf()
    for part in made_of:
        overflown.logical_and_(part.isfinite())
    value.copy_(torch.where(overflown, value.clamp(-_LARGEST, _LARGEST), value))


def bound_all(values: Sequence[Tensor], made_of: Lists) -> None:
    """Clamp infinite results of finite inputs in each tensor, in place (:func:`bound`).

    Args:
        values: results.
        made_of: input of each result, in the result's shape.
    """
    for value, part in zip(values, made_of, strict=True):
        bound(value, part)


def average_squares(v: Lists, grads: Lists, s: AnyAdam) -> None:
    """Compute v = v*b2 + (g*(1-b2))*g in place."""
    squares = torch._foreach_mul(grads, s.one_minus_beta2)
    torch._foreach_mul_(squares, grads)
    torch._foreach_mul_(v, s.beta2)
    torch._foreach_add_(v, squares)


def denominators(v: Lists, s: AnyAdam) -> Lists:
    """Return sqrt(v) * (1/sqrt(bias2)) + eps."""
    roots = [value.double().sqrt_().float() for value in v]
    torch._foreach_mul_(roots, s.inv_sqrt_bias2)
    torch._foreach_add_(roots, s.eps)
    return roots


def descend(p: Lists, steps: Sequence[Tensor], decay: float, cautious: bool) -> None:
    """Compute p = (p - decay*p) - step in place.

    With decay 0 the decay term is left out, because 0 times infinity is NaN.

    Args:
        p: main params.
        steps: value to subtract from each main param.
        decay: learning rate times weight decay.
        cautious: True to decay an element only if the step does not move it away from 0 (Cautious
            Weight Decay, Chen et al. 2025, arXiv:2510.12402: x - lr (u + wd * 1[u x >= 0] x)).
    """
    if decay != 0.0:
        parts = torch._foreach_mul(p, decay)
        for part, main, step in zip(parts, p, steps, strict=True) if cautious else ():
            away = torch.where(step > 0.0, main < 0.0, (step < 0.0).logical_and_(main > 0.0))
            part.masked_fill_(away, 0.0)
        torch._foreach_sub_(p, parts)
    torch._foreach_sub_(p, list(steps))


def _adam(batch: TensorLists, s: AdamScalars, multiplier: float) -> None:
    p, v = read_mains(batch), read_moment(batch, "exp_avg_sq")
    grads, m = gradients(batch, p, multiplier, s.l2), read_moment(batch, "exp_avg")
    average(m, grads, s.beta1, s.one_minus_beta1)
    average_squares(v, grads, s)
    updates = torch._foreach_div(m, denominators(v, s))
    torch._foreach_mul_(updates, s.step_size)
    descend(p, updates, s.decay, s.cautious_wd)
    write_moment(batch, "exp_avg", m)
    write_moment(batch, "exp_avg_sq", v)
    write_mains(batch, p)


def _sgd(batch: TensorLists, s: SgdScalars, multiplier: float) -> None:
    p = read_mains(batch)
    grads = gradients(batch, p, multiplier, s.decay)
    if "momentum_buffer" in batch.state:
        buffers = read_moment(batch, "momentum_buffer")
        if s.first:
            torch._foreach_copy_(buffers, grads)
        else:
            average(buffers, grads, s.momentum, s.one_minus_dampening)
            bound_all(buffers, grads)
        if s.nesterov:
            torch._foreach_add_(grads, torch._foreach_mul(buffers, s.momentum))
        else:
            torch._foreach_copy_(grads, buffers)
        write_moment(batch, "momentum_buffer", buffers)
    torch._foreach_mul_(grads, s.lr)
    torch._foreach_sub_(p, grads)
    write_mains(batch, p)


def _lion(batch: TensorLists, s: LionScalars, multiplier: float) -> None:
    p, m = read_mains(batch), read_moment(batch, "exp_avg")
    grads = gradients(batch, p, multiplier, 0.0)
    blend = torch._foreach_mul(m, s.beta1)
    torch._foreach_add_(blend, torch._foreach_mul(grads, s.one_minus_beta1))
    steps = [torch.where(u.isnan(), u, u.sign()) for u in blend]
    torch._foreach_mul_(steps, s.lr)
    descend(p, steps, s.decay, s.cautious_wd)
    average(m, grads, s.beta2, s.one_minus_beta2)
    write_moment(batch, "exp_avg", m)
    write_mains(batch, p)


ELEMENT_STEPS: dict[str, Callable[..., None]] = {"adam": _adam, "sgd": _sgd, "lion": _lion}
"""Function that steps a batch of tensors, by name of the rule."""
