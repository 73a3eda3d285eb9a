"""LAMB in two kernels: moments and sums, then the step with a ratio for each tensor."""

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
from mp_optim.update.backends.triton.kernels.rules import denominator
from mp_optim.update.backends.triton.kernels.sums import lanes_added, pairs_added
from mp_optim.update.backends.triton.kernels.tiles import (
    factor,
    gradient,
    located,
    number,
    tile,
)


@triton.jit
def direction(p, m, v, eps, inv_bias1, inv_sqrt_bias2, decay, HAS_DECAY: tl.constexpr):
    """u = (m * (1/bias1)) / denominator + decay * p."""
    u = tl.div_rn(m * inv_bias1, denominator(v, eps, inv_sqrt_bias2))
    if HAS_DECAY:
        u = u + p * decay
    return u


@triton.jit
def rows_added(total, value, offsets, count, ROWS: tl.constexpr, MASKED: tl.constexpr):
    """The sums so far, shape (ROWS, 128), plus the squares of two more rows of 128, one after the
    other."""
    if MASKED:
        value = tl.where(offsets < count, value, 0.0)
    square = value.to(tl.float64)
    square = square * square
    upper, lower = tl.split(tl.permute(tl.reshape(square, (ROWS, 2, 128)), (0, 2, 1)))
    return (total + upper) + lower


