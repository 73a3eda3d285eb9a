"""Products of bfloat16 matrices with symmetric ones by the compiled kernels of ``update/csrc``, on
CPUs with AMX or AVX-512's bfloat16: half of a symmetric result is computed, and nothing is copied
on the way.

A result is a sum in FP32 in the order of the inner side, or the sum of such sums of chunks of it:
:mod:`mp_optim.update.product_bits` finds the chunks that give the bits of torch's products.
"""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mp_optim.config.muon import Polynomial
from mp_optim.update.backends.host_threads import thread_count
from mp_optim.update.backends.native_library import (
    MuonPasses,
    Product,
    Stack,
    Steps,
    native_library,
)
from mp_optim.update.matrix_rooms import Rooms

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


class Chunks(NamedTuple):
    """Elements of the inner side that are summed up by themselves, multiples of 32, in
    :class:`~mp_optim.update.matrix_products.Products`' ``gram`` and ``left``."""

    gram: int
    left: int


@dataclass(frozen=True)
class NativeProducts:
    """:class:`~mp_optim.update.matrix_products.Products`, with what each sums up at once. Every
    matrix of a batch has the bits that it has alone, for any number of threads.

    Attributes:
        contiguous: for matrices that lie in rows; ``lying`` for transposes of such.
        square_chunk: the same of ``square``.
    """

    contiguous: Chunks
    lying: Chunks
    square_chunk: int

    turns = True

    def gram(self, x: Tensor, rooms: Rooms) -> Tensor:
        to = rooms.take("gram", len(x), x.size(-2), x.size(-2))
        return _multiply(None, x, to, self._chunks(x).gram, 1.0, 0.0, rooms)

    def square(self, gram: Tensor, b: float, c: float, rooms: Rooms) -> Tensor:
        to = rooms.like("square", gram)
        return _multiply(None, gram, to, self.square_chunk, c, b, rooms)

    def left(
        self, factor: Tensor, x: Tensor, a: float, to: Tensor, rooms: Rooms
    ) -> Tensor:
        return _multiply(factor, x, to, self._chunks(x).left, 1.0, a, rooms)

    def turned(
        self, factor: Tensor, x: Tensor, a: float, to: Tensor, rooms: Rooms
    ) -> Tensor:
        self.left(factor, x, a, to.mT, rooms)
        return to

    def _chunks(self, x: Tensor) -> Chunks:
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

    def take(self) -> None:
        """Divide each matrix by its norm, and take the steps, in place."""
        library, threads = native_library(), thread_count()
        table = self._table()
        wholes = (Stack * len(table))(*(each.stack for each in table))
        library.call("mp_normalize", wholes, len(table), threads)
        self._call("mp_newton_schulz", table)

    def take_within(self, passes: MuonPasses) -> None:
        """The same, and the passes before and after, in one call."""
        self._call("mp_muon_step", self._table(), ctypes.byref(passes))

    def _table(self) -> ctypes.Array[Steps]:
        return (Steps * len(self.stacks))(*(_steps(*each) for each in self.stacks))

    def _call(self, name: str, table: ctypes.Array[Steps], *passes: Any) -> None:
        numbers = array("f", chain.from_iterable(self.polynomials))
        library, threads = native_library(), thread_count()
        assert library.handle is not None
        count, steps = len(table), len(self.polynomials)
        size = library.handle.mp_newton_schulz_room(table, count, steps, threads)
        room = self.rooms.take("steps", size // 2).data_ptr()
        how = numbers.buffer_info()[0], steps, room, threads
        library.call(name, *passes, table, count, *how)


def _steps(stack: Tensor, by: NativeProducts) -> Steps:
    chunks = by.square_chunk, *by.contiguous, *by.lying
    return Steps(Stack(stack.data_ptr(), *stack.shape), *chunks)


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
