"""The three products of a Newton-Schulz step over a batch of matrices, and whether they have the
bits that each matrix has alone.

Libraries choose how they add up a product by its shape, the number of matrices and of threads, so
that nobody promises it: it is tried here, once for each of these in a process, on factors whose
products nearly cancel. Of such sums hardly a bit is the same if they are added in another order.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from mp_optim.update.matrix_rooms import Rooms

_SHORTEST = 32
_WEIGHT, _FACTOR = 0.017, -1.43
"""What a summand and a product are multiplied with in a trial: the first is too small to hide the
second."""


def gram_of(x: Tensor, rooms: Rooms) -> Tensor:
    """x x^T of each matrix of a batch."""
    side = x.size(-2)
    return torch.bmm(x, x.mT, out=rooms.take("gram", len(x), side, side))


def square_of(gram: Tensor, b: float, c: float, rooms: Rooms) -> Tensor:
    """b G + c G^2."""
    to = rooms.like("square", gram)
    return torch.baddbmm(gram, gram, gram, beta=b, alpha=c, out=to)


def left_product(factor: Tensor, x: Tensor, a: float, to: Tensor) -> Tensor:
    """a x + F x."""
    return torch.baddbmm(x, factor, x, beta=a, out=to)


def turned_product(factor: Tensor, x: Tensor, a: float, to: Tensor) -> Tensor:
    """The transpose of the same, of a symmetric F."""
    return torch.baddbmm(x.mT, x.mT, factor, beta=a, out=to)


class SameBits(NamedTuple):
    """Which products of a batch of one shape have the bits of each matrix alone.

    Attributes:
        together: :func:`gram_of`, :func:`square_of` and :func:`left_product`, of the batch or, if
            it is tall, of its transpose: as it lies, and contiguous.
        turned: :func:`turned_product`, of what is contiguous.
    """

    together: bool
    turned: bool


def same_bits(batch: Tensor) -> SameBits:
    """For all batches of such a shape, whatever is in them.

    Of FP32, and of matrices with short sides, nothing is relied on: sums of few products tell too
    little of their order.
    """
    if batch.dtype != torch.bfloat16 or min(batch.shape[1:]) < _SHORTEST:
        return SameBits(False, False)
    return _tried(tuple(batch.shape), batch.device, torch.get_num_threads())


@cache
def _tried(shape: tuple[int, int, int], device: torch.device, threads: int) -> SameBits:
    x, z, symmetric, square = (
        each.to(torch.bfloat16).to(device) for each in _cancelling(*shape)
    )
    together = _alike(x, z, symmetric, square)
    if shape[1] > shape[2]:
        lying_x, lying_z = (each.mT.contiguous().mT for each in (x, z))
        together = together and _alike(lying_x, lying_z, symmetric, square)
    turned = turned_product(symmetric, z, _WEIGHT, torch.empty_like(z.mT.contiguous()))
    plain = left_product(symmetric, z, _WEIGHT, torch.empty_like(z))
    return SameBits(together, torch.equal(turned.mT, plain))


def _alike(x: Tensor, z: Tensor, symmetric: Tensor, square: Tensor) -> bool:
    rooms = Rooms(x.device, x.dtype)
    found = [
        gram_of(x, rooms),
        square_of(square, _WEIGHT, _FACTOR, rooms),
        left_product(
            symmetric, z, _WEIGHT, torch.empty(z.shape, dtype=z.dtype, device=z.device)
        ),
    ]
    if not torch.equal(found[0], found[0].mT):
        return False
    on_host = x.device.type == "cpu"
    add_product = torch.addmm if on_host else torch.baddbmm
    for index in range(len(x)):
        at = index if on_host else slice(index, index + 1)
        one, other, power = x[at], z[at], square[at]
        expected = [
            one @ one.mT,
            add_product(power, power, power, beta=_WEIGHT, alpha=_FACTOR),
            add_product(other, symmetric[at], other, beta=_WEIGHT),
        ]
        if not all(map(torch.equal, [each[at] for each in found], expected)):
            return False
    return True


def _cancelling(count: int, rows: int, columns: int) -> list[Tensor]:
    """Two batches of wide matrices, the second with a symmetric factor, and a factor of itself;
    FP32.

    One half of the products that make an element takes away most of the other half.
    """
    side, length = sorted((rows, columns))
    noise = torch.Generator(device="cpu").manual_seed(0)

    def random(*shape: int) -> Tensor:
        values = torch.randn(
            count, *shape, generator=noise, dtype=torch.float32, device="cpu"
        )
        sizes = torch.randint(-6, 7, (1, 1, shape[-1]), generator=noise, device="cpu")
        return values * torch.exp2(sizes.float())

    def twice(a: Tensor, dim: int, sign: float) -> Tensor:
        half = a.size(dim) // 2
        a.narrow(dim, half, half).copy_(sign * a.narrow(dim, 0, half))
        return a

    x = twice(random(side, length), 2, 1.0)
    x[
        :, side // 2 :, length // 2 :
    ] *= -1  # its upper rows are orthogonal to the lower ones
    z = twice(random(length, side).mT.contiguous(), 1, -1.0)
    symmetric = random(side, side)
    symmetric = twice(twice(symmetric + symmetric.mT, 1, 1.0), 2, 1.0)
    square = twice(twice(random(side, side), 2, 1.0), 1, -1.0)
    return [x, z, symmetric, square]
