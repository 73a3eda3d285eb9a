"""StableAdamW in two kernels: squared gradients over second moments, then AdamW with a
step size and a decay for each tensor."""

import triton
import triton.language as tl

from mp_optim.update.backends.triton.kernels.formats import BLOCK, Tile, read_moment
from mp_optim.update.backends.triton.kernels.rules import adam_step
from mp_optim.update.backends.triton.kernels.tiles import (
    each_tile,
    gradient,
    located_in_tile,
)

MAGIC = tl.constexpr(2.0**52)  # adding and subtracting it rounds FP64 to whole numbers


@triton.jit
def clip_sums(chunk, FLAGS: tl.constexpr, CHUNK: tl.constexpr, ROWS: tl.constexpr):
    """Each program stores the sum of its chunk in ``made``, as two whole numbers, and how many
    values are NaN."""
    high, low, nans = tl.full((), 0, tl.int64), tl.full((), 0, tl.int64), tl.full((), 0, tl.int64)
    whole = chunk.count // (ROWS * BLOCK) * (ROWS * BLOCK)
    for at in range(0, whole, ROWS * BLOCK):
        high, low, nans = _added(high, low, nans, at, chunk, ROWS, False)
    if whole < chunk.count:
        high, low, nans = _added(high, low, nans, whole, chunk, ROWS, True)
    to = chunk.made + 3 * tl.program_id(0).to(tl.int64)
    tl.store(to, high)
    tl.store(to + 1, low)
    tl.store(to + 2, nans)


@triton.jit
def _added(high, low, nans, at, chunk, ROWS: tl.constexpr, MASKED: tl.constexpr):
    """The sums so far, and those of a tile that begins at ``at``."""
    beta2, one_minus_beta2 = chunk.scalars[2:4]
    inv_bias2, floor, limit = chunk.scalars[5], chunk.scalars[7], chunk.scalars[8]
    blocks, offsets = located_in_tile(at, ROWS, BLOCK)
    tile = Tile(blocks, offsets, chunk.count, None, MASKED)
    g = gradient(chunk, None, tile, 0.0, False)
    v = read_moment(chunk.second, tile, True)
    v = v * beta2 + (g * one_minus_beta2) * g
    mean = v * inv_bias2
    square = g * g
    ratio = tl.div_rn(square, tl.where(mean < floor, floor, mean))
    overflown = (mean == float("inf")) & (square == float("inf")) & (tl.abs(g) < float("inf"))
    ratio = tl.where((ratio > limit) | overflown, limit, ratio)
    is_nan = ratio != ratio
    if MASKED:
        is_nan = is_nan & (offsets < chunk.count)
        ratio = tl.where(offsets < chunk.count, ratio, 0.0)
    y = tl.where(is_nan, 0.0, ratio).to(tl.float64) * (MAGIC / limit.to(tl.float64))
    units = ((y + MAGIC) - MAGIC).to(tl.int64)
    return (
        high + _total(units >> 31),
        low + _total(units & 0x7FFFFFFF),
        nans + _total(is_nan.to(tl.int64)),
    )


@triton.jit
def _total(x):
    return tl.sum(tl.sum(x, axis=1), axis=0)


@triton.jit
def clipped_adamw(chunk, FLAGS: tl.constexpr, CHUNK: tl.constexpr, ROWS: tl.constexpr):
    """Take the step, with the sizes and decays that are ``made``."""
    step_size = tl.load(chunk.made + 2 * chunk.tensor)
    decay = tl.load(chunk.made + 2 * chunk.tensor + 1)
    each_tile(_step_tile, chunk, (step_size, decay), FLAGS, ROWS)


@triton.jit
def _step_tile(tile, chunk, own, FLAGS: tl.constexpr):
    adam_step(tile, chunk, own[0], own[1], 0.0, FLAGS)
