"""The numerics, in torch operations. docs/numerics.md says the same in words.

Every operation below is one IEEE operation in FP32, rounded once; nothing here may be replaced by
an operation that contracts (addcmul, addcdiv, lerp, ``alpha=``). Square roots go through FP64
because torch's FP32 square root on the CPU is not correctly rounded.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from mp_optim.config.rules import RULES
from mp_optim.slots.slot_state import REMAINDER, scale_key
from mp_optim.update.chunking import (
    batches,
    piece_elements,
    read_mains,
    read_moment,
    take_averages,
    write_mains,
    write_moment,
)
from mp_optim.update.codecs import decode, encode_, join, split_
from mp_optim.update.element_rules import (
    TEXTS,
    Lists,
    Step,
    adam_batch,
    average,
    average_squares,
    bound,
    bound_all,
    denominators,
    gradients,
)
from mp_optim.update.exact_sums import bounded_sum, bounded_value
from mp_optim.update.kernel_args import LambScalars, MuonScalars, StableScalars, TensorLists, fp32
from mp_optim.update.sums import combine_pieces, sum_of_squares


def _directions(batch: TensorLists, mains: Lists, s: LambScalars) -> Lists:
    """u = (m * (1/bias1)) / denominator + decay * p, of the moments as they are stored."""
    m = read_moment(batch, "exp_avg")
    u = torch._foreach_mul(m, s.inv_bias1)
    bound_all(u, m)
    torch._foreach_div_(u, denominators(read_moment(batch, "exp_avg_sq"), s))
    if s.decay != 0.0:
        torch._foreach_add_(u, torch._foreach_mul(mains, s.decay))
    return list(u)


class ReferenceBackend:
    """What every other backend is measured against."""

    name = "reference"
    takes_device_multipliers = False
    capturable = False
    interpreted = False
    reads_source = False
    limits = ""

    def step(self, rule: str, lists: TensorLists, scalars: Any, multiplier: float) -> None:
        for batch in batches(lists):
            TEXTS[rule](batch.lists, scalars, multiplier)

    def stable_adamw(self, lists: TensorLists, scalars: StableScalars, multiplier: float) -> None:
        """Both passes of StableAdamW, for tensors that are whole parameters."""
        sums = self.stable_adamw_sums(lists, scalars, multiplier)
        sizes = [main.numel() for main in lists.main]
        self.stable_adamw_finish(lists, scalars, sums, sizes, multiplier)

    def stable_adamw_sums(
        self, lists: TensorLists, scalars: StableScalars, multiplier: float
    ) -> Tensor:
        device = lists.main[0].device if lists.main else torch.device("cpu")
        sums = torch.zeros(len(lists.main), 3, dtype=torch.int64, device=device)
        for cut in batches(lists):
            grads = gradients(cut.lists, [], multiplier, 0.0)
            v = [value.clone() for value in read_moment(cut.lists, "exp_avg_sq")]
            average_squares(v, grads, scalars)
            torch._foreach_mul_(v, scalars.inv_bias2)
            for owner, grad, mean in zip(cut.owners, grads, v, strict=True):
                overflown = mean.isinf().logical_and_(grad.isfinite())
                ratios = grad.mul_(grad).div_(mean.clamp_(min=scalars.floor))
                overflown.logical_and_(ratios.isnan())  # inf over inf
                ratios.masked_fill_(overflown, scalars.limit)
                ratios.clamp_(max=scalars.limit)
                sums[owner] += bounded_sum(ratios, scalars.limit)
        return sums

    def stable_adamw_finish(
        self,
        lists: TensorLists,
        scalars: StableScalars,
        sums: Tensor,
        sizes: Sequence[int],
        multiplier: float,
    ) -> list[bool] | Tensor | None:
        """The second pass, from the sums of whole parameters."""
        steps, clipped = steps_of(scalars, sums.tolist(), sizes)
        self.stable_adamw_apply(lists, scalars, steps, multiplier)
        return clipped

    def stable_adamw_apply(
        self, lists: TensorLists, scalars: StableScalars, steps: Sequence[Step], multiplier: float
    ) -> None:
        """AdamW with a ``step_size`` and a ``decay`` for each tensor."""
        for cut in batches(lists):
            own = [steps[owner] for owner in cut.owners]
            adam_batch(cut.lists, scalars, own, multiplier)

    def lamb(self, lists: TensorLists, scalars: LambScalars, multiplier: float) -> None:
        """Both phases of LAMB, for tensors that are whole parameters."""
        self.lamb_finish(lists, scalars, self.lamb_moments(lists, scalars, multiplier), multiplier)

    def lamb_moments(self, lists: TensorLists, scalars: LambScalars, multiplier: float) -> Tensor:
        owners: list[int] = []
        squares: list[Tensor] = []
        for cut in batches(lists):
            batch = cut.lists
            p, m, v = (
                read_mains(batch),
                read_moment(batch, "exp_avg"),
                read_moment(batch, "exp_avg_sq"),
            )
            grads = gradients(batch, p, multiplier, scalars.l2)
            average(m, grads, scalars.beta1, scalars.grad_weight)
            bound_all(m, grads)
            average_squares(v, grads, scalars)
            write_moment(batch, "exp_avg", m)
            write_moment(batch, "exp_avg_sq", v)
            sums = sum_of_squares([*p, *_directions(batch, p, scalars)])
            owners += cut.owners
            squares.append(sums.view(2, -1).T)
        if not squares:
            device = lists.main[0].device if lists.main else torch.device("cpu")
            return torch.zeros(len(lists.main), 2, dtype=torch.float64, device=device)
        return combine_pieces(owners, torch.cat(squares), len(lists.main))

    def lamb_finish(
        self, lists: TensorLists, scalars: LambScalars, sums: Tensor, multiplier: float
    ) -> None:
        """The second phase, from the sums of whole parameters."""
        self.lamb_apply(lists, scalars, [scalars.ratio(*row) for row in sums.tolist()])

    def lamb_apply(self, lists: TensorLists, scalars: LambScalars, ratios: Sequence[float]) -> None:
        for cut in batches(lists):
            batch = cut.lists
            p = read_mains(batch)
            u = _directions(batch, p, scalars)
            torch._foreach_mul_(u, [ratios[owner] for owner in cut.owners])
            torch._foreach_sub_(p, u)
            write_mains(batch, p)

    def average(self, lists: TensorLists) -> None:
        for batch in batches(lists.for_averages()):
            take_averages(batch.lists)

    def muon_momentum(self, lists: TensorLists, scalars: MuonScalars, multiplier: float) -> None:
        average_momenta(lists, scalars, multiplier)

    def muon_apply(
        self, lists: TensorLists, scalars: MuonScalars, factors: Sequence[float]
    ) -> None:
        descend(lists, scalars, factors)

    def sum_of_squares(self, tensors: Sequence[Tensor]) -> Tensor:
        return sum_of_squares(tensors)


(MOMENTUM,) = RULES["muon"].moment_names


# -- Muon's passes over elements, before and after the products -----------------------------------


def average_momenta(lists: TensorLists, scalars: MuonScalars, multiplier: float) -> None:
    """See :meth:`~mp_optim.update.backends.interface.Backend.muon_momentum`."""
    for index, output in enumerate(lists.output):
        assert output is not None
        output.copy_(_averaged(lists, index, scalars, multiplier).view(output.shape))


def descend(lists: TensorLists, scalars: MuonScalars, factors: Sequence[float]) -> None:
    """See :meth:`~mp_optim.update.backends.interface.Backend.muon_apply`."""
    for index, (direction, factor) in enumerate(zip(lists.grad, factors, strict=True)):
        _descend(lists, index, scalars.decay, direction.float() * factor)


def _averaged(lists: TensorLists, index: int, scalars: MuonScalars, multiplier: float) -> Tensor:
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


def _blend(start: Tensor, end: Tensor, factor: float, from_end: bool, out: Tensor) -> None:
    """One of two values plus a multiple of their difference, as ``torch.lerp`` takes it; of finite
    values it is bounded.

    Through FP64, in which the product is exact: a fused multiply-add, on devices and where there is
    none. What is orthogonalised is rounded to bfloat16, which makes much of a last bit.
    """
    piece = piece_elements(out.device)
    for at in range(0, out.numel(), piece):
        left, right = start[at : at + piece], end[at : at + piece]
        base, change = right if from_end else left, right - left
        bound(change, left, right)
        out[at : at + piece] = torch.add(base.double(), change.double(), alpha=factor)


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


NOT_CLIPPED = 1.0 + 2.0**-20
"""Mean squares up to it count as 1, as all are at the first step, but for rounding."""


def steps_of(
    scalars: StableScalars, sums: Sequence[Sequence[int]], sizes: Sequence[int]
) -> tuple[list[Step], list[bool]]:
    """The step of each parameter, and whether it is clipped; NaN if a gradient is.

    Args:
        sums: of whole parameters, as ``Backend.stable_adamw_sums`` gives them.
        sizes: elements of whole parameters.
    """
    means = [
        bounded_value(high, low, nans, scalars.limit) / max(1, size)
        for (high, low, nans), size in zip(sums, sizes, strict=True)
    ]
    clips = [1.0 if mean <= NOT_CLIPPED else math.sqrt(mean) for mean in means]
    steps = [(fp32(scalars.rate / c), fp32(scalars.decay_rate / c)) for c in clips]
    return steps, [clip != 1.0 for clip in clips]
