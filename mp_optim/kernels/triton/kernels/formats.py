"""Reading, rounding and writing of stored values: ``kernels/codecs.py`` as Triton functions.

bfloat16 is read and written as its 16 bits, int16, because Triton's interpreter would truncate
where a GPU rounds. So :func:`widened` and :func:`narrowed` take int16 for bfloat16. 16-bit
remainders are int16, too, but do not pass through these functions.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

BLOCK = tl.constexpr(256)
GOLDEN = tl.constexpr(0x9E3779B9)
INFINITY = tl.constexpr(0x7F800000)
MAGNITUDE = tl.constexpr(0x7FFFFFFF)
# Bounds are given as bits, because magnitudes are compared as integers.
MOST_BFLOAT16 = tl.constexpr(0x7F7F0000)
# This number has the bits of LARGEST. Decoded codes are finite up to LARGEST.
MOST_IN_BLOCKS = tl.constexpr(0x7F7FE000)
LARGEST = tl.constexpr(2.0**128 * (1.0 - 2.0**-11))
# The bits of 2^65, which is stored as the root of an infinite second moment.
INFINITE_ROOT = tl.constexpr(0x60000000)
TINY = tl.constexpr((127 - 100) << 23)  # A block has scale 0 if all its values are below 2^-100.
# Adding and subtracting this number rounds |x| < 2^22 to the nearest even integer.
ROUNDER = tl.constexpr(1.5 * 2.0**23)


# -- memory ---------------------------------------------------------------------------------------


@triton.jit
def place(column, tensor, start, TYPE: tl.constexpr, ALIGNED: tl.constexpr):
    """Return the pointer to element ``start`` of a tensor; None without a column.

    Args:
        column: table of the tensors' addresses, or None.
        tensor: index of the tensor.
        start: index of the element.
        ALIGNED: True if every address of the launch is a multiple of 16 bytes.
    """
    pointer = column
    if column is not None:
        if TYPE == tl.bfloat16:
            pointer = tl.load(column + tensor).to(tl.pointer_type(tl.int16))
        else:
            pointer = tl.load(column + tensor).to(tl.pointer_type(TYPE))
        if ALIGNED:
            pointer = tl.multiple_of(pointer, 16)
        pointer = pointer + start
    return pointer


@triton.jit
def fetch(pointer, offsets, count, MASKED: tl.constexpr):
    """Load stored elements. The result is 0 for elements from index ``count`` on."""
    if MASKED:
        raw = tl.load(pointer + offsets, mask=offsets < count, other=0)
    else:
        raw = tl.load(pointer + offsets)
    return raw


@triton.jit
def put(pointer, raw, offsets, count, MASKED: tl.constexpr):
    """Store the elements before element ``count``."""
    if MASKED:
        tl.store(pointer + offsets, raw, mask=offsets < count)
    else:
        tl.store(pointer + offsets, raw)


class Tile(NamedTuple):
    """Elements of a chunk that are read and written together.

    Attributes:
        blocks: indices of the blocks, shape (rows,).
        offsets: indices of the elements, shape (rows, 256).
        count: number of elements of the chunk.
        inside: mask of the offsets below ``count``.
        masked: True if the tile may have offsets past ``count``, so that accesses need a mask.
        words: random bits of each element, or None.
    """

    blocks: Any
    offsets: Any
    count: Any
    inside: Any
    masked: Any
    words: Any


@triton.jit
def fetch_tile(pointer, tile):
    """Load the stored elements of a tile. The result is 0 for elements after the chunk's end."""
    if tile.masked:
        raw = tl.load(pointer + tile.offsets, mask=tile.inside, other=0)
    else:
        raw = tl.load(pointer + tile.offsets)
    return raw


@triton.jit
def put_tile(pointer, raw, tile):
    """Store the elements of a tile, up to the chunk's end."""
    if tile.masked:
        tl.store(pointer + tile.offsets, raw, mask=tile.inside)
    else:
        tl.store(pointer + tile.offsets, raw)


@triton.jit
def widened(raw):
    """Return stored elements as FP32 values."""
    if raw.dtype == tl.int16:
        value = (raw.to(tl.int32) << 16).to(tl.float32, bitcast=True)
    else:
        value = raw.to(tl.float32)
    return value


@triton.jit
def narrowed(value, TYPE: tl.constexpr):
    """Return FP32 values rounded to nearest even into a floating dtype."""
    if TYPE == tl.int16:
        bits = value.to(tl.int32, bitcast=True)
        rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        raw = tl.where((bits & MAGNITUDE) > INFINITY, 0x7FC0, rounded).to(tl.int16)
    else:
        raw = value.to(TYPE)
    return raw


@triton.jit
def is_finite(x):
    return (x.to(tl.int32, bitcast=True) & MAGNITUDE) < INFINITY


