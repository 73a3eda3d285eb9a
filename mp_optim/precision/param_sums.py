"""Sums of squares of single parameters: of gradients, weights and updates."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from mp_optim.precision.measure import SumOfSquares, measure
from mp_optim.update.shard_sums import Groups, reduce_over
from mp_optim.update.sums import index_on


@dataclass(frozen=True)
class Places:
    """Where the gradients of a step belong.

    Attributes:
        indices: in slot order, of the slots that have a gradient.
        parts: for every slot the groups of ranks over which its parameter is split.
    """

    indices: Sequence[int]
    parts: Sequence[Groups]

    def spread(self, sums: Tensor) -> Tensor:
        """The gradients' sums of squares as those of whole parameters, shape (slots,), 0 where
        there is no gradient. Collective, once for each kind of split."""
        if len(self.indices) == len(self.parts):
            of_slots = sums.clone()
        else:
            of_slots = sums.new_zeros(len(self.parts))
            of_slots[index_on(sums.device, self.indices)] = sums
        add_parts(of_slots, self.parts, "agreeing on the gradient norms of parameters")
        return of_slots


def add_parts(sums: Tensor, parts: Sequence[Groups], doing: str) -> None:
    """Add up in place what ranks that hold parts of the same parameters have. Collective, once for
    each kind of split.

    Args:
        sums: shape (slots, ...).
        parts: for every slot the groups of ranks over which it is split.
    """
    alike: dict[Groups, list[int]] = {}
    for index, groups in enumerate(parts):
        alike.setdefault(groups, []).append(index)
    for groups, indices in alike.items():
        if groups and len(indices) == len(parts):
            reduce_over(groups, sums, doing)
        elif groups:
            where = index_on(sums.device, indices)
            some = sums[where]
            reduce_over(groups, some, doing)
            sums[where] = some


class UpdateWatch:
    """Main params before a step, to be compared with what the step makes of them. Holds a copy of
    them: 4 bytes a parameter of this rank, where they are stepped.

    Args:
        mains: the main params now, one of each slot.
        parts: for every slot the groups of ranks over which its parameter is split.
        device: of the result.
    """

    def __init__(
        self,
        mains: Callable[[], list[Tensor]],
        parts: Sequence[Groups],
        sum_of_squares: SumOfSquares,
        device: torch.device,
    ) -> None:
        self._mains, self._parts, self._device = mains, parts, device
        self._sum_of_squares = sum_of_squares
        self._before = [main.detach().clone() for main in mains()]

    def finish(self) -> Tensor:
        """After the step: for each slot the sum of squares of its main param before, of what the
        step added to it, and the number of elements; FP64, shape (slots, 3). Collective."""
        weights = measure(self._before, self._sum_of_squares, self._device)
        for before, now in zip(self._before, self._mains(), strict=True):
            before.sub_(now.detach())
        updates = measure(self._before, self._sum_of_squares, self._device)
        counts = [tensor.numel() for tensor in self._before]
        self._before.clear()
        numel = index_on(self._device, counts).double()
        sums = torch.stack([weights, updates, numel], dim=1)
        add_parts(sums, self._parts, "adding up the updates of parameters")
        return sums
