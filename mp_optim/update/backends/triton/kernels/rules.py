"""Rules that step each element by itself, each with what it does to a tile: a kernel is called like
its rule, and its scalars come in the order of its class in ``update/element_rules.py``."""

import triton
import triton.language as tl

from mp_optim.update.backends.triton.kernels.formats import (
    bounded,
    is_finite,
    read_main,
    read_moment,
    write_main,
    write_moment,
)
from mp_optim.update.backends.triton.kernels.tiles import (
    cautious,
    decayed,
    each_tile,
    gradient,
    scale_of_cautious,
)


@triton.jit
def denominator(v, eps, inv_sqrt_bias2):
    """sqrt(v) * (1/sqrt(bias2)) + eps."""
    return tl.sqrt_rn(v) * inv_sqrt_bias2 + eps


@triton.jit
def adam(chunk, FLAGS: tl.constexpr, CHUNK: tl.constexpr, ROWS: tl.constexpr):
    each_tile(_adam_tile, chunk, scale_of_cautious(chunk, FLAGS), FLAGS, ROWS)


@triton.jit
def _adam_tile(tile, chunk, scale, FLAGS: tl.constexpr):
    adam_step(tile, chunk, chunk.scalars[5], chunk.scalars[7], chunk.scalars[8], scale, FLAGS)


@triton.jit
def adam_step(tile, chunk, step_size, decay, l2, scale, FLAGS: tl.constexpr):
    beta1, one_minus_beta1, beta2, one_minus_beta2, eps = chunk.scalars[:5]
    inv_sqrt_bias2 = chunk.scalars[6]
    p = read_main(chunk.main, chunk.rest, tile)
    g = gradient(chunk, p, tile, l2, FLAGS.has_l2)
    m = g
    if chunk.first.stored is not None:
        m = read_moment(chunk.first, tile, False)
        m = m * beta1 + g * one_minus_beta1
    v = read_moment(chunk.second, tile, True)
    v = v * beta2 + (g * one_minus_beta2) * g
    u = tl.div_rn(m, denominator(v, eps, inv_sqrt_bias2)) * step_size
    u = cautious(u, m, g, scale, FLAGS)
    p = decayed(p, u, decay, FLAGS)
    p = p - u
    if chunk.first.stored is not None:
        write_moment(m, chunk.first, tile, False)
    write_moment(v, chunk.second, tile, True)
    write_main(p, chunk, tile)


@triton.jit
def ademamix(chunk, FLAGS: tl.constexpr, CHUNK: tl.constexpr, ROWS: tl.constexpr):
    each_tile(_ademamix_tile, chunk, scale_of_cautious(chunk, FLAGS), FLAGS, ROWS)


@triton.jit
def _ademamix_tile(tile, chunk, scale, FLAGS: tl.constexpr):
    beta2, one_minus_beta2 = chunk.scalars[2:4]
    eps, lr, _, inv_sqrt_bias2, decay = chunk.scalars[7:12]
    p = read_main(chunk.main, chunk.rest, tile)
    g = gradient(chunk, p, tile, decay, False)
    m = _first_average(tile, chunk, g)
    slow = _slow_average(tile, chunk, g)
    v = read_moment(chunk.second, tile, True)
    v = v * beta2 + (g * one_minus_beta2) * g
    blend = _blended(m, slow, chunk.scalars)
    u = tl.div_rn(blend, denominator(v, eps, inv_sqrt_bias2)) * lr
    u = cautious(u, blend, g, scale, FLAGS)
    p = decayed(p, u, decay, FLAGS)
    p = p - u
    if chunk.first.stored is not None:
        write_moment(m, chunk.first, tile, False)
    write_moment(slow, chunk.third, tile, False)
    write_moment(v, chunk.second, tile, True)
    write_main(p, chunk, tile)


@triton.jit
def _first_average(tile, chunk, g):
    m = g
    if chunk.first.stored is not None:
        m = read_moment(chunk.first, tile, False)
        m = m * chunk.scalars[0] + g * chunk.scalars[1]
    return m


@triton.jit
def _slow_average(tile, chunk, g):
    slow = read_moment(chunk.third, tile, False)
    return slow * chunk.scalars[4] + g * chunk.scalars[5]


@triton.jit
def _blended(m, slow, scalars):
    """m * (1/bias1) + slow * alpha, which does not overflow where both are finite."""
    alpha, inv_bias1 = scalars[6], scalars[9]
    blend = bounded(m * inv_bias1, is_finite(m)) + bounded(slow * alpha, is_finite(slow))
    return bounded(blend, is_finite(m) & is_finite(slow))


@triton.jit
def way_of(tile, chunk, g):
    """Where a cautious step goes: the sign of each element is that of its direction. By the first
    moment, which all rules average by their first two scalars; with a third one, which AdEMAMix
    alone has, by its blend of both."""
    way = _first_average(tile, chunk, g)
    if chunk.third.stored is not None:
        way = _blended(way, _slow_average(tile, chunk, g), chunk.scalars)
    return way


@triton.jit
def sgd(chunk, FLAGS: tl.constexpr, CHUNK: tl.constexpr, ROWS: tl.constexpr):
    each_tile(_sgd_tile, chunk, None, FLAGS, ROWS)


@triton.jit
def _sgd_tile(tile, chunk, ratio, FLAGS: tl.constexpr):
    lr, momentum, one_minus_dampening, decay = chunk.scalars[:4]
    p = read_main(chunk.main, chunk.rest, tile)
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
    each_tile(_lion_tile, chunk, scale_of_cautious(chunk, FLAGS), FLAGS, ROWS)


@triton.jit
def _lion_tile(tile, chunk, scale, FLAGS: tl.constexpr):
    beta1, one_minus_beta1, beta2, one_minus_beta2, lr, decay = chunk.scalars[:6]
    p = read_main(chunk.main, chunk.rest, tile)
    g = gradient(chunk, p, tile, decay, False)
    m = read_moment(chunk.first, tile, False)
    blend = m * beta1 + g * one_minus_beta1
    zero_or_nan = tl.where(blend == 0.0, 0.0, blend)
    sign = tl.where(blend > 0.0, 1.0, tl.where(blend < 0.0, -1.0, zero_or_nan))
    u = cautious(sign * lr, blend, g, scale, FLAGS)
    p = decayed(p, u, decay, FLAGS)
    p = p - u
    m = m * beta2 + g * one_minus_beta2
    write_moment(m, chunk.first, tile, False)
    write_main(p, chunk, tile)