@triton.jit
def lamb_moments(owners, firsts, sizes, streams, numbers, multiplier, skip, grads, mains, rests,
                 moments1, moments2, scales1, scales2, outputs, sums, HAS_DECAY: tl.constexpr,
                 HAS_L2: tl.constexpr, GRAD: tl.constexpr, MAIN: tl.constexpr,
                 REMAINDER: tl.constexpr,
                 MOMENT1: tl.constexpr, MOMENT2: tl.constexpr, OUTPUT: tl.constexpr,
                 NOISY: tl.constexpr, ON_DEVICE: tl.constexpr, ALIGNED: tl.constexpr,
                 CHUNK: tl.constexpr, ROWS: tl.constexpr):
    """Update the moments; each program stores the sums of p^2 and u^2 of its chunk."""
    tensor, start, count = located(owners, firsts, sizes, skip, CHUNK)
    seed = tl.load(numbers)
    beta1 = number(numbers, 1)
    grad_weight = number(numbers, 2)
    beta2 = number(numbers, 3)
    one_minus_beta2 = number(numbers, 4)
    eps = number(numbers, 5)
    inv_bias1 = number(numbers, 6)
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
    if count == CHUNK:
        p_sum, u_sum = _moments_chunk( count, start, tensor, streams, seed, scale, grad, main, rest,
                                      first, second, scale1, scale2, beta1, grad_weight, beta2,
                                      one_minus_beta2, eps, inv_bias1, inv_sqrt_bias2, decay, l2,
                                      HAS_DECAY, HAS_L2, GRAD, REMAINDER, MOMENT1, MOMENT2, NOISY,
                                      CHUNK
                                      // 1024, False)
    else:
        p_sum, u_sum = _moments_chunk( count, start, tensor, streams, seed, scale, grad, main, rest,
                                      first, second, scale1, scale2, beta1, grad_weight, beta2,
                                      one_minus_beta2, eps, inv_bias1, inv_sqrt_bias2, decay, l2,
                                      HAS_DECAY, HAS_L2, GRAD, REMAINDER, MOMENT1, MOMENT2, NOISY,
                                      CHUNK
                                      // 1024, True)
    tl.store(sums + 2 * tl.program_id(0).to(tl.int64), p_sum)
    tl.store(sums + 2 * tl.program_id(0).to(tl.int64) + 1, u_sum)


@triton.jit
def _moments_chunk(count, start, tensor, streams, seed, multiplier, grad, main, rest, first, second,
                   scale1, scale2, beta1, grad_weight, beta2, one_minus_beta2, eps, inv_bias1,
                   inv_sqrt_bias2, decay, l2, HAS_DECAY: tl.constexpr, HAS_L2: tl.constexpr,
                   GRAD: tl.constexpr, REMAINDER: tl.constexpr, MOMENT1: tl.constexpr,
                   MOMENT2: tl.constexpr, NOISY: tl.constexpr, BLOCKS: tl.constexpr,
                   MASKED: tl.constexpr):
    """Two rows of 128 of each block of 1024 at a time, so that its eight rows are added in
    order."""
    p_sums = tl.zeros((BLOCKS, 128), tl.float64)
    u_sums = tl.zeros((BLOCKS, 128), tl.float64)
    for at in range(0, 1024, BLOCK):
        blocks, offsets = tile(at, BLOCKS, 1024)
        words = random_words(streams, tensor, seed, start, offsets, NOISY)
        p = read_main(main, rest, offsets, count, REMAINDER, MASKED)
        g = gradient(grad, p, offsets, count, multiplier, l2, GRAD, HAS_L2, MASKED)
        m = read_moment(first, scale1, blocks, offsets, count, MOMENT1, False, MASKED)
        v = read_moment(second, scale2, blocks, offsets, count, MOMENT2, True, MASKED)
        m = m * beta1 + g * grad_weight
        v = v * beta2 + (g * one_minus_beta2) * g
        m = write_moment(
            m, first, scale1, blocks, offsets, count, words, MOMENT1, False, NOISY, MASKED)
        v = write_moment(
            v, second, scale2, blocks, offsets, count, words, MOMENT2, True, NOISY, MASKED)
        u = direction(p, m, v, eps, inv_bias1, inv_sqrt_bias2, decay, HAS_DECAY)
        p_sums = rows_added(p_sums, p, offsets, count, BLOCKS, MASKED)
        u_sums = rows_added(u_sums, u, offsets, count, BLOCKS, MASKED)
    p_sum = pairs_added(lanes_added(p_sums, BLOCKS), BLOCKS)
    return p_sum, pairs_added(lanes_added(u_sums, BLOCKS), BLOCKS)


@triton.jit
def lamb_apply(owners, firsts, sizes, streams, numbers, multiplier, skip, grads, mains, rests,
               moments1, moments2, scales1, scales2, outputs, ratios, HAS_DECAY: tl.constexpr,
               GRAD: tl.constexpr, MAIN: tl.constexpr, REMAINDER: tl.constexpr,
               MOMENT1: tl.constexpr,
               MOMENT2: tl.constexpr, OUTPUT: tl.constexpr, NOISY: tl.constexpr,
               ON_DEVICE: tl.constexpr, ALIGNED: tl.constexpr, CHUNK: tl.constexpr,
               ROWS: tl.constexpr):
    """Take the step."""
    tensor, start, count = located(owners, firsts, sizes, skip, CHUNK)
    seed = tl.load(numbers)
    eps = number(numbers, 5)
    inv_bias1 = number(numbers, 6)
    inv_sqrt_bias2 = number(numbers, 7)
    decay = number(numbers, 8)
    ratio = tl.load(ratios + tensor)
    main = place(mains, tensor, start, MAIN, ALIGNED)
    rest = place(rests, tensor, start, REMAINDER, ALIGNED)
    first = place(moments1, tensor, start, MOMENT1, ALIGNED)
    second = place(moments2, tensor, start, MOMENT2, ALIGNED)
    scale1 = place(scales1, tensor, start // BLOCK, tl.float32, False)
    scale2 = place(scales2, tensor, start // BLOCK, tl.float32, False)
    output = place(outputs, tensor, start, OUTPUT, ALIGNED)
    whole = count // (ROWS * BLOCK) * (ROWS * BLOCK)
    for at in range(0, whole, ROWS * BLOCK):
        _apply_tile(at, count, start, tensor, streams, seed, ratio, main, rest, first, second,
                    scale1, scale2, output, eps, inv_bias1, inv_sqrt_bias2, decay, HAS_DECAY,
                    REMAINDER,
                    MOMENT1, MOMENT2, OUTPUT, NOISY, ROWS, False)
    if whole < count:
        _apply_tile(whole, count, start, tensor, streams, seed, ratio, main, rest, first, second,
                    scale1, scale2, output, eps, inv_bias1, inv_sqrt_bias2, decay, HAS_DECAY,
                    REMAINDER,
                    MOMENT1, MOMENT2, OUTPUT, NOISY, ROWS, True)


@triton.jit
def _apply_tile(at, count, start, tensor, streams, seed, ratio, main, rest, first, second, scale1,
                scale2, output, eps, inv_bias1, inv_sqrt_bias2, decay, HAS_DECAY: tl.constexpr,
                REMAINDER: tl.constexpr, MOMENT1: tl.constexpr, MOMENT2: tl.constexpr,
                OUTPUT: tl.constexpr, NOISY: tl.constexpr, ROWS: tl.constexpr,
                MASKED: tl.constexpr):
    blocks, offsets = tile(at, ROWS, BLOCK)
    words = random_words(streams, tensor, seed, start, offsets, NOISY)
    p = read_main(main, rest, offsets, count, REMAINDER, MASKED)
    m = read_moment(first, scale1, blocks, offsets, count, MOMENT1, False, MASKED)
    v = read_moment(second, scale2, blocks, offsets, count, MOMENT2, True, MASKED)
    u = direction(p, m, v, eps, inv_bias1, inv_sqrt_bias2, decay, HAS_DECAY)
    p = p - u * ratio
    write_main(p, main, rest, output, offsets, count, words, REMAINDER, OUTPUT, NOISY, MASKED)
