"""Muon in two kernels, before and after the products of matrices."""

import triton
import triton.language as tl

from mp_optim.update.backends.triton.kernels.formats import (
    narrowed,
    put,
    read_main,
    read_moment,
    write_main,
    write_moment,
)
from mp_optim.update.backends.triton.kernels.tiles import each_tile, gradient


@triton.jit
def blended(start, end, weight, FROM_END: tl.constexpr):
    """One of two values plus a multiple of their difference: product and sum in FP64, rounded
    once."""
    change = (end - start).to(tl.float64) * weight.to(tl.float64)
    if FROM_END:
        value = end.to(tl.float64) + change
    else:
        value = start.to(tl.float64) + change
    return value.to(tl.float32)


@triton.jit
def muon_momentum(chunk, FLAGS: tl.constexpr, CHUNK: tl.constexpr, ROWS: tl.constexpr):
    each_tile(_momentum_tile, chunk, None, FLAGS, ROWS)


@triton.jit
def _momentum_tile(tile, chunk, ratio, FLAGS: tl.constexpr):
    average, ahead = chunk.scalars[:2]
    g = gradient(chunk, None, tile, 0.0, False)
    m = blended(read_moment(chunk.first, tile, False), g, average, FLAGS.average_from_end)
    if FLAGS.nesterov:
        u = blended(g, m, ahead, FLAGS.ahead_from_end)
    else:
        u = m
    write_moment(m, chunk.first, tile, False)
    raw = narrowed(u, chunk.output.dtype.element_ty)
    put(chunk.output, raw, tile.offsets, tile.count, tile.masked)


@triton.jit
def muon_apply(chunk, FLAGS: tl.constexpr, CHUNK: tl.constexpr, ROWS: tl.constexpr):
    """Take the step, with the factors that are ``made``."""
    each_tile(_apply_tile, chunk, tl.load(chunk.made + chunk.tensor), FLAGS, ROWS)


@triton.jit
def _apply_tile(tile, chunk, ratio, FLAGS: tl.constexpr):
    p = read_main(chunk.main, chunk.rest, tile)
    u = gradient(chunk, p, tile, 0.0, False)
    if FLAGS.has_decay:
        p = p - p * chunk.scalars[2]
    p = p - u * ratio
    write_main(p, chunk, tile)
