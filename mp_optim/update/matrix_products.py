"""The three products of a Newton-Schulz step over batches of matrices, in torch operations."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from mp_optim.update.matrix_rooms import Rooms

TOGETHER = 1 << 24
"""Elements of matrices that are multiplied together at the most: enough that each thread has some
of its own, which is faster than sharing one, and not much memory for what is in between."""


class Products(Protocol):
    """Who multiplies. Results are memory of ``rooms``, or what is given to be written.

    Attributes:
        turns: whether :meth:`turned` has the bits of :meth:`left`.
    """

    @property
    def turns(self) -> bool: ...

    def gram(self, x: Tensor, rooms: Rooms) -> Tensor:
        """x x^T of each matrix of a batch, shape (n, rows, columns), contiguous or lying in memory
        as its transposes do."""

    def square(self, gram: Tensor, b: float, c: float, rooms: Rooms) -> Tensor:
        """b G + c G^2 of symmetric matrices."""

    def left(
        self, factor: Tensor, x: Tensor, a: float, to: Tensor, rooms: Rooms
    ) -> Tensor:
        """a x + F x of symmetric F, in ``to``, which is contiguous."""

    def turned(
        self, factor: Tensor, x: Tensor, a: float, to: Tensor, rooms: Rooms
    ) -> Tensor:
        """The transpose of the same, of a contiguous x, in ``to``, which is contiguous."""


class EachAlone:
    """Every matrix by itself: the bits that others must have. On a CPU as one matrix, elsewhere as
    a batch of one."""

    turns = False

    def gram(self, x: Tensor, rooms: Rooms) -> Tensor:
        return _joined([each @ each.mT for each in _singles(x)])

    def square(self, gram: Tensor, b: float, c: float, rooms: Rooms) -> Tensor:
        found = [
            _add_product(each, each, each, beta=b, alpha=c) for each in _singles(gram)
        ]
        return _joined(found)

    def left(
        self, factor: Tensor, x: Tensor, a: float, to: Tensor, rooms: Rooms
    ) -> Tensor:
        pairs = zip(_singles(x), _singles(factor), strict=True)
        found = [_add_product(each, by, each, beta=a) for each, by in pairs]
        return to.copy_(_joined(found))

    def turned(
        self, factor: Tensor, x: Tensor, a: float, to: Tensor, rooms: Rooms
    ) -> Tensor:
        return to.copy_(self.left(factor, x, a, torch.empty_like(x), rooms).mT)


def _singles(batch: Tensor) -> Sequence[Tensor]:
    return batch.unbind() if batch.is_cpu else torch.split(batch, 1)


def _joined(singles: list[Tensor]) -> Tensor:
    return torch.stack(singles) if singles[0].dim() == 2 else torch.cat(singles)


def _add_product(
    summand: Tensor, left: Tensor, right: Tensor, beta: float, alpha: float = 1.0
) -> Tensor:
    add_product = torch.addmm if summand.dim() == 2 else torch.baddbmm
    return add_product(summand, left, right, beta=beta, alpha=alpha)


@dataclass(frozen=True)
class TorchProducts:
    """A batch in one operation."""

    turns: bool

    def gram(self, x: Tensor, rooms: Rooms) -> Tensor:
        side = x.size(-2)
        return torch.bmm(x, x.mT, out=rooms.take("gram", len(x), side, side))

    def square(self, gram: Tensor, b: float, c: float, rooms: Rooms) -> Tensor:
        to = rooms.like("square", gram)
        return torch.baddbmm(gram, gram, gram, beta=b, alpha=c, out=to)

    def left(
        self, factor: Tensor, x: Tensor, a: float, to: Tensor, rooms: Rooms
    ) -> Tensor:
        return torch.baddbmm(x, factor, x, beta=a, out=to)

    def turned(
        self, factor: Tensor, x: Tensor, a: float, to: Tensor, rooms: Rooms
    ) -> Tensor:
        return torch.baddbmm(x.mT, x.mT, factor, beta=a, out=to)
