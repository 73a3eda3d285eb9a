"""Adam, SGD and Lion: one kernel each, one tile function under it. Whole tiles are read and written
without masks, so that their accesses can be wide; the rest of a tensor is one masked tile.
"""

import triton
import triton.language as tl

from mp_optim.update.backends.triton.kernels.formats import (
    BLOCK,
    place,
    random_words,
    read_main,
    read_moment,
    write_main,
    write_moment,
)
from mp_optim.update.backends.triton.kernels.tiles import (
    factor,
    gradient,
    located,
    number,
    tile,
)


@triton.jit
def denominator(v, eps, inv_sqrt_bias2):
    """sqrt(v) * (1/sqrt(bias2)) + eps."""
    return tl.sqrt_rn(v) * inv_sqrt_bias2 + eps


@triton.jit
def adam(owners, firsts, sizes, streams, numbers, multiplier, skip, grads, mains, rests, moments1,
         moments2, scales1, scales2, outputs, HAS_DECAY: tl.constexpr, HAS_L2: tl.constexpr,
         GRAD: tl.constexpr, MAIN: tl.constexpr, REMAINDER: tl.constexpr, MOMENT1: tl.constexpr,
         MOMENT2: tl.constexpr, OUTPUT: tl.constexpr, NOISY: tl.constexpr, ON_DEVICE: tl.constexpr,
         ALIGNED: tl.constexpr, CHUNK: tl.constexpr, ROWS: tl.constexpr):
    tensor, start, count = located(owners, firsts, sizes, skip, CHUNK)
    seed = tl.load(numbers)
    beta1 = number(numbers, 1)
    one_minus_beta1 = number(numbers, 2)
    beta2 = number(numbers, 3)
    one_minus_beta2 = number(numbers, 4)
    eps = number(numbers, 5)
    step_size = number(numbers, 6)
    inv_sqrt_bias2 = number(numbers, 7)
    decay = number(numbers, 8)
    l2 = number(numbers, 9)
    scale = factor(multiplier, ON_DEVICE)
    grad = place(grads, tensor, start, GRAD, ALIGNED)
    main = place(mains, tensor, start, MAIN, ALIGNED)
    rest = place(rests, tensor, start, REMAINDER, ALIGNED)
    first = place(moments1, tensor, start, MOMENT1, ALIGNED)
    second = place(moments2, tensor, start, MOMENT2, ALIGNED)
    scale1 = place(scales1, tensor, start // BLOCK, tl.float32, False)
    scale2 = place(scales2, tensor, start // BLOCK, tl.float32, False)
    output = place(outputs, tensor, start, OUTPUT, ALIGNED)
    whole = count // (ROWS * BLOCK) * (ROWS * BLOCK)
    for at in range(0, whole, ROWS * BLOCK):
        _adam_tile(at, count, start, tensor, streams, seed, scale, grad, main, rest, first, second,
                   scale1, scale2, output, beta1, one_minus_beta1, beta2, one_minus_beta2, eps,
                   step_size, inv_sqrt_bias2, decay, l2, HAS_DECAY, HAS_L2, GRAD, REMAINDER,
                   MOMENT1,
                   MOMENT2, OUTPUT, NOISY, ROWS, False)
    if whole < count:
        _adam_tile(whole, count, start, tensor, streams, seed, scale, grad, main, rest, first,
                   second, scale1, scale2, output, beta1, one_minus_beta1, beta2, one_minus_beta2,
                   eps, step_size, inv_sqrt_bias2, decay, l2, HAS_DECAY, HAS_L2, GRAD, REMAINDER,
                   MOMENT1, MOMENT2, OUTPUT, NOISY, ROWS, True)


@triton.jit
def _adam_tile(at, count, start, tensor, streams, seed, multiplier, grad, main, rest, first, second,
               scale1, scale2, output, beta1, one_minus_beta1, beta2, one_minus_beta2, eps,
               step_size, inv_sqrt_bias2, decay, l2, HAS_DECAY: tl.constexpr, HAS_L2: tl.constexpr,
               GRAD: tl.constexpr, REMAINDER: tl.constexpr, MOMENT1: tl.constexpr,
               MOMENT2: tl.constexpr,
               OUTPUT: tl.constexpr, NOISY: tl.constexpr, ROWS: tl.constexpr, MASKED: tl.constexpr):
    blocks, offsets = tile(at, ROWS, BLOCK)
    words = random_words(streams, tensor, seed, start, offsets, NOISY)
    p = read_main(main, rest, offsets, count, REMAINDER, MASKED)
    g = gradient(grad, p, offsets, count, multiplier, l2, GRAD, HAS_L2, MASKED)
    m = read_moment(first, scale1, blocks, offsets, count, MOMENT1, False, MASKED)
    v = read_moment(second, scale2, blocks, offsets, count, MOMENT2, True, MASKED)
    m = m * beta1 + g * one_minus_beta1
    v = v * beta2 + (g * one_minus_beta2) * g
    u = tl.div_rn(m, denominator(v, eps, inv_sqrt_bias2)) * step_size
    if HAS_DECAY:
        p = p - p * decay
    p = p - u
    write_moment(m, first, scale1, blocks, offsets, count, words, MOMENT1, False, NOISY, MASKED)
    write_moment(v, second, scale2, blocks, offsets, count, words, MOMENT2, True, NOISY, MASKED)
    write_main(p, main, rest, output, offsets, count, words, REMAINDER, OUTPUT, NOISY, MASKED)


@triton.jit
def sgd(owners, firsts, sizes, streams, numbers, multiplier, skip, grads, mains, rests, moments1,
        moments2, scales1, scales2, outputs, HAS_DECAY: tl.constexpr, NESTEROV: tl.constexpr,
        FIRST: tl.constexpr, GRAD: tl.constexpr, MAIN: tl.constexpr, REMAINDER: tl.constexpr,
        MOMENT1: tl.constexpr, MOMENT2: tl.constexpr, OUTPUT: tl.constexpr, NOISY: tl.constexpr,
        ON_DEVICE: tl.constexpr, ALIGNED: tl.constexpr, CHUNK: tl.constexpr, ROWS: tl.constexpr):
    tensor, start, count = located(owners, firsts, sizes, skip, CHUNK)
    seed = tl.load(numbers)
    lr = number(numbers, 1)
    momentum = number(numbers, 2)
    one_minus_dampening = number(numbers, 3)
    decay = number(numbers, 4)
    scale = factor(multiplier, ON_DEVICE)
    grad = place(grads, tensor, start, GRAD, ALIGNED)
    main = place(mains, tensor, start, MAIN, ALIGNED)
    rest = place(rests, tensor, start, REMAINDER, ALIGNED)
    first = place(moments1, tensor, start, MOMENT1, ALIGNED)
    scale1 = place(scales1, tensor, start // BLOCK, tl.float32, False)
    output = place(outputs, tensor, start, OUTPUT, ALIGNED)
    whole = count // (ROWS * BLOCK) * (ROWS * BLOCK)
    for at in range(0, whole, ROWS * BLOCK):
        _sgd_tile(at, count, start, tensor, streams, seed, scale, grad, main, rest, first, scale1,
                  output, lr, momentum, one_minus_dampening, decay, HAS_DECAY, NESTEROV, FIRST,
                  GRAD, REMAINDER, MOMENT1, OUTPUT, NOISY, ROWS, False)
    if whole < count:
        _sgd_tile(whole, count, start, tensor, streams, seed, scale, grad, main, rest, first,
                  scale1, output, lr, momentum, one_minus_dampening, decay, HAS_DECAY, NESTEROV,
                  FIRST, GRAD, REMAINDER, MOMENT1, OUTPUT, NOISY, ROWS, True)


@triton.jit
def _sgd_tile(at, count, start, tensor, streams, seed, multiplier, grad, main, rest, first, scale1,
              output, lr, momentum, one_minus_dampening, decay, HAS_DECAY: tl.constexpr,
              NESTEROV: tl.constexpr, FIRST: tl.constexpr, GRAD: tl.constexpr,
              REMAINDER: tl.constexpr,
              MOMENT1: tl.constexpr, OUTPUT: tl.constexpr, NOISY: tl.constexpr, ROWS: tl.constexpr,
              MASKED: tl.constexpr):
    blocks, offsets = tile(at, ROWS, BLOCK)
    words = random_words(streams, tensor, seed, start, offsets, NOISY)
    p = read_main(main, rest, offsets, count, REMAINDER, MASKED)
    g = gradient(grad, p, offsets, count, multiplier, decay, GRAD, HAS_DECAY, MASKED)
    if first is not None:
        if FIRST:
            b = g
        else:
            b = read_moment(first, scale1, blocks, offsets, count, MOMENT1, False, MASKED)
            b = b * momentum + g * one_minus_dampening
        write_moment(b, first, scale1, blocks, offsets, count, words, MOMENT1, False, NOISY, MASKED)
        if NESTEROV:
            g = g + b * momentum
        else:
            g = b
    p = p - g * lr
    write_main(p, main, rest, output, offsets, count, words, REMAINDER, OUTPUT, NOISY, MASKED)


@triton.jit
def lion(owners, firsts, sizes, streams, numbers, multiplier, skip, grads, mains, rests, moments1,
         moments2, scales1, scales2, outputs, HAS_DECAY: tl.constexpr, GRAD: tl.constexpr,
         MAIN: tl.constexpr, REMAINDER: tl.constexpr, MOMENT1: tl.constexpr, MOMENT2: tl.constexpr,
         OUTPUT: tl.constexpr, NOISY: tl.constexpr, ON_DEVICE: tl.constexpr, ALIGNED: tl.constexpr,
         CHUNK: tl.constexpr, ROWS: tl.constexpr):
    tensor, start, count = located(owners, firsts, sizes, skip, CHUNK)
    seed = tl.load(numbers)
    beta1 = number(numbers, 1)
    one_minus_beta1 = number(numbers, 2)
    beta2 = number(numbers, 3)
    one_minus_beta2 = number(numbers, 4)
    lr = number(numbers, 5)
    decay = number(numbers, 6)
    scale = factor(multiplier, ON_DEVICE)
    grad = place(grads, tensor, start, GRAD, ALIGNED)
    main = place(mains, tensor, start, MAIN, ALIGNED)
    rest = place(rests, tensor, start, REMAINDER, ALIGNED)
    first = place(moments1, tensor, start, MOMENT1, ALIGNED)
    scale1 = place(scales1, tensor, start // BLOCK, tl.float32, False)
    output = place(outputs, tensor, start, OUTPUT, ALIGNED)
    whole = count // (ROWS * BLOCK) * (ROWS * BLOCK)
    for at in range(0, whole, ROWS * BLOCK):
        _lion_tile(at, count, start, tensor, streams, seed, scale, grad, main, rest, first, scale1,
                   output, beta1, one_minus_beta1, beta2, one_minus_beta2, lr, decay, HAS_DECAY,
                   GRAD, REMAINDER, MOMENT1, OUTPUT, NOISY, ROWS, False)
    if whole < count:
        _lion_tile(whole, count, start, tensor, streams, seed, scale, grad, main, rest, first,
                   scale1, output, beta1, one_minus_beta1, beta2, one_minus_beta2, lr, decay,
                   HAS_DECAY, GRAD, REMAINDER, MOMENT1, OUTPUT, NOISY, ROWS, True)


@triton.jit
def _lion_tile(at, count, start, tensor, streams, seed, multiplier, grad, main, rest, first, scale1,
               output, beta1, one_minus_beta1, beta2, one_minus_beta2, lr, decay,
               HAS_DECAY: tl.constexpr, GRAD: tl.constexpr, REMAINDER: tl.constexpr,
               MOMENT1: tl.constexpr, OUTPUT: tl.constexpr, NOISY: tl.constexpr, ROWS: tl.constexpr,
               MASKED: tl.constexpr):
    blocks, offsets = tile(at, ROWS, BLOCK)
    words = random_words(streams, tensor, seed, start, offsets, NOISY)
    p = read_main(main, rest, offsets, count, REMAINDER, MASKED)
    g = gradient(grad, p, offsets, count, multiplier, decay, GRAD, False, MASKED)
    m = read_moment(first, scale1, blocks, offsets, count, MOMENT1, False, MASKED)
    blend = m * beta1 + g * one_minus_beta1
    zero_or_nan = tl.where(blend == 0.0, 0.0, blend)
    sign = tl.where(blend > 0.0, 1.0, tl.where(blend < 0.0, -1.0, zero_or_nan))
    if HAS_DECAY:
        p = p - p * decay
    p = p - sign * lr
    m = m * beta2 + g * one_minus_beta2
    write_moment(m, first, scale1, blocks, offsets, count, words, MOMENT1, False, NOISY, MASKED)
    write_main(p, main, rest, output, offsets, count, words, REMAINDER, OUTPUT, NOISY, MASKED)