@triton.jit
def bounded(x, made_of_finite):
    """Replace an overflow of finite inputs by FP32's largest number with the same sign."""
    bits = x.to(tl.int32, bitcast=True)
    overflown = ((bits & MAGNITUDE) == INFINITY) & made_of_finite
    return tl.where(overflown, bits - 1, bits).to(tl.float32, bitcast=True)


@triton.jit
def finite_within(value, MOST: tl.constexpr):
    """Clamp finite values to a magnitude. ``MOST`` has the magnitude's bits."""
    bits = value.to(tl.int32, bitcast=True)
    magnitude = bits & MAGNITUDE
    above = (magnitude > MOST) & (magnitude < INFINITY)
    return tl.where(above, (bits ^ magnitude) | MOST, bits).to(tl.float32, bitcast=True)


# -- random numbers -------------------------------------------------------------------------------


@triton.jit
def mix(x):
    """Return the 32-bit finalizer of MurmurHash3 for uint32 values."""
    x = (x ^ (x >> 16)) * 0x85EBCA6B
    x = (x ^ (x >> 13)) * 0xC2B2AE35
    return x ^ (x >> 16)


@triton.jit
def random_words(stream, seed, start, offsets):
    """Return 32 random bits for each element. ``start`` is a uint32 index."""
    key = mix(seed.to(tl.uint32) ^ stream.to(tl.uint32, bitcast=True))
    return mix(key + (start + offsets.to(tl.uint32)) * GOLDEN)


@triton.jit
def sixteen_bits(words, ROOT: tl.constexpr):
    """Return 16 random bits for rounding each element of a moment."""
    if ROOT:
        bits = words & 0xFFFF
    else:
        bits = words >> 16
    return bits.to(tl.int32)


# -- moments --------------------------------------------------------------------------------------


class Moment(NamedTuple):
    """Pointers to a stored moment and to the moment's scales. A pointer is None if the launch has
    no such tensor."""

    stored: Any
    scales: Any


@triton.jit
def decoded(raw, scale, ROOT: tl.constexpr):
    """Return a stored moment in FP32, shape (blocks, 256).

    Args:
        scale: shape (blocks,), or None.
    """
    value = widened(raw)
    if scale is not None:
        value = value * scale[:, None]
        if ROOT:
            value = value * value
    return value


@triton.jit
def read_moment(moment, tile, ROOT: tl.constexpr):
    """Load a moment and return it in FP32. ROOT is True for a second moment: its block formats
    store the square root."""
    scale = None
    if moment.scales is not None:
        scale = fetch(moment.scales, tile.blocks, tl.cdiv(tile.count, BLOCK), tile.masked)
    if moment.stored.dtype.element_ty == tl.uint8 and not ROOT:
        raw = fetch_pairs(moment.stored, tile)
    else:
        raw = fetch_tile(moment.stored, tile)
    return decoded(raw, scale, ROOT)


@triton.jit
def write_moment(value, moment, tile, ROOT: tl.constexpr):
    """Store a moment, given in FP32, and return the values that are stored."""
    TYPE: tl.constexpr = moment.stored.dtype.element_ty
    scale = None
    if moment.scales is not None:
        if tile.masked:
            value = tl.where(tile.inside, value, 0.0)
        raw, scale = encoded(value, tile.words, TYPE, ROOT)
        put(moment.scales, scale, tile.blocks, tl.cdiv(tile.count, BLOCK), tile.masked)
    elif TYPE == tl.int16:
        value = finite_within(value, MOST_BFLOAT16)
        if tile.words is not None:
            raw = dithered(value, sixteen_bits(tile.words, ROOT))
        else:
            raw = narrowed(value, TYPE)
    else:
        raw = narrowed(value, TYPE)
    if TYPE == tl.uint8 and not ROOT:
        put_pairs(moment.stored, raw, tile)
    else:
        put_tile(moment.stored, raw, tile)
    return decoded(raw, scale, ROOT)


@triton.jit
def fetch_pairs(pointer, tile):
    """Load 4-bit codes as int32. Of each run of 64 codes, the first 32 are in the lower halves of
    bytes, the other 32 in the upper halves."""
    places = (tile.offsets >> 6 << 5) + (tile.offsets & 31)
    places = tl.max_contiguous(tl.multiple_of(places, (1, 32)), (1, 32))
    both = fetch(pointer, places, bytes_of_pairs(tile.count), tile.masked).to(tl.int32)
    return (((both >> ((tile.offsets & 32) >> 3)) & 15) ^ 8) - 8


