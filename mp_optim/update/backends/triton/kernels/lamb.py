"""LAMB in two kernels: moments and sums, then the step with a ratio for each tensor."""

import triton
import triton.language as tl

from mp_optim.update.backends.triton.kernels.formats import (
    BLOCK,
    Tile,
    read_main,
    read_moment,
    write_main,
    write_moment,
)
from mp_optim.update.backends.triton.kernels.rules import denominator
from mp_optim.update.backends.triton.kernels.sums import lanes_added, pairs_added
from mp_optim.update.backends.triton.kernels.tiles import (
    each_tile,
    gradient,
    located_in_tile,
    words_of,
)


@triton.jit
def direction(p, m, v, scalars, FLAGS: tl.constexpr):
    """u = (m * (1/bias1)) / denominator + decay * p."""
    eps, inv_bias1, inv_sqrt_bias2, decay = scalars[4:8]
    u = tl.div_rn(m * inv_bias1, denominator(v, eps, inv_sqrt_bias2))
    if FLAGS.has_decay:
        u = u + p * decay
    return u


@triton.jit
def rows_added(total, value, tile, ROWS: tl.constexpr):
    """The sums so far, shape (ROWS, 128), plus the squares of two more rows of 128, one after the
    other."""
    if tile.masked:
        value = tl.where(tile.offsets < tile.count, value, 0.0)
    square = value.to(tl.float64)
    square = square * square
    upper, lower = tl.split(tl.permute(tl.reshape(square, (ROWS, 2, 128)), (0, 2, 1)))
    return (total + upper) + lower


@triton.jit
def lamb_moments(chunk, FLAGS: tl.constexpr, CHUNK: tl.constexpr, ROWS: tl.constexpr):
    """Update the moments; each program stores the sums of p^2 and u^2 of its chunk in ``made``."""
    if chunk.count == CHUNK:
        p_sum, u_sum = _moments_chunk(chunk, FLAGS, CHUNK // 1024, False)
    else:
        p_sum, u_sum = _moments_chunk(chunk, FLAGS, CHUNK // 1024, True)
    tl.store(chunk.made + 2 * tl.program_id(0).to(tl.int64), p_sum)
    tl.store(chunk.made + 2 * tl.program_id(0).to(tl.int64) + 1, u_sum)


@triton.jit
def _moments_chunk(chunk, FLAGS: tl.constexpr, BLOCKS: tl.constexpr, MASKED: tl.constexpr):
    """Two rows of 128 of each block of 1024 at a time, so that its eight rows are added in
    order."""
    beta1, grad_weight, beta2, one_minus_beta2 = chunk.scalars[:4]
    p_sums = tl.zeros((BLOCKS, 128), tl.float64)
    u_sums = tl.zeros((BLOCKS, 128), tl.float64)
    for at in range(0, 1024, BLOCK):
        blocks, offsets = located_in_tile(at, BLOCKS, 1024)
        tile = Tile(blocks, offsets, chunk.count, words_of(chunk, offsets), MASKED)
        p = read_main(chunk.main, chunk.rest, tile)
        g = gradient(chunk, p, tile, chunk.scalars[8], FLAGS.has_l2)
        m = read_moment(chunk.first, tile, False)
        v = read_moment(chunk.second, tile, True)
        m = m * beta1 + g * grad_weight
        v = v * beta2 + (g * one_minus_beta2) * g
        m = write_moment(m, chunk.first, tile, False)
        v = write_moment(v, chunk.second, tile, True)
        u = direction(p, m, v, chunk.scalars, FLAGS)
        p_sums = rows_added(p_sums, p, tile, BLOCKS)
        u_sums = rows_added(u_sums, u, tile, BLOCKS)
    p_sum = pairs_added(lanes_added(p_sums, BLOCKS), BLOCKS)
    return p_sum, pairs_added(lanes_added(u_sums, BLOCKS), BLOCKS)


@triton.jit
def lamb_apply(chunk, FLAGS: tl.constexpr, CHUNK: tl.constexpr, ROWS: tl.constexpr):
    """Take the step, with the ratios that are ``made``."""
    each_tile(_apply_tile, chunk, tl.load(chunk.made + chunk.tensor), FLAGS, ROWS)


@triton.jit
def _apply_tile(tile, chunk, ratio, FLAGS: tl.constexpr):
    p = read_main(chunk.main, chunk.rest, tile)
    m = read_moment(chunk.first, tile, False)
    v = read_moment(chunk.second, tile, True)
    u = direction(p, m, v, chunk.scalars, FLAGS)
    p = p - u * ratio
    write_main(p, chunk, tile)
