"""The orthogonal factor of matrices by Newton-Schulz iterations, in products of matrices only, and
who multiplies: what is fastest and has the bits that torch's product of each matrix alone has.
"""

from __future__ import annotations

import ctypes
import math
from array import array
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache, partial
from itertools import chain
from typing import NamedTuple

import torch
from torch import Tensor

from mp_optim.config.rules import Polynomial
from mp_optim.host.calls import without_autocast
from mp_optim.kernels import choose_backend
from mp_optim.kernels.native_library import (
    MuonPasses,
    Product,
    Stack,
    Steps,
    native_library,
    thread_count,
)

_EPS = 1e-7
"""Norms are taken to be no less; torch.optim.Muon's."""


def orthogonalize_each(
    stacks: Sequence[Tensor],
    polynomials: Sequence[Polynomial],
    method: str = "standard",
    rooms: Rooms | None = None,
) -> list[Tensor]:
    """U V^T, roughly, of each matrix U S V^T: the singular values come near one, not to one. Takes
    many matrices, and stacks of them, and overwrites them. A matrix is divided by its norm first;
    zeros stay zeros.

    Matrices of one shape go into products together, those that lie side by side without a copy.
    The bits of each are those that it has alone: where the library's are others in a batch, each
    is multiplied alone on a CPU, and each stack by itself elsewhere.

    Args:
        stacks: shapes (..., rows, columns), contiguous, on one device, of one dtype: bfloat16 or
            float32, which is that of the products.
        polynomials: the steps (see :mod:`mp_optim.config.rules`).
        method: ``standard``, or ``gram`` for matrices at least twice as long as wide
            (:func:`~mp_optim.muon.newton_schulz.iterate_grams`).
        rooms: memory for what is in between, of their device and dtype.

    Returns:
        Contiguous tensors of the same shapes.
    """
    done, shapes = list(stacks), _by_shape(stacks)
    if not shapes:
        return done
    rooms = rooms or Rooms(stacks[0].device, stacks[0].dtype)
    by_kernels: list[tuple[Tensor, NativeProducts]] = []
    with _full_precision(rooms.dtype), without_autocast(rooms.device):
        for shape, indices in shapes.items():
            each = [stacks[index] for index in indices]
            if _takes_grams(method, shape):
                _by_grams(each, polynomials)
                continue
            home = side_by_side(each)
            if kernels := kernels_of(home):
                by_kernels.append((home, kernels))
            else:
                _of_one_shape(home, each, polynomials, rooms)
            if home.data_ptr() != each[0].data_ptr():
                pieces = torch.split(home.view(-1), [one.numel() for one in each])
                for index, piece in zip(indices, pieces, strict=True):
                    done[index] = piece.view(stacks[index].shape)
        if by_kernels:
            NativeSteps(by_kernels, polynomials, rooms).take()
    return done


def steps_in_place(
    stacks: Sequence[Tensor], polynomials: Sequence[Polynomial], method: str, rooms: Rooms
) -> tuple[NativeSteps, list[list[int]]] | None:
    """What :func:`orthogonalize_each` would have the kernels do, and the indices of the tensors
    that each of their stacks consists of; None if there is nothing or something else to do."""
    found, shapes = [], _by_shape(stacks)
    for shape, indices in shapes.items():
        home = side_by_side([stacks[index] for index in indices])
        kernels = None if _takes_grams(method, shape) else kernels_of(home)
        if kernels is None or home.data_ptr() != stacks[indices[0]].data_ptr():
            return None
        found.append((home, kernels))
    if not found:
        return None
    return NativeSteps(found, polynomials, rooms), list(shapes.values())


def _by_shape(stacks: Sequence[Tensor]) -> dict[torch.Size, list[int]]:
    """Indices of what is not empty, by the shape of its matrices."""
    shapes: dict[torch.Size, list[int]] = {}
    for index, stack in enumerate(stacks):
        if stack.numel():
            shapes.setdefault(stack.shape[-2:], []).append(index)
    return shapes


def _takes_grams(method: str, shape: torch.Size) -> bool:
    return method == "gram" and max(shape) >= 2 * min(shape)