@triton.jit
def put_pairs(pointer, codes, tile):
    """Store 4-bit codes, shape (blocks, 256), two in a byte."""
    ROWS: tl.constexpr = codes.shape[0]
    halves = tl.permute(tl.reshape(codes & 15, (ROWS, 4, 2, 32)), (0, 1, 3, 2))
    low, high = tl.split(halves)
    both = tl.reshape(low | (high << 4), (ROWS, 128)).to(tl.uint8)
    places = tile.blocks[:, None] * 128 + tl.arange(0, 128)[None, :]
    put(pointer, both, places, bytes_of_pairs(tile.count), tile.masked)


@triton.jit
def bytes_of_pairs(count):
    """Return the number of bytes of ``count`` 4-bit codes, padded to whole runs of 64 codes."""
    return tl.cdiv(count, 64) * 32


@triton.jit
def dithered(value, sixteen):
    """Add random bits to FP32 values and clear their lower 16 bits; return the upper bits as
    bfloat16."""
    bits = value.to(tl.int32, bitcast=True)
    finite = (bits & INFINITY) != INFINITY
    return tl.where(finite, (bits + sixteen) >> 16, narrowed(value, tl.int16).to(tl.int32)).to(
        tl.int16
    )


@triton.jit
def encoded(value, words, TYPE: tl.constexpr, ROOT: tl.constexpr):
    """Return codes, shape (blocks, 256), and scales, shape (blocks,), of FP32 values."""
    if ROOT:
        value = tl.sqrt_rn(value)
    # Compare the bits of magnitudes as integers. Larger magnitudes have larger bits, inf has larger
    # bits than all numbers, and NaN larger bits than inf.
    top = tl.max(value.to(tl.int32, bitcast=True) & MAGNITUDE, axis=1)
    if ROOT:
        top = tl.where(top == INFINITY, INFINITE_ROOT, top)
        value = tl.minimum(value, 2.0**65)
    else:
        top = tl.where((top > MOST_IN_BLOCKS) & (top < INFINITY), MOST_IN_BLOCKS, top)
        value = tl.minimum(tl.maximum(value, -LARGEST), LARGEST)
    good = (top >= TINY) & (top < INFINITY)
    if TYPE == tl.float16:
        exponent = ((top + 0x1000) & INFINITY) - (14 << 23)
        scale = exponent.to(tl.float32, bitcast=True)
        inverse = ((254 << 23) - exponent).to(tl.float32, bitcast=True)
    elif TYPE == tl.uint8 and not ROOT:
        step = tl.div_rn(top.to(tl.float32, bitcast=True), 7.0)
        scale = (step.to(tl.int32, bitcast=True) & -0x100).to(tl.float32, bitcast=True)
        inverse = tl.div_rn(tl.full(scale.shape, 1.0, tl.float32), scale)
    else:
        if ROOT:
            step = tl.div_rn(top.to(tl.float32, bitcast=True), 255.0)
        else:
            step = tl.div_rn(top.to(tl.float32, bitcast=True), 127.0)
        scale = ((step.to(tl.int32, bitcast=True) + 0xFF) & -0x100).to(tl.float32, bitcast=True)
        inverse = tl.div_rn(tl.full(scale.shape, 1.0, tl.float32), scale)
    scaled = tl.where(good[:, None], value * inverse[:, None], 0.0)
    if TYPE == tl.float16:
        raw = half_codes(scaled, good, ROOT)
    else:
        raw = byte_codes(scaled, good, words, TYPE, ROOT)
    bad = tl.where(top < INFINITY, 0, 0x7FC00000).to(tl.float32, bitcast=True)
    return raw, tl.where(good, scale, bad)


@triton.jit
def half_codes(scaled, good, ROOT: tl.constexpr):
    """Return float16 codes of roots. No code is 0, because an update divided by 0 could have any
    length."""
    raw = scaled.to(tl.float16)
    if ROOT:
        bits = raw.to(tl.int16, bitcast=True).to(tl.int32)
        floor = tl.where(good, 1, -0x8000)[:, None]
        raw = tl.maximum(bits, floor).to(tl.int16).to(tl.float16, bitcast=True)
    return raw


@triton.jit
def byte_codes(scaled, good, words, TYPE: tl.constexpr, ROOT: tl.constexpr):
    """Round scaled values to integers, to nearest or stochastically. Codes of roots are at least
    1."""
    if words is not None:
        bits = sixteen_bits(words, ROOT).to(tl.float32)
        if TYPE == tl.uint8 and not ROOT:
            bits = bits + 0.5
        scaled = scaled + bits * 2.0**-16
        # tl.floor flushes denormals on a GPU, so truncate and correct negative values.
        codes = scaled.to(tl.int32)
        codes = tl.where(codes.to(tl.float32) > scaled, codes - 1, codes)
    else:
        codes = ((scaled + ROUNDER) - ROUNDER).to(tl.int32)
    if ROOT:
        codes = tl.minimum(tl.maximum(codes, tl.where(good, 1, 0)[:, None]), 255).to(TYPE)
    elif TYPE == tl.uint8:  # Keep 4-bit codes as int32. The store packs two codes into a byte.
        codes = tl.minimum(tl.maximum(codes, -7), 7)
    else:
        codes = tl.minimum(tl.maximum(codes, -127), 127).to(TYPE)
    return codes


