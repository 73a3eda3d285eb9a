"""The numerics, in torch operations. docs/numerics.md says the same in words.

Every operation below is one IEEE operation in FP32, rounded once; nothing here may be replaced by
an operation that contracts (addcmul, addcdiv, lerp, ``alpha=``). Square roots go through FP64
because torch's FP32 square root on the CPU is not correctly rounded.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from mp_optim.update.chunking import batches
from mp_optim.update.exact_sums import bounded_sum
from mp_optim.update.kernel_args import (
    AdamScalars,
    LambScalars,
    LionScalars,
    MuonScalars,
    SgdScalars,
    StableScalars,
    TensorLists,
)
from mp_optim.update.muon_passes import average_momenta, descend
from mp_optim.update.stable_steps import Step, steps_of
from mp_optim.update.stored_values import (
    read_mains,
    read_moment,
    take_averages,
    write_mains,
    write_moment,
)
from mp_optim.update.sums import combine_pieces, sum_of_squares

Lists = list[Tensor]
AnyAdam = AdamScalars | LambScalars | StableScalars


def _gradients(batch: TensorLists, mains: Lists, multiplier: float, l2: float) -> Lists:
    """FP32(g) * multiplier, then + l2 * p: new tensors of one batch's size."""
    grads = [grad.to(torch.float32, copy=True) for grad in batch.grad]
    if multiplier != 1.0:
        torch._foreach_mul_(grads, multiplier)
    if l2 != 0.0:
        torch._foreach_add_(grads, torch._foreach_mul(mains, l2))
    return grads


def _average_first(m: Lists, grads: Lists, s: AnyAdam, weight: float) -> None:
    """m = m*b1 + g*w."""
    torch._foreach_mul_(m, s.beta1)
    torch._foreach_add_(m, torch._foreach_mul(grads, weight))


def _average_second(v: Lists, grads: Lists, s: AnyAdam) -> None:
    """v = v*b2 + (g*(1-b2))*g."""
    squares = torch._foreach_mul(grads, s.one_minus_beta2)
    torch._foreach_mul_(squares, grads)
    torch._foreach_mul_(v, s.beta2)
    torch._foreach_add_(v, squares)


def _denominators(v: Lists, s: AnyAdam) -> Lists:
    """sqrt(v) * (1/sqrt(bias2)) + eps."""
    roots = [value.double().sqrt_().float() for value in v]
    torch._foreach_mul_(roots, s.inv_sqrt_bias2)
    torch._foreach_add_(roots, s.eps)
    return roots


def _directions(batch: TensorLists, mains: Lists, s: LambScalars) -> Lists:
    """u = (m * (1/bias1)) / denominator + decay * p, of the moments as they are stored."""
    u = torch._foreach_mul(read_moment(batch, "exp_avg"), s.inv_bias1)
    torch._foreach_div_(u, _denominators(read_moment(batch, "exp_avg_sq"), s))
    if s.decay != 0.0:
        torch._foreach_add_(u, torch._foreach_mul(mains, s.decay))
    return list(u)


def _adam_batch(
    batch: TensorLists,
    s: AdamScalars | StableScalars,
    steps: Sequence[Step],
    multiplier: float,
    l2: float = 0.0,
) -> None:
    """Adam, with a ``step_size`` and a ``decay`` for each tensor."""
    p, v = read_mains(batch), read_moment(batch, "exp_avg_sq")
    m = grads = _gradients(batch, p, multiplier, l2)
    if "exp_avg" in batch.state:
        m = read_moment(batch, "exp_avg")
        _average_first(m, grads, s, s.one_minus_beta1)
    _average_second(v, grads, s)
    sizes, decays = zip(*steps, strict=True)
    updates = torch._foreach_div(m, _denominators(v, s))
    torch._foreach_mul_(updates, sizes)
    decayed = [(main, decay) for main, decay in zip(p, decays, strict=True) if decay]
    if decayed:  # the others not, as 0 * inf is not 0
        mains, rates = map(list, zip(*decayed, strict=True))
        torch._foreach_sub_(mains, torch._foreach_mul(mains, rates))
    torch._foreach_sub_(p, updates)
    if "exp_avg" in batch.state:
        write_moment(batch, "exp_avg", m)
    write_moment(batch, "exp_avg_sq", v)
    write_mains(batch, p)


