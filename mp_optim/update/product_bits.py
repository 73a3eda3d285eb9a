"""Who multiplies the matrices of a Newton-Schulz step: what is fastest and has the bits that
torch's product of each matrix alone has.

Libraries choose how they add up a product by its shape, the number of matrices and of threads, so
that nobody promises it: it is tried here, once for each of these in a process, on factors whose
products nearly cancel. Of such sums hardly a bit is the same if they are added in another order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache, partial

import torch
from torch import Tensor

from mp_optim.update.backends.native_products import (
    Chunks,
    NativeProducts,
    chunk_choices,
    has_native_products,
)
from mp_optim.update.matrix_products import EachAlone, Products, TorchProducts
from mp_optim.update.matrix_rooms import Rooms

_SHORTEST = 32
_WEIGHT, _FACTOR = 0.017, -1.43
"""What a summand and a product are multiplied with in a trial: the first is too small to hide the
second."""


def kernels_of(stack: Tensor) -> NativeProducts | None:
    """The kernels that have the bits of torch's products of each matrix of a stack alone, whatever
    is in it, for any number of matrices; None if there are none."""
    if not _tells(stack) or not stack.is_cpu or not has_native_products():
        return None
    return _by_kernels(stack.size(-2), stack.size(-1), torch.get_num_threads())


def products_of(batch: Tensor) -> TorchProducts | None:
    """Torch's products of whole batches of such a shape, whatever is in them, if they have the bits
    of each matrix alone."""
    if not _tells(batch):
        return None
    count, rows, columns = batch.shape
    return _by_torch((count, rows, columns), batch.device, torch.get_num_threads())


def _tells(batch: Tensor) -> bool:
    """Whether trials are relied on: not of FP32, and not of matrices with short sides, as sums of
    few products tell too little of their order."""
    return batch.dtype == torch.bfloat16 and min(batch.shape[-2:]) >= _SHORTEST


@cache
def _by_kernels(rows: int, columns: int, threads: int) -> NativeProducts | None:
    """The kernels, if there are sizes of chunks with which they have the bits of torch with so many
    threads."""
    trials = _Trial.of(1, rows, columns, torch.device("cpu")).also_lying(rows)
    side, length = sorted((rows, columns))
    chunks = [
        Chunks(_chunk(length, trial.gram), _chunk(side, trial.left)) for trial in trials
    ]
    square = _chunk(side, trials[0].square)
    if not (square and all(map(all, chunks))):
        return None
    return NativeProducts(chunks[0], chunks[-1], square)


def _chunk(inner: int, product: Callable[[Products], Tensor]) -> int:
    """What the kernels have to sum up at once in a product; 0 if nothing gives the bits."""
    expected = product(EachAlone())
    for size in chunk_choices(inner):
        every = Chunks(size, size)
        if torch.equal(product(NativeProducts(every, every, size)), expected):
            return size
    return 0


@cache
def _by_torch(
    shape: tuple[int, int, int], device: torch.device, threads: int
) -> TorchProducts | None:
    """Whole batches by torch, if their bits are those of each matrix alone."""
    trial = _Trial.of(*shape, device)
    plain = TorchProducts(turns=False)
    if not _have_bits(plain, trial.also_lying(shape[1])):
        return None
    return TorchProducts(turns=torch.equal(trial.turned(plain), trial.left(plain)))


def _have_bits(products: Products, trials: Iterable[_Trial]) -> bool:
    alone = EachAlone()
    for trial in trials:
        gram = trial.gram(products)
        if not torch.equal(gram, gram.mT):
            return False
        for product in (trial.gram, trial.square, trial.left):
            if not torch.equal(product(products), product(alone)):
                return False
    return True


@dataclass(frozen=True)
class _Trial:
    """Batches of factors whose products nearly cancel.

    Attributes:
        x: wide matrices, multiplied with their transposes.
        z: wide, multiplied with ``symmetric``.
        power: symmetric, multiplied with itself.
    """

    x: Tensor
    z: Tensor
    symmetric: Tensor
    power: Tensor

    @classmethod
    def of(cls, count: int, rows: int, columns: int, device: torch.device) -> _Trial:
        """For matrices of a shape, or of its transpose if they are tall."""
        side, length = sorted((rows, columns))
        x, z, symmetric, power = _cancelling(count, side, length)
        to = partial(Tensor.to, device=device, dtype=torch.bfloat16)
        return cls(to(x), to(z).contiguous(), to(symmetric), to(power))

    def also_lying(self, rows: int) -> list[_Trial]:
        """This, and for matrices with so many rows that are tall the same as transposes of what is
        contiguous."""
        if rows == self.x.size(-2):
            return [self]
        x, z = (each.mT.contiguous().mT for each in (self.x, self.z))
        return [self, _Trial(x, z, self.symmetric, self.power)]

    def gram(self, products: Products) -> Tensor:
        return products.gram(self.x, self._rooms())

    def square(self, products: Products) -> Tensor:
        return products.square(self.power, _WEIGHT, _FACTOR, self._rooms())

    def left(self, products: Products) -> Tensor:
        to = torch.empty_like(self.z.contiguous())
        return products.left(self.symmetric, self.z, _WEIGHT, to, self._rooms())

    def turned(self, products: Products) -> Tensor:
        """The same as ``left``, by another way."""
        to = torch.empty_like(self.z.mT.contiguous())
        products.turned(self.symmetric, self.z, _WEIGHT, to, self._rooms())
        return to.mT

    def _rooms(self) -> Rooms:
        return Rooms(self.x.device, self.x.dtype)


def _cancelling(count: int, side: int, length: int) -> list[Tensor]:
    """The factors of a trial in FP32, (count, side, length) and (count, side, side): one half of
    the products that make an element takes away most of the other half."""
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

    def halves_opposed(a: Tensor) -> Tensor:
        a[
            :, side // 2 :, a.size(2) // 2 :
        ] *= -1  # upper rows are orthogonal to lower ones
        return a

    x = halves_opposed(twice(random(side, length), 2, 1.0))
    z = twice(random(length, side).mT.contiguous(), 1, -1.0)
    symmetric = random(side, side)
    symmetric = twice(twice(symmetric + symmetric.mT, 1, 1.0), 2, 1.0)
    return [x, z, symmetric, halves_opposed(symmetric.clone())]
