"""The three products of a Newton-Schulz step over batches of matrices: in torch operations, or by
the compiled kernels of ``update/csrc`` on CPUs with AMX or AVX-512's bfloat16, which compute half
of a symmetric result and copy nothing on the way.
"""

from __future__ import annotations

import ctypes
import math
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import NamedTuple

import torch
from torch import Tensor

from mp_optim.config.rules import Polynomial
from mp_optim.update.backends.native_library import (
    MuonPasses,
    Product,
    Stack,
    Steps,
    native_library,
    thread_count,
)

TOGETHER = 1 << 24
"""Elements of matrices that are multiplied together at the most: enough that each thread has some
of its own, which is faster than sharing one, and not much memory for what is in between."""


class EachAlone:
    """Every matrix by itself: the bits that others must have. On a CPU as one matrix, elsewhere as
    a batch of one. Results are memory of ``rooms``, or what is given to be written."""

    def gram(self, x: Tensor, rooms: Rooms) -> Tensor:
        """x x^T of each matrix of a batch, shape (n, rows, columns), contiguous or lying in memory
        as its transposes do."""
        return _joined([each @ each.mT for each in _singles(x)])

    def square(self, gram: Tensor, b: float, c: float, rooms: Rooms) -> Tensor:
        """b G + c G^2 of symmetric matrices."""
        found = [_add_product(each, each, each, beta=b, alpha=c) for each in _singles(gram)]
        return _joined(found)

    def left(self, factor: Tensor, x: Tensor, a: float, to: Tensor, rooms: Rooms) -> Tensor:
        """a x + F x of symmetric F, in ``to``."""
        pairs = zip(_singles(x), _singles(factor), strict=True)
        found = [_add_product(each, by, each, beta=a) for each, by in pairs]
        return to.copy_(_joined(found))


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
    """A batch in one operation.

    Attributes:
        turns: whether :meth:`turned` has the bits of :meth:`left`.
    """

    turns: bool

    def gram(self, x: Tensor, rooms: Rooms) -> Tensor:
        side = x.size(-2)
        return torch.bmm(x, x.mT, out=rooms.take("gram", len(x), side, side))

    def square(self, gram: Tensor, b: float, c: float, rooms: Rooms) -> Tensor:
        to = rooms.like("square", gram)
        return torch.baddbmm(gram, gram, gram, beta=b, alpha=c, out=to)

    def left(self, factor: Tensor, x: Tensor, a: float, to: Tensor, rooms: Rooms) -> Tensor:
        return torch.baddbmm(x, factor, x, beta=a, out=to)

    def turned(self, factor: Tensor, x: Tensor, a: float, to: Tensor) -> Tensor:
        """The transpose of the same, of a contiguous x, in ``to``, which is contiguous."""
        return torch.baddbmm(x.mT, x.mT, factor, beta=a, out=to)


# -- memory for results, used again by the next batch ---------------------------------------------


class Rooms:
    """Buffers by name, each as large as the largest that was asked for.

    Args:
        device, dtype: of all of them.
    """

    def __init__(self, device: torch.device, dtype: torch.dtype) -> None:
        self.device, self.dtype = device, dtype
        self._rooms: dict[str, Tensor] = {}

    def take(self, name: str, *shape: int) -> Tensor:
        """A buffer, with anything in it; what was taken by this name before is given up."""
        size = math.prod(shape)
        room = self._rooms.get(name)
        if room is None or room.numel() < size:
            self._rooms.pop(name, None)
            room = torch.empty(size, dtype=self.dtype, device=self.device)
            self._rooms[name] = room
        return room[:size].view(shape)

    def like(self, name: str, tensor: Tensor) -> Tensor:
        """A buffer of a tensor's shape."""
        return self.take(name, *tensor.shape)


