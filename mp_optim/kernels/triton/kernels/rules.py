"""Rules that step each element independently, as functions that step a tile.

A function has the name of its rule. Scalars have the order of the rule's class in
``kernels/kernel_args.py``.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from mp_optim.kernels.triton.kernels.formats import (
    bounded,
    is_finite,
    read_main,
    read_moment,
    write_main,
    write_moment,
)
from mp_optim.kernels.triton.kernels.tiles import decayed, each_tile, gradient


class AdamNumbers(NamedTuple):
    """The FP32 fields of ``AdamScalars``."""

    beta1: Any
    one_minus_beta1: Any
    beta2: Any
    one_minus_beta2: Any
    eps: Any
    step_size: Any
    inv_sqrt_bias2: Any
    decay: Any
    l2: Any


@triton.jit
def denominator(v, eps, inv_sqrt_bias2):
    """Return sqrt(v) * (1/sqrt(bias2)) + eps."""
    return tl.sqrt_rn(v) * inv_sqrt_bias2 + eps


@triton.jit
def adam(chunk, FLAGS: tl.constexpr, CHUNK: tl.constexpr, ROWS: tl.constexpr):
    each_tile(_adam_tile, chunk, None, FLAGS, ROWS)


@triton.jit
def _adam_tile(tile, chunk, per_tensor, FLAGS: tl.constexpr):
    s = AdamNumbers(*chunk.scalars[:9])
    p = read_main(chunk, tile, FLAGS.follows)
    g = gradient(chunk, p, tile, s.l2, FLAGS.has_l2)
    m = read_moment(chunk.first, tile, False)
    m = m * s.beta1 + g * s.one_minus_beta1
    v = read_moment(chunk.second, tile, True)
    v = v * s.beta2 + (g * s.one_minus_beta2) * g
    u = tl.div_rn(m, denominator(v, s.eps, s.inv_sqrt_bias2)) * s.step_size
    p = decayed(p, u, s.decay, FLAGS)
    p = p - u
    write_moment(m, chunk.first, tile, False)
    write_moment(v, chunk.second, tile, True)
    write_main(p, chunk, tile)


@triton.jit
def sgd(chunk, FLAGS: tl.constexpr, CHUNK: tl.constexpr, ROWS: tl.constexpr):
    each_tile(_sgd_tile, chunk, None, FLAGS, ROWS)


@triton.jit
def _sgd_tile(tile, chunk, per_tensor, FLAGS: tl.constexpr):
    lr, momentum, one_minus_dampening, decay = chunk.scalars[:4]
    p = read_main(chunk, tile, FLAGS.follows)
    g = gradient(chunk, p, tile, decay, FLAGS.has_decay)
    if chunk.first.stored is not None:
        if FLAGS.first:
            b = g
        else:
            b = read_moment(chunk.first, tile, False)
            b = bounded(b * momentum + g * one_minus_dampening, is_finite(g))
        write_moment(b, chunk.first, tile, False)
        if FLAGS.nesterov:
            g = g + b * momentum
        else:
            g = b
    p = p - g * lr
    write_main(p, chunk, tile)


@triton.jit
def lion(chunk, FLAGS: tl.constexpr, CHUNK: tl.constexpr, ROWS: tl.constexpr):
    each_tile(_lion_tile, chunk, None, FLAGS, ROWS)


@triton.jit
def _lion_tile(tile, chunk, per_tensor, FLAGS: tl.constexpr):
    beta1, one_minus_beta1, beta2, one_minus_beta2, lr, decay = chunk.scalars[:6]
    p = read_main(chunk, tile, FLAGS.follows)
    g = gradient(chunk, p, tile, decay, False)
    m = read_moment(chunk.first, tile, False)
    blend = m * beta1 + g * one_minus_beta1
    zero_or_nan = tl.where(blend == 0.0, 0.0, blend)
    sign = tl.where(blend > 0.0, 1.0, tl.where(blend < 0.0, -1.0, zero_or_nan))
    u = sign * lr
    p = decayed(p, u, decay, FLAGS)
    p = p - u
    m = m * beta2 + g * one_minus_beta2
    write_moment(m, chunk.first, tile, False)
    write_main(p, chunk, tile)
