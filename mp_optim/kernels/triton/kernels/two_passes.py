"""Rules with two kernels: LAMB (moments and sums, then the step with each tensor's ratio), and Muon
(before and after the matrix products)."""

import triton
import triton.language as tl

from mp_optim.kernels.triton.kernels.formats import (
    BLOCK,
    Tile,
    bounded,
    is_finite,
    narrowed,
    put_tile,
    read_main,
    read_moment,
    write_main,
    write_moment,
)
from mp_optim.kernels.triton.kernels.rules import denominator
from mp_optim.kernels.triton.kernels.sums import lanes_added, pairs_added
from mp_optim.kernels.triton.kernels.tiles import (
    decayed,
    each_tile,
    gradient,
    located_in_tile,
    words_of,
)

# -- LAMB -----------------------------------------------------------------------------------------


@triton.jit
def direction(p, m, v, scalars, FLAGS: tl.constexpr):
    """Return u = (m * (1/bias1)) / denominator + decay * p."""
    _, _, _, _, eps, inv_bias1, inv_sqrt_bias2, decay = scalars[:8]
    u = tl.div_rn(bounded(m * inv_bias1, is_finite(m)), denominator(v, eps, inv_sqrt_bias2))
    if FLAGS.has_decay:
        u = u + p * decay
    return u


@triton.jit
def rows_added(total, value, tile, ROWS: tl.constexpr):
    """Add the squares of two rows of 128 values, one row after the other, to the sums so far.

    Args:
        total: FP64 sums, shape (ROWS, 128).
        value: FP32 values, shape (ROWS, 256): two rows for each sum.
    """
    if tile.masked:
        value = tl.where(tile.inside, value, 0.0)
    square = value.to(tl.float64)
    square = square * square
    upper, lower = tl.split(tl.permute(tl.reshape(square, (ROWS, 2, 128)), (0, 2, 1)))
    return (total + upper) + lower


@triton.jit
def lamb_moments(chunk, FLAGS: tl.constexpr, CHUNK: tl.constexpr, ROWS: tl.constexpr):
    """Update LAMB's moments, and store the sums of p^2 and u^2 of this program's chunk in the table
    ``chunk.made``."""
    if chunk.count == CHUNK:
        p_sum, u_sum = _moments_chunk(chunk, FLAGS, CHUNK // 1024, False)
    else:
        p_sum, u_sum = _moments_chunk(chunk, FLAGS, CHUNK // 1024, True)
    tl.store(chunk.made + 2 * tl.program_id(0).to(tl.int64), p_sum)
    tl.store(chunk.made + 2 * tl.program_id(0).to(tl.int64) + 1, u_sum)


@triton.jit
def _moments_chunk(chunk, FLAGS: tl.constexpr, BLOCKS: tl.constexpr, MASKED: tl.constexpr):
    """Step two rows of 128 of each block of 1024 together, so that the block's eight rows are added
    in order."""
    beta1, grad_weight, beta2, one_minus_beta2, _, _, _, _, l2 = chunk.scalars[:9]
    p_sums = tl.zeros((BLOCKS, 128), tl.float64)
    u_sums = tl.zeros((BLOCKS, 128), tl.float64)
    for at in range(0, 1024, BLOCK):
        blocks, offsets, inside = located_in_tile(at, chunk.count, BLOCKS, 1024, chunk.run)
        words = words_of(chunk, offsets)
        tile = Tile(blocks, offsets, chunk.count, inside, MASKED, words)
        p = read_main(chunk, tile, FLAGS.follows)
        g = gradient(chunk, p, tile, l2, FLAGS.has_l2)
        m = read_moment(chunk.first, tile, False)
        v = read_moment(chunk.second, tile, True)
        m = bounded(m * beta1 + g * grad_weight, is_finite(g))
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
    """Step the main params by LAMB, with each tensor's ratio in ``chunk.made``."""
    each_tile(_lamb_tile, chunk, tl.load(chunk.made + chunk.tensor), FLAGS, ROWS)


@triton.jit
def _lamb_tile(tile, chunk, ratio, FLAGS: tl.constexpr):
    p = read_main(chunk, tile, FLAGS.follows)
    m = read_moment(chunk.first, tile, False)
    v = read_moment(chunk.second, tile, True)
    u = direction(p, m, v, chunk.scalars, FLAGS)
    p = p - u * ratio
    write_main(p, chunk, tile)


# -- Muon -----------------------------------------------------------------------------------------


@triton.jit
def blended(start, end, weight, FROM_END: tl.constexpr):
    """Return ``start`` plus a multiple of ``end - start``, computed in FP64 and rounded once.

    Overflows of finite values are clamped.
    """
    change = bounded(end - start, is_finite(start) & is_finite(end))
    change = change.to(tl.float64) * weight.to(tl.float64)
    if FROM_END:
        value = end.to(tl.float64) + change
    else:
        value = start.to(tl.float64) + change
    return value.to(tl.float32)


@triton.jit
def muon_momentum(chunk, FLAGS: tl.constexpr, CHUNK: tl.constexpr, ROWS: tl.constexpr):
    each_tile(_momentum_tile, chunk, None, FLAGS, ROWS)


@triton.jit
def _momentum_tile(tile, chunk, per_tensor, FLAGS: tl.constexpr):
    average, ahead = chunk.scalars[:2]
    g = gradient(chunk, None, tile, 0.0, False)
    m = blended(read_moment(chunk.first, tile, False), g, average, FLAGS.average_from_end)
    if FLAGS.nesterov:
        u = blended(g, m, ahead, FLAGS.ahead_from_end)
    else:
        u = m
    write_moment(m, chunk.first, tile, False)
    raw = narrowed(u, chunk.output.dtype.element_ty)
    put_tile(chunk.output, raw, tile)


@triton.jit
def muon_apply(chunk, FLAGS: tl.constexpr, CHUNK: tl.constexpr, ROWS: tl.constexpr):
    """Step the main params by Muon, with each tensor's factor in ``chunk.made``."""
    each_tile(_muon_tile, chunk, tl.load(chunk.made + chunk.tensor), FLAGS, ROWS)


@triton.jit
def _muon_tile(tile, chunk, factor, FLAGS: tl.constexpr):
    p = read_main(chunk, tile, FLAGS.follows)
    _, _, decay = chunk.scalars[:3]
    u = gradient(chunk, p, tile, 0.0, False) * factor
    p = decayed(p, u, decay, FLAGS)
    p = p - u
    write_main(p, chunk, tile)