def side_by_side(stacks: Sequence[Tensor]) -> Tensor:
    """Contiguous matrices and stacks of them, of one shape of matrices, as one stack (all of them,
    rows, columns): a view if they lie one after the other, else a copy."""
    first, end = stacks[0], stacks[0].data_ptr()
    rows, columns = first.shape[-2:]
    adjacent = True
    for stack in stacks:
        adjacent = adjacent and stack.data_ptr() == end
        end += stack.numel() * stack.element_size()
    storage = first.untyped_storage()
    if not adjacent or end > storage.data_ptr() + storage.nbytes():
        return torch.cat([each.view(-1, rows, columns) for each in stacks])
    size = sum(each.numel() for each in stacks)
    shape = (size // (rows * columns), rows, columns)
    return first.as_strided(shape, (rows * columns, columns, 1))


def beside_each_other(shapes: Sequence[torch.Size], rooms: Rooms, name: str) -> list[Tensor]:
    """Memory for tensors of these shapes, in which matrices of one shape follow each other, each
    such run from a multiple of 64 bytes on."""
    width = 64 // rooms.dtype.itemsize
    starts, end = [0] * len(shapes), 0
    by_matrix: dict[torch.Size, list[int]] = {}
    for index, shape in enumerate(shapes):
        by_matrix.setdefault(shape[-2:], []).append(index)
    for indices in by_matrix.values():
        end = -(-end // width) * width
        for index in indices:
            starts[index] = end
            end += shapes[index].numel()
    room = rooms.take(name, end)
    return [
        room[start : start + shape.numel()].view(shape)
        for start, shape in zip(starts, shapes, strict=True)
    ]


# -- by the compiled kernels ---------------------------------------------------------------------
#
# A result is a sum in FP32 in the order of the inner side, or the sum of such sums of chunks of it:
# ``newton_schulz`` finds the chunks that give the bits of torch's products.

_STEP, _TRIED = 32, 8


def has_native_products() -> bool:
    """Whether this CPU has them, at the level in use."""
    handle = native_library().handle
    return handle is not None and bool(handle.mp_has_products())


def chunk_choices(inner: int) -> list[int]:
    """Sizes of the chunks that a library may cut an inner side into, the likeliest first: a power
    of two (without AMX), or a number of chunks that are even but for rounding up to the size of a
    step, of about 1024 (with AMX)."""
    usual, most = inner / 1024, -(-inner // _STEP)
    counts = sorted(range(1, most + 1), key=lambda count: abs(count - usual))
    even = [
        -(-inner // (count * step)) * step
        for count in counts[:_TRIED]
        for step in (2 * _STEP, _STEP)
    ]
    powers = [512, 1024, 256, 128, 64]
    return list(dict.fromkeys([*powers[:2], *even, *powers[2:]]))


class SumChunks(NamedTuple):
    """Elements of the inner side that are summed up by themselves, multiples of 32, in ``gram`` and
    ``left``."""

    gram: int
    left: int


@dataclass(frozen=True)
class NativeProducts:
    """The products of :class:`EachAlone`, with what each sums up at once; also to what lies turned.
    Every matrix of a batch has the bits that it has alone, for any number of threads.

    Attributes:
        contiguous: for matrices that lie in rows; ``lying`` for transposes of such.
        square_chunk: the same of ``square``.
    """

    contiguous: SumChunks
    lying: SumChunks
    square_chunk: int

    def gram(self, x: Tensor, rooms: Rooms) -> Tensor:
        to = rooms.take("gram", len(x), x.size(-2), x.size(-2))
        return _multiply(None, x, to, self._chunks(x).gram, 1.0, 0.0, rooms)

    def square(self, gram: Tensor, b: float, c: float, rooms: Rooms) -> Tensor:
        to = rooms.like("square", gram)
        return _multiply(None, gram, to, self.square_chunk, c, b, rooms)

    def left(self, factor: Tensor, x: Tensor, a: float, to: Tensor, rooms: Rooms) -> Tensor:
        return _multiply(factor, x, to, self._chunks(x).left, 1.0, a, rooms)

    def _chunks(self, x: Tensor) -> SumChunks:
        return self.lying if _lies_turned(x) else self.contiguous


@dataclass(frozen=True)
class NativeSteps:
    """Newton-Schulz steps of stacks of matrices, as the kernels take them. A thread takes all steps
    of a matrix, while it is in its caches.

    Attributes:
        stacks: of bfloat16 matrices, (n, rows, columns), contiguous, with what multiplies them.
        polynomials: the steps.
        rooms: memory for what is in between.
    """

    stacks: Sequence[tuple[Tensor, NativeProducts]]
    polynomials: Sequence[Polynomial]
    rooms: Rooms

    def take(self, passes: MuonPasses | None = None) -> None:
        """Divide each matrix by its norm, and take the steps, in place.

        Args:
            passes: what is to be done before and after them, in the same call.
        """
        library, threads = native_library(), thread_count()
        assert library.handle is not None
        count, steps = len(self.stacks), len(self.polynomials)
        table = (Steps * count)()
        for to, (stack, by) in zip(table, self.stacks, strict=True):
            to.stack = Stack(stack.data_ptr(), *stack.shape)
            to.square_chunk, (to.gram_chunk, to.left_chunk) = by.square_chunk, by.contiguous
            to.turned_gram_chunk, to.turned_left_chunk = by.lying
        numbers = array("f", chain.from_iterable(self.polynomials))
        size = library.handle.mp_newton_schulz_room(table, count, steps, threads)
        room = self.rooms.take("steps", size // 2).data_ptr()
        given = table, count, numbers.buffer_info()[0], steps, room, threads
        if passes is not None:
            library.call("mp_muon_step", ctypes.byref(passes), *given)
            return
        wholes = (Stack * count)(*(each.stack for each in table))
        library.call("mp_normalize", wholes, count, threads)
        library.call("mp_newton_schulz", *given)


def _multiply(
    factor: Tensor | None,
    x: Tensor,
    to: Tensor,
    chunk: int,
    alpha: float,
    beta: float,
    rooms: Rooms,
) -> Tensor:
    """product * alpha + x * beta, rounded once; the product is F x, or x x^T without a factor."""
    count, rows, columns = x.shape
    product = Product(
        None if factor is None else factor.data_ptr(),
        *(x.data_ptr(), to.data_ptr(), None),
        *(count, rows, columns, chunk, alpha, beta),
        *(_lies_turned(x), _lies_turned(to)),
    )
    library, threads = native_library(), thread_count()
    assert library.handle is not None
    size = library.handle.mp_product_room(ctypes.byref(product), threads)
    product.room = rooms.take("packed", size // 2).data_ptr()
    library.call("mp_product", ctypes.byref(product), threads)
    return to


def _lies_turned(x: Tensor) -> bool:
    """Whether a batch lies in memory as its transposes would."""
    if x.is_contiguous():
        return False
    assert x.mT.is_contiguous() and x.dtype == torch.bfloat16
    return True