def _by_grams(stacks: Sequence[Tensor], polynomials: Sequence[Polynomial]) -> None:
    """In place; on a CPU of each matrix by itself, so that its bits do not depend on the others,
    elsewhere of each stack."""
    for stack in stacks:
        matrices = stack.view(-1, *stack.shape[-2:])
        for batch in torch.split(matrices, 1 if stack.is_cpu else len(matrices)):
            iterate_grams(batch.div_(_norms(batch)), polynomials)


def _of_one_shape(
    home: Tensor, stacks: Sequence[Tensor], polynomials: Sequence[Polynomial], rooms: Rooms
) -> None:
    """In place, of matrices of one shape, (n, rows, columns), by torch's products."""
    together = max(1, min(len(home), TOGETHER // home[0].numel()))
    if not products_of(home[:together]):  # only what is alone has the bits of what is alone
        together = 1 if home.is_cpu else len(home)
    for batch in torch.split(home, together):
        if products := products_of(batch):
            _iterate_together(batch, polynomials, products, rooms)
        elif home.is_cpu:
            for one in batch:
                one.copy_(iterate(one.clone(), polynomials))
        else:
            lengths = [each.numel() // home[0].numel() for each in stacks]
            for stack in torch.split(home, lengths):
                stack.copy_(iterate(stack.clone(), polynomials))
            break


def _iterate_together(
    batch: Tensor, polynomials: Sequence[Polynomial], by: TorchProducts, rooms: Rooms
) -> None:
    """In place; of a tall batch from and to its transpose, as it lies."""
    spare = rooms.take("spare", *batch.shape)
    start, other = (spare, batch) if len(polynomials) % 2 else (batch, spare)
    x = torch.div(batch, _norms(batch), out=start)
    if _is_tall(batch):
        x, other = x.mT, other.view(x.mT.shape)
    for a, b, c in polynomials[:-1]:
        factor = by.square(by.gram(x, rooms), b, c, rooms)
        to = by.left(factor, x, a, other, rooms)
        x, other = to, start.view(to.shape) if x.data_ptr() == start.data_ptr() else x
    a, b, c = polynomials[-1]
    factor = by.square(by.gram(x, rooms), b, c, rooms)
    if not _is_tall(batch):
        by.left(factor, x, a, batch, rooms)
    elif len(polynomials) > 1 and by.turns:
        by.turned(factor, x, a, batch)
    else:
        wide = by.left(factor, x, a, rooms.take("wide", *x.shape), rooms)
        for matrix, turned in zip(batch, wide, strict=True):
            matrix.copy_(turned.mT)  # one by one torch does it in tiles


def _is_tall(x: Tensor) -> bool:
    return x.size(-2) > x.size(-1)


def iterate(x: Tensor, polynomials: Sequence[Polynomial]) -> Tensor:
    """One matrix, or a stack; overwrites its argument. The order of operations that defines the
    bits."""
    x.div_(_norms(x))
    tall = _is_tall(x)
    x = x.mT if tall else x
    for a, b, c in polynomials:
        gram = x @ x.mT
        x = _add_product(x, _add_product(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return (x.mT if tall else x).contiguous()


def _norms(x: Tensor) -> Tensor:
    """Frobenius norms, not less than 1e-7, by the sums that are the same for any number of
    threads; shape () of a matrix, (n, 1, 1) of a stack."""
    matrices = [x] if x.dim() == 2 else list(x)
    sums = choose_backend("auto", x.device)[0].sum_of_squares(matrices)
    norms = sums.sqrt().to(x.dtype).clamp_(min=_EPS)
    return norms[0] if x.dim() == 2 else norms[:, None, None]


@contextmanager
def _full_precision(dtype: torch.dtype) -> Iterator[None]:
    """FP32 products in FP32, whatever the process allows elsewhere (TF32, bfloat16)."""
    if dtype != torch.float32:
        yield
        return
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


# -- on X X^T -------------------------------------------------------------------------------------


def iterate_grams(batch: Tensor, polynomials: Sequence[Polynomial]) -> None:
    """Steps of a batch of matrices of norm 1, in place; shape (n, rows, columns).

    With G = X X^T, a step X <- (a I + b G + c G^2) X = P X makes G <- P G P. So several steps are
    one product (... P2 P1) X, of a factor that is made in products of the smaller side. Rounding
    makes the factor and G drift apart, so that in bfloat16 small singular values can grow without
    bound; hence G is made anew of X after the first step, and after every second one from there
    on. The method is Zhang, Amsel, Chen and Dao's
    (2026, https://dao-ailab.github.io/blog/2026/gram-newton-schulz/).
    """
    is_tall = _is_tall(batch)
    x = batch.mT if is_tall else batch
    starts = [0, *range(1, len(polynomials), 2)]
    for start, stop in zip(starts, [*starts[1:], len(polynomials)], strict=True):
        factor = _factor(x @ x.mT, polynomials[start:stop])
        if stop < len(polynomials):
            x = factor @ x
        elif is_tall:
            batch.copy_(x.mT @ factor.mT)
        else:
            batch.copy_(factor @ x)


def _factor(gram: Tensor, polynomials: Sequence[Polynomial]) -> Tensor:
    """The product of the factors of one or two steps, of G at their start."""
    (a, b, c), *second = polynomials
    change = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)
    factor = change.clone()
    factor.diagonal(dim1=-2, dim2=-1).add_(a)
    for next_a, next_b, next_c in second:
        half = torch.baddbmm(gram, gram, change, beta=a)
        gram = torch.baddbmm(half, change, half, beta=a)
        change = torch.baddbmm(gram, gram, gram, beta=next_b, alpha=next_c)
        factor = torch.baddbmm(factor, change, factor, beta=next_a)
    return factor


# -- who multiplies ------------------------------------------------------------------------------
#
# Libraries choose how they add up a product by its shape, the number of matrices and of threads, so
# that nobody promises it: it is tried here, once for each of these in a process, on factors whose
# products nearly cancel. Of such sums hardly a bit is the same if they are added in another order.

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
    trials = _trials(1, rows, columns, torch.device("cpu"))
    side, length = sorted((rows, columns))
    chunks = [SumChunks(_chunk(length, trial.gram), _chunk(side, trial.left)) for trial in trials]
    square = _chunk(side, trials[0].square)
    if not (square and all(map(all, chunks))):
        return None
    return NativeProducts(chunks[0], chunks[-1], square)


def _chunk(inner: int, product: Callable[[Products], Tensor]) -> int:
    """What the kernels have to sum up at once in a product; 0 if nothing gives the bits."""
    expected = product(EachAlone())
    for size in chunk_choices(inner):
        every = SumChunks(size, size)
        if torch.equal(product(NativeProducts(every, every, size)), expected):
            return size
    return 0


@cache
def _by_torch(
    shape: tuple[int, int, int], device: torch.device, threads: int
) -> TorchProducts | None:
    """Whole batches by torch, if their bits are those of each matrix alone."""
    trials = _trials(*shape, device)
    plain, alone = TorchProducts(turns=False), EachAlone()
    for each in trials:
        gram = each.gram(plain)
        if not torch.equal(gram, gram.mT):
            return None
        for product in (each.gram, each.square, each.left):
            if not torch.equal(product(plain), product(alone)):
                return None
    trial = trials[0]
    to = torch.empty_like(trial.z.mT.contiguous())
    turned = plain.turned(trial.symmetric, trial.z, _WEIGHT, to).mT
    return TorchProducts(turns=torch.equal(turned, trial.left(plain)))


@dataclass(frozen=True)
class _Trial:
    """Batches of factors whose products nearly cancel.

    Attributes:
        x: wide matrices, multiplied with their transposes.
        z: wide, multiplied with ``symmetric``.
        power: symmetric, multiplied with itself.
        rooms: memory for results.
    """

    x: Tensor
    z: Tensor
    symmetric: Tensor
    power: Tensor
    rooms: Rooms

    def gram(self, products: Products) -> Tensor:
        return products.gram(self.x, self.rooms)

    def square(self, products: Products) -> Tensor:
        return products.square(self.power, _WEIGHT, _FACTOR, self.rooms)

    def left(self, products: Products) -> Tensor:
        to = torch.empty_like(self.z.contiguous())
        return products.left(self.symmetric, self.z, _WEIGHT, to, self.rooms)


def _trials(count: int, rows: int, columns: int, device: torch.device) -> list[_Trial]:
    """For matrices of a shape; if they are tall for those of its transpose, and once more as
    transposes of what is contiguous."""
    x, z, symmetric, power = _cancelling(count, *sorted((rows, columns)))
    to = partial(Tensor.to, device=device, dtype=torch.bfloat16)
    rooms = Rooms(device, torch.bfloat16)
    trial = _Trial(to(x), to(z).contiguous(), to(symmetric), to(power), rooms)
    if rows <= columns:
        return [trial]
    x, z = (each.mT.contiguous().mT for each in (trial.x, trial.z))
    return [trial, replace(trial, x=x, z=z)]


def _cancelling(count: int, side: int, length: int) -> list[Tensor]:
    """The factors of a trial in FP32, (count, side, length) and (count, side, side): one half of
    the products that make an element takes away most of the other half."""
    noise = torch.Generator(device="cpu").manual_seed(0)

    def random(*shape: int) -> Tensor:
        values = torch.randn(count, *shape, generator=noise, dtype=torch.float32, device="cpu")
        sizes = torch.randint(-6, 7, (1, 1, shape[-1]), generator=noise, device="cpu")
        return values * torch.exp2(sizes.float())

    def twice(a: Tensor, dim: int, sign: float) -> Tensor:
        half = a.size(dim) // 2
        a.narrow(dim, half, half).copy_(sign * a.narrow(dim, 0, half))
        return a

    x = twice(random(side, length), 2, 1.0)
    z = twice(random(length, side).mT.contiguous(), 1, -1.0)
    symmetric = random(side, side)
    symmetric = twice(twice(symmetric + symmetric.mT, 1, 1.0), 2, 1.0)
    power = symmetric.clone()
    for each in (x, power):  # upper rows are orthogonal to lower ones
        each[:, side // 2 :, each.size(2) // 2 :] *= -1
    return [x, z, symmetric, power]


# -- the three products of a step ------------------------------------------------------------------
#
# In torch operations, or by the compiled kernels of ``update/csrc`` on CPUs with AMX or AVX-512's
# bfloat16, which compute half of a symmetric result and copy nothing on the way.

TOGETHER = 1 << 24
"""Elements of matrices that are multiplied together at the most: enough that each thread has some
of its own, which is faster than sharing one, and not much memory for what is in between."""


class EachAlone:
    """Every matrix by itself: the bits that others must have. On a CPU as one matrix, elsewhere as
    a batch of one. Results are memory of ``rooms``, or what is given to be written."""

    def gram(self, x: Tensor, rooms: Rooms) -> Tensor:
        """x x^T of each matrix of a batch, shape (n, rows, columns), contiguous or lying in memory
        as its transposes do."""
        return _each(lambda one: one @ one.mT, x)

    def square(self, gram: Tensor, b: float, c: float, rooms: Rooms) -> Tensor:
        """b G + c G^2 of symmetric matrices."""
        return _each(lambda one: _add_product(one, one, one, beta=b, alpha=c), gram)

    def left(self, factor: Tensor, x: Tensor, a: float, to: Tensor, rooms: Rooms) -> Tensor:
        """a x + F x of symmetric F, in ``to``."""
        return to.copy_(_each(lambda one, by: _add_product(one, by, one, beta=a), x, factor))


def _each(product: Callable[..., Tensor], *batches: Tensor) -> Tensor:
    """Products of one matrix after the other, as a batch."""
    if batches[0].is_cpu:
        return torch.stack([product(*each) for each in zip(*batches, strict=True)])
    singles = [torch.split(batch, 1) for batch in batches]
    return torch.cat([product(*each) for each in zip(*singles, strict=True)])


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
        to = rooms.take("square", *gram.shape)
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
        to = rooms.take("square", *gram.shape)
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


Products = EachAlone | TorchProducts | NativeProducts