class ReferenceBackend:
    """What every other backend is measured against."""

    name = "reference"
    takes_device_multipliers = False
    capturable = False
    interpreted = False
    reads_source = False
    limits = ""

    def adam(self, lists: TensorLists, scalars: AdamScalars, multiplier: float) -> None:
        step = (scalars.step_size, scalars.decay)
        for cut in batches(lists):
            steps = [step] * len(cut.owners)
            _adam_batch(cut.lists, scalars, steps, multiplier, scalars.l2)

    def stable_adamw(
        self, lists: TensorLists, scalars: StableScalars, multiplier: float
    ) -> None:
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
            grads = _gradients(cut.lists, [], multiplier, 0.0)
            v = [value.clone() for value in read_moment(cut.lists, "exp_avg_sq")]
            _average_second(v, grads, scalars)
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
        self,
        lists: TensorLists,
        scalars: StableScalars,
        steps: Sequence[Step],
        multiplier: float,
    ) -> None:
        """AdamW with a ``step_size`` and a ``decay`` for each tensor."""
        for cut in batches(lists):
            own = [steps[owner] for owner in cut.owners]
            _adam_batch(cut.lists, scalars, own, multiplier)

    def lamb(self, lists: TensorLists, scalars: LambScalars, multiplier: float) -> None:
        """Both phases of LAMB, for tensors that are whole parameters."""
        self.lamb_finish(
            lists, scalars, self.lamb_moments(lists, scalars, multiplier), multiplier
        )

    def lamb_moments(
        self, lists: TensorLists, scalars: LambScalars, multiplier: float
    ) -> Tensor:
        owners: list[int] = []
        squares: list[Tensor] = []
        for cut in batches(lists):
            batch = cut.lists
            p, m, v = (
                read_mains(batch),
                read_moment(batch, "exp_avg"),
                read_moment(batch, "exp_avg_sq"),
            )
            grads = _gradients(batch, p, multiplier, scalars.l2)
            _average_first(m, grads, scalars, scalars.grad_weight)
            _average_second(v, grads, scalars)
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

    def lamb_apply(
        self, lists: TensorLists, scalars: LambScalars, ratios: Sequence[float]
    ) -> None:
        for cut in batches(lists):
            batch = cut.lists
            p = read_mains(batch)
            u = _directions(batch, p, scalars)
            torch._foreach_mul_(u, [ratios[owner] for owner in cut.owners])
            torch._foreach_sub_(p, u)
            write_mains(batch, p)

    def sgd(self, lists: TensorLists, scalars: SgdScalars, multiplier: float) -> None:
        for batch in (cut.lists for cut in batches(lists)):
            p = read_mains(batch)
            grads = _gradients(batch, p, multiplier, scalars.decay)
            if "momentum_buffer" in batch.state:
                buffers = read_moment(batch, "momentum_buffer")
                grads = self._momentum(buffers, grads, scalars)
                write_moment(batch, "momentum_buffer", buffers)
            torch._foreach_mul_(grads, scalars.lr)
            torch._foreach_sub_(p, grads)
            write_mains(batch, p)

    def lion(self, lists: TensorLists, scalars: LionScalars, multiplier: float) -> None:
        for batch in (cut.lists for cut in batches(lists)):
            p, m = read_mains(batch), read_moment(batch, "exp_avg")
            grads = _gradients(batch, p, multiplier, 0.0)
            blend = torch._foreach_mul(m, scalars.beta1)
            torch._foreach_add_(
                blend, torch._foreach_mul(grads, scalars.one_minus_beta1)
            )
            steps = [torch.where(u.isnan(), u, u.sign()) for u in blend]
            torch._foreach_mul_(steps, scalars.lr)
            if scalars.decay != 0.0:
                torch._foreach_sub_(p, torch._foreach_mul(p, scalars.decay))
            torch._foreach_sub_(p, steps)
            torch._foreach_mul_(m, scalars.beta2)
            torch._foreach_add_(m, torch._foreach_mul(grads, scalars.one_minus_beta2))
            write_moment(batch, "exp_avg", m)
            write_mains(batch, p)

    def average(self, lists: TensorLists) -> None:
        for batch in batches(lists.for_averages()):
            take_averages(batch.lists)

    @staticmethod
    def _momentum(buffers: Lists, grads: Lists, s: SgdScalars) -> Lists:
        if s.first:
            torch._foreach_copy_(buffers, grads)
        else:
            torch._foreach_mul_(buffers, s.momentum)
            torch._foreach_add_(
                buffers, torch._foreach_mul(grads, s.one_minus_dampening)
            )
        if not s.nesterov:
            return [buffer.clone() for buffer in buffers]
        torch._foreach_add_(grads, torch._foreach_mul(buffers, s.momentum))
        return grads

    def muon_momentum(
        self, lists: TensorLists, scalars: MuonScalars, multiplier: float
    ) -> None:
        average_momenta(lists, scalars, multiplier)

    def muon_apply(
        self, lists: TensorLists, scalars: MuonScalars, factors: Sequence[float]
    ) -> None:
        descend(lists, scalars, factors)

    def sum_of_squares(self, tensors: Sequence[Tensor]) -> Tensor:
        return sum_of_squares(tensors)
