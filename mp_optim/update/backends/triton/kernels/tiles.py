"""What the kernels of all rules share: where a program works, and the elements of a tile."""

import triton
import triton.language as tl

from mp_optim.update.backends.triton.kernels.formats import BLOCK, fetch, widened


@triton.jit
def located(owners, firsts, sizes, skip, CHUNK: tl.constexpr):
    """This program's tensor, its first element there and its number of elements, which is 0 in a
    skipped step."""
    program = tl.program_id(0)
    tensor = tl.load(owners + program)
    start = (program - tl.load(firsts + tensor)).to(tl.int64) * CHUNK
    count = tl.minimum(tl.load(sizes + tensor) - start, CHUNK).to(tl.int32)
    if skip is not None:
        count = tl.where(tl.load(skip) != 0.0, 0, count)
    return tensor, start, count


@triton.jit
def number(numbers, index):
    """An FP32 scalar of the launch. They lie in memory as bits, so that a captured launch finds
    those of its step."""
    return tl.load(numbers + index).to(tl.float32, bitcast=True)


@triton.jit
def factor(multiplier, ON_DEVICE: tl.constexpr):
    """What gradients are multiplied with: the argument, or what it points to."""
    if ON_DEVICE:
        value = tl.load(multiplier)
    else:
        value = tl.cast(
            multiplier, tl.float32
        )  # the interpreter takes a denormal argument for a double
    return value


@triton.jit
def tile(at, ROWS: tl.constexpr, STRIDE: tl.constexpr):
    """Blocks, shape (ROWS,), and elements, shape (ROWS, 256), of a tile whose first element is
    ``at``; from one row of it to the next it is STRIDE elements."""
    rows = tl.arange(0, ROWS) * STRIDE
    return (at + rows) // BLOCK, at + rows[:, None] + tl.arange(0, BLOCK)[None, :]


@triton.jit
def gradient(
    pointer,
    main,
    offsets,
    count,
    multiplier,
    l2,
    GRAD: tl.constexpr,
    HAS_L2: tl.constexpr,
    MASKED: tl.constexpr,
):
    """FP32 gradient times the multiplier, plus ``l2 * main``."""
    value = widened(fetch(pointer, offsets, count, MASKED), GRAD) * multiplier
    if HAS_L2:
        value = value + main * l2
    return value
