"""Sums of squares in FP64 in the order of ``kernels/sums.py``.

Each ``tl.sum`` adds only two elements, because the sum of two elements does not depend on their
order. Triton does not define the order in which ``tl.sum`` adds more elements. So sums of more
elements are computed in several calls.
"""

import triton
import triton.language as tl

from mp_optim.kernels.triton.kernels.formats import fetch, place, widened
from mp_optim.kernels.triton.kernels.tiles import even_count, located


@triton.jit
def lanes_added(x, ROWS: tl.constexpr):
    """Add the 128 columns of ``x``, shape (ROWS, 128), by halving (``x[:, :64] + x[:, 64:]`` and so
    on). Return shape (ROWS,)."""
    x = tl.sum(tl.reshape(x, (ROWS, 2, 64)), axis=1)
    x = tl.sum(tl.reshape(x, (ROWS, 2, 32)), axis=1)
    x = tl.sum(tl.reshape(x, (ROWS, 2, 16)), axis=1)
    x = tl.sum(tl.reshape(x, (ROWS, 2, 8)), axis=1)
    x = tl.sum(tl.reshape(x, (ROWS, 2, 4)), axis=1)
    x = tl.sum(tl.reshape(x, (ROWS, 2, 2)), axis=1)
    return tl.sum(x, axis=1)


@triton.jit
def pairs_added(x, COUNT: tl.constexpr):
    """Add values of shape (COUNT,) to a scalar, adjacent pairs first. COUNT is a power of two up to
    1024."""
    if COUNT >= 1024:
        x = tl.sum(tl.reshape(x, (512, 2)), axis=1)
    if COUNT >= 512:
        x = tl.sum(tl.reshape(x, (256, 2)), axis=1)
    if COUNT >= 256:
        x = tl.sum(tl.reshape(x, (128, 2)), axis=1)
    if COUNT >= 128:
        x = tl.sum(tl.reshape(x, (64, 2)), axis=1)
    if COUNT >= 64:
        x = tl.sum(tl.reshape(x, (32, 2)), axis=1)
    if COUNT >= 32:
        x = tl.sum(tl.reshape(x, (16, 2)), axis=1)
    if COUNT >= 16:
        x = tl.sum(tl.reshape(x, (8, 2)), axis=1)
    if COUNT >= 8:
        x = tl.sum(tl.reshape(x, (4, 2)), axis=1)
    if COUNT >= 4:
        x = tl.sum(tl.reshape(x, (2, 2)), axis=1)
    return tl.sum(x, axis=0)


@triton.jit
def chunk_sums(
    owners,
    firsts,
    sizes,
    tensors,
    sums,
    TYPE: tl.constexpr,
    ALIGNED: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Store the sum of squares of this program's chunk of CHUNK elements.

    CHUNK is 1024 times a power of two, so that the sums of chunks can be added in pairs.
    """
    tensor, start, count = located(owners, firsts, sizes, None, CHUNK)
    pointer = place(tensors, tensor, start, TYPE, ALIGNED)
    even = even_count(count, ALIGNED)
    total = tl.full((), 0.0, tl.float64)
    if count == CHUNK:
        total = _chunk_sum(pointer, count, CHUNK // 1024, False)
    if ALIGNED:
        if (count < CHUNK) & (even > 0):
            total = _chunk_sum(pointer, even, CHUNK // 1024, True)
    if (count < CHUNK) & (even == 0):
        total = _chunk_sum(pointer, count, CHUNK // 1024, True)
    tl.store(sums + tl.program_id(0), total)


@triton.jit
def _chunk_sum(pointer, count, BLOCKS: tl.constexpr, MASKED: tl.constexpr):
    offsets = tl.arange(0, BLOCKS)[:, None] * 1024 + tl.arange(0, 128)[None, :]
    total = tl.zeros((BLOCKS, 128), tl.float64)
    for row in tl.static_range(8):
        value = widened(fetch(pointer, offsets + row * 128, count, MASKED)).to(tl.float64)
        total += value * value
    return pairs_added(lanes_added(total, BLOCKS), BLOCKS)


@triton.jit
def run_sums(
    owners, firsts, starts, counts, sums, results, COLUMNS: tl.constexpr, RUN: tl.constexpr
):
    """Add up to RUN rows of ``sums`` that belong to one tensor, and store one sum per column."""
    program = tl.program_id(0)
    tensor = tl.load(owners + program)
    at = (program - tl.load(firsts + tensor)) * RUN
    inside = at + tl.arange(0, RUN) < tl.load(counts + tensor)
    rows = tl.load(starts + tensor) + at + tl.arange(0, RUN)
    for column in tl.static_range(COLUMNS):
        values = tl.load(sums + rows.to(tl.int64) * COLUMNS + column, mask=inside, other=0.0)
        tl.store(results + program.to(tl.int64) * COLUMNS + column, pairs_added(values, RUN))