# -- main params ----------------------------------------------------------------------------------


@triton.jit
def read_main(chunk, tile, FOLLOWS: tl.constexpr):
    """Load main params and return FP32 values. Stored remainders are joined with their parameters.

    With FOLLOWS, a main param is replaced by the model's weight in the output if the main param
    does not round to this weight.
    """
    raw = fetch_tile(chunk.main, tile)
    if chunk.rest is None:
        value = widened(raw)
    else:
        rest = fetch_tile(chunk.rest, tile)
        value = joined(raw.to(tl.int32) << 16, rest.to(tl.int32), rest.dtype)
    if FOLLOWS:
        weights = fetch_tile(chunk.output, tile)
        now = widened(weights)
        rounded = narrowed(value, weights.dtype)
        same = rounded.to(tl.int16, bitcast=True) == weights.to(tl.int16, bitcast=True)
        value = tl.where(same | ((now != now) & (value != value)), value, now)
    return value


@triton.jit
def write_main(value, chunk, tile):
    """Store main params, given in FP32, with their remainders and outputs, and update the averages
    with the stored main params."""
    if chunk.rest is None:
        raw = lone(value, tile.words, chunk.main.dtype.element_ty)
        put_tile(chunk.main, raw, tile)
        shown = widened(raw)
        value = shown
    else:
        REMAINDER: tl.constexpr = chunk.rest.dtype.element_ty
        high, low = split(value, tile.words, REMAINDER)
        put_tile(chunk.main, high.to(tl.int16), tile)
        put_tile(chunk.rest, low.to(REMAINDER), tile)
        shown = (high << 16).to(tl.float32, bitcast=True)
        value = joined(high << 16, low, REMAINDER)
    if chunk.output is not None:
        raw = narrowed(shown, chunk.output.dtype.element_ty)
        put_tile(chunk.output, raw, tile)
    if chunk.average is not None:
        write_average(value, chunk, tile)


@triton.jit
def write_average(value, chunk, tile):
    """Move averages towards FP32 main params, and round a bfloat16 average stochastically."""
    TYPE: tl.constexpr = chunk.average.dtype.element_ty
    mean = widened(fetch_tile(chunk.average, tile))
    mean = tl.where(chunk.weight == 1.0, value, mean + (value - mean) * chunk.weight)
    if TYPE == tl.int16:
        raw = dithered(mean, (mix(tile.words ^ GOLDEN) >> 16).to(tl.int32))
    else:
        raw = mean
    put_tile(chunk.average, raw, tile)


@triton.jit
def lone(value, words, TYPE: tl.constexpr):
    """Return main params without remainders in their stored dtype.

    bfloat16 is rounded stochastically with random bits, else to nearest even.
    """
    if TYPE != tl.int16:
        raw = value
    elif words is None:
        raw = narrowed(value, TYPE)
    else:
        raw = dithered(value, (mix(words ^ GOLDEN) & 0xFFFF).to(tl.int32))
    return raw


@triton.jit
def joined(high, low, REMAINDER: tl.constexpr):
    """Join upper halves, given as FP32 bits, with remainders, and return FP32 values.

    The remainder of a zero is ignored. A positive remainder of an infinity is ignored, too, because
    the sum of bits would be a NaN.
    """
    if REMAINDER == tl.int8:
        low = low << 8
    has_none = ((high & MAGNITUDE) == 0) | (((high & MAGNITUDE) == INFINITY) & (low > 0))
    return tl.where(has_none, high, high + low).to(tl.float32, bitcast=True)


@triton.jit
def split(value, words, REMAINDER: tl.constexpr):
    """Split FP32 bits into the upper 16 bits, rounded to nearest with ties away from zero, and the
    remainder. Both results are int32."""
    bits = value.to(tl.int32, bitcast=True)
    is_nan = (bits & MAGNITUDE) > INFINITY
    if REMAINDER == tl.int8:
        if words is not None:
            added = (mix(words ^ GOLDEN) & 0xFF).to(tl.int32)
        else:
            added = 0x7F + ((bits >> 8) & 1)
        bits = tl.where((bits & INFINITY) != INFINITY, (bits + added) & -0x100, bits)
    bits = tl.where(is_nan, 0x7FC00000, bits)
    high = (bits + 0x8000) >> 16
    low = bits - (high << 16)
    if REMAINDER == tl.int8:
        low = low >> 8
    return high, low
