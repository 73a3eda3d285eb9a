"""Muon's passes over elements, before and after the products of matrices, in torch operations: the
text that kernels follow to the bit. Formulas: docs/numerics.md."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from mp_optim.config.rules import RULES
from mp_optim.slots.state_keys import REMAINDER, scale_key
from mp_optim.update.chunking import piece_elements
from mp_optim.update.codecs import decode, encode_, join, split_
from mp_optim.update.kernel_args import MuonScalars, TensorLists

(MOMENTUM,) = RULES["muon"].moment_names


def average_momenta(
    lists: TensorLists, scalars: MuonScalars, multiplier: float
) -> None:
    """See :meth:`~mp_optim.update.backends.interface.Backend.muon_momentum`."""
    for index, output in enumerate(lists.output):
        assert output is not None
        output.copy_(_averaged(lists, index, scalars, multiplier).view(output.shape))


def descend(lists: TensorLists, scalars: MuonScalars, factors: Sequence[float]) -> None:
    """See :meth:`~mp_optim.update.backends.interface.Backend.muon_apply`."""
    for index, (direction, factor) in enumerate(zip(lists.grad, factors, strict=True)):
        _descend(lists, index, scalars.decay, direction.float() * factor)


def _averaged(
    lists: TensorLists, index: int, scalars: MuonScalars, multiplier: float
) -> Tensor:
    """Update one momentum; returns what is to be orthogonalised, FP32, shape (n,)."""
    grad = lists.grad[index].reshape(-1).float()
    if multiplier != 1.0:
        grad = grad * multiplier
    scales = lists.state.get(scale_key(MOMENTUM))
    stored, scale = (
        lists.state[MOMENTUM][index].view(-1),
        None if scales is None else scales[index],
    )
    momentum = decode(stored, scale, second=False, numel=grad.numel())
    _blend(momentum, grad, scalars.average, scalars.average_from_end, out=momentum)
    noise = None if lists.noise is None else lists.noise[index]
    encode_(momentum, stored, scale, second=False, noise=noise)
    if not scalars.nesterov:
        return momentum
    ahead = torch.empty_like(momentum)
    _blend(grad, momentum, scalars.ahead, scalars.ahead_from_end, out=ahead)
    return ahead


def _blend(
    start: Tensor, end: Tensor, factor: float, from_end: bool, out: Tensor
) -> None:
    """One of two values plus a multiple of their difference, as ``torch.lerp`` takes it.

    Through FP64, in which the product is exact: a fused multiply-add, on devices and where there is
    none. What is orthogonalised is rounded to bfloat16, which makes much of a last bit.
    """
    piece = piece_elements(out.device)
    for at in range(0, out.numel(), piece):
        left, right = start[at : at + piece], end[at : at + piece]
        base = right if from_end else left
        out[at : at + piece] = torch.add(
            base.double(), (right - left).double(), alpha=factor
        )


def _descend(lists: TensorLists, index: int, decay: float, step: Tensor) -> None:
    """Decay one parameter, subtract its step, and write remainder and output."""
    stored, remainders = lists.main[index], lists.state.get(REMAINDER)
    main = stored if remainders is None else join(stored, remainders[index])
    if decay != 0.0:
        main.sub_(main * decay)
    main.sub_(step)
    if remainders is not None:
        noise = None if lists.noise is None else lists.noise[index]
        split_(main, stored, remainders[index], noise)
    output = lists.output[index]
    if output is not None:
        output.copy_(stored)
