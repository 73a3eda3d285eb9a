"""Code of all rules' kernels: the chunk of a program, and the elements of a tile."""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from mp_optim.kernels.triton.kernels.formats import (
    BLOCK,
    Moment,
    Tile,
    fetch_tile,
    place,
    random_words,
    widened,
)

WEIGHT = tl.constexpr(1)
"""Index of the weight of new main params in their averages, in a launch's row of numbers."""


class Flags(NamedTuple):
    """Switches that are compiled into a rule's kernel."""

    has_decay: bool = False
    has_l2: bool = False
    nesterov: bool = False
    first: bool = False
    average_from_end: bool = False
    ahead_from_end: bool = False
    cautious_wd: bool = False
    follows: bool = False

    @classmethod
    def of(cls, scalars: Any) -> "Flags":
        """Return the flags of a rule's scalars: its switches, and True if main params decay.

        Raises:
            ValueError: a switch of the scalars is not a field of this class, so no kernel could
                read it.
        """
        names = scalars.__slots__
        switches = {name: getattr(scalars, name) for name in cls._fields if name in names}
        values = {name: getattr(scalars, name) for name in names}
        named = {name for name, value in values.items() if isinstance(value, bool)}
        if unknown := named - switches.keys():
            raise ValueError(f"scalars={sorted(unknown)}: no kernel reads them; add them to Flags")
        has_decay = "decay" in names and bool(scalars.decay)
        return cls(has_decay, "l2" in names and bool(scalars.l2), **switches)


class Chunk(NamedTuple):
    """The chunk of a program and the arguments of its rule.

    Attributes:
        tensor: index of the tensor in the tables.
        start: index of the chunk's first element.
        count: number of the chunk's elements.
        streams: random stream and start of each tensor.
        seed: seed of the random bits.
        grad_multiplier: FP32 factor of the gradients.
        scalars: ten FP32 numbers of the step, in the order of the rule's class.
        made: tensor that the pass reads or writes in addition to the lists.
        weight: weight of new main params in their averages.
        run: number of neighboring elements of a thread: 4 or 8.
        aligned: True if all tensors begin at multiples of 16 bytes.
        grad: pointer to the chunk's first gradient.
        main: pointer to the chunk's first main param; None without a column.
        rest: pointer to the chunk's first remainder; None without a column.
        output: pointer to the chunk's first output; None without a column.
        average: pointer to the chunk's first average; None without a column.
    """

    tensor: Any
    start: Any
    count: Any
    streams: Any
    seed: Any
    grad_multiplier: Any
    scalars: Any
    weight: Any
    made: Any
    run: Any
    aligned: Any
    grad: Any
    main: Any
    rest: Any
    first: Moment
    second: Moment
    output: Any
    average: Any


@triton.jit
def located(owners, firsts, sizes, skip, CHUNK: tl.constexpr):
    """Return this program's tensor, first element and number of elements. The number is 0 if the
    step is skipped."""
    program = tl.program_id(0)
    tensor = tl.load(owners + program)
    start = (program - tl.load(firsts + tensor)).to(tl.int64) * CHUNK
    count = tl.minimum(tl.load(sizes + tensor) - start, CHUNK).to(tl.int32)
    if skip is not None:
        count = tl.where(tl.load(skip) != 0.0, 0, count)
    return tensor, start, count


@triton.jit
def number(numbers, index):
    """Load an FP32 number of the launch, which is stored as its bits."""
    return tl.load(numbers + index).to(tl.float32, bitcast=True)


@triton.jit
def numbers_of(numbers):
    """Load the scalars of a rule. The compiler removes the loads of scalars that the rule does not
    use."""
    return (number(numbers, 4), number(numbers, 5), number(numbers, 6), number(numbers, 7),
            number(numbers, 8), number(numbers, 9), number(numbers, 10), number(numbers, 11),
            number(numbers, 12), number(numbers, 13))


@triton.jit
def multiplier_of_grads(multiplier, ON_DEVICE: tl.constexpr):
    """Return the FP32 multiplier of gradients: the argument, or the number at the argument's
    address."""
    if ON_DEVICE:
        value = tl.load(multiplier)
    else:
        # The interpreter treats a denormal argument as a double, so cast to FP32.
        value = tl.cast(multiplier, tl.float32)
    return value


@triton.jit
def located_in_tile(at, count, ROWS: tl.constexpr, STRIDE: tl.constexpr, RUN: tl.constexpr):
    """Return the indices of a tile's blocks and elements, and a mask of the elements below
    ``count``.

    Blocks have shape (ROWS,), elements and mask (ROWS, 256). Rows are STRIDE elements apart.

    NOTE: the hint RUN makes a thread process 4 neighboring elements if there are FP32 tensors.
    Without a hint, a thread would process as many as 16 bytes of the narrowest tensor hold. FP32
    tensors would then need two accesses that are 32 bytes apart from thread to thread, with an
    exchange through shared memory. Compute the mask from numbers without a hint, so that the
    compiler finds the mask's runs and keeps masked accesses wide.
    """
    rows = tl.arange(0, ROWS) * STRIDE
    offsets = at + rows[:, None] + tl.arange(0, BLOCK)[None, :]
    inside = offsets < count
    if RUN == 4:
        steps = rows[:, None] + tl.arange(0, BLOCK)[None, :]
        offsets = tl.max_contiguous(at + steps, (1, 4))
    return (at + rows) // BLOCK, offsets, inside


@triton.jit
def even_count(count, ALIGNED: tl.constexpr):
    """Return ``count`` if the chunk is aligned and ``count`` is a multiple of 16, else 0.

    With such a count each run of 16 elements has one mask value, so masked accesses are wide.

    NOTE: pass this count to a separate call, as ``each_tile`` does. If one call got either count
    by a condition, the compiler would merge the branches, and the accesses would be narrow.
    """
    even = 0
    if ALIGNED:
        even = tl.where(count % 16 == 0, count // 16, 0) * 16
    return even


@triton.jit
def each_tile(RULE: tl.constexpr, chunk, per_tensor, FLAGS: tl.constexpr, ROWS: tl.constexpr):
    """Call a rule for each whole tile of a chunk without masks, and for the rest as one masked
    tile.

    Args:
        per_tensor: number of the chunk's tensor that the rule's tile function gets: LAMB's trust
            ratio or Muon's factor; None for rules without one.
    """
    whole = chunk.count // (ROWS * BLOCK) * (ROWS * BLOCK)
    for at in range(0, whole, ROWS * BLOCK):
        _one_tile(RULE, at, chunk.count, chunk, per_tensor, FLAGS, ROWS, False)
    even = even_count(chunk.count, chunk.aligned)
    if chunk.aligned:
        if whole < even:
            _one_tile(RULE, whole, even, chunk, per_tensor, FLAGS, ROWS, True)
    if (whole < chunk.count) & (even == 0):
        _one_tile(RULE, whole, chunk.count, chunk, per_tensor, FLAGS, ROWS, True)


@triton.jit
def _one_tile(RULE: tl.constexpr, at, count, chunk, per_tensor, FLAGS: tl.constexpr,
              ROWS: tl.constexpr, MASKED: tl.constexpr):
    blocks, offsets, inside = located_in_tile(at, count, ROWS, BLOCK, chunk.run)
    words = words_of(chunk, offsets)
    RULE(Tile(blocks, offsets, count, inside, MASKED, words), chunk, per_tensor, FLAGS)


@triton.jit
def words_of(chunk, offsets):
    """Return 32 random bits for each element of a tile; None without noise."""
    words = None
    if chunk.streams is not None:
        pair = chunk.streams + 2 * chunk.tensor
        begin = chunk.start.to(tl.uint32) + tl.load(pair + 1).to(tl.uint32, bitcast=True)
        words = random_words(tl.load(pair), chunk.seed, begin, offsets)
    return words


@triton.jit
def gradient(chunk, main, tile, l2, HAS_L2: tl.constexpr):
    """Load the gradients of a tile, and return FP32(g) * multiplier + l2 * main."""
    value = widened(fetch_tile(chunk.grad, tile)) * chunk.grad_multiplier
    if HAS_L2:
        value = value + main * l2
    return value


@triton.jit
def decayed(p, u, decay, FLAGS: tl.constexpr):
    """Return decayed main params. With cautious decay, an element decays only if the step does not
    move the element away from 0."""
    if FLAGS.has_decay:
        if FLAGS.cautious_wd:
            is_opposed = ((p > 0.0) & (u < 0.0)) | ((p < 0.0) & (u > 0.0))
            p = p - tl.where(is_opposed, 0.0, p * decay)
        else:
            p = p - p * decay
    return p


@triton.jit
def place_average(column, tensor, start, TYPE: tl.constexpr, ALIGNED: tl.constexpr):
    """Return the pointer to the chunk's average of gradients. A byte of this moment may have two
    codes."""
    at = start
    # Keep this condition separate, because Triton up to 3.7 cannot compare None with a dtype.
    if TYPE is not None:
        if TYPE == tl.uint8:
            at = start // 2
    return place(column, tensor, at, TYPE, ALIGNED)


def _name(launch):
    """Return the name of a launch in profiles: the name of the launch's rule."""
    return launch.constants["RULE"].__name__


# Multiplier and flag may be elements of one tensor at any address. Do not specialize on their
# alignment, or Triton would compile the kernel several times.
@triton.jit(repr=_name, do_not_specialize_on_alignment=["multiplier", "skip"])
def step(owners, firsts, sizes, streams, numbers, multiplier, skip, grads, mains, rests, moments1,
         moments2, scales1, scales2, outputs, averages, made, RULE: tl.constexpr,
         FLAGS: tl.constexpr, KIND: tl.constexpr, ON_DEVICE: tl.constexpr, ALIGNED: tl.constexpr,
         CHUNK: tl.constexpr, ROWS: tl.constexpr, RUN: tl.constexpr):
    """Load the arguments of this program's chunk, and call the rule."""
    tensor, start, count = located(owners, firsts, sizes, skip, CHUNK)
    seed = tl.load(numbers)
    scalars = numbers_of(numbers)
    grad_multiplier = multiplier_of_grads(multiplier, ON_DEVICE)
    grad = place(grads, tensor, start, KIND.grad, ALIGNED)
    main = place(mains, tensor, start, KIND.main, ALIGNED)
    rest = place(rests, tensor, start, KIND.remainder, ALIGNED)
    block = start // BLOCK
    values1 = place_average(moments1, tensor, start, KIND.moment1, ALIGNED)
    first = Moment(values1, place(scales1, tensor, block, tl.float32, False))
    values2 = place(moments2, tensor, start, KIND.moment2, ALIGNED)
    second = Moment(values2, place(scales2, tensor, block, tl.float32, False))
    output = place(outputs, tensor, start, KIND.output, ALIGNED)
    average = place(averages, tensor, start, KIND.average, ALIGNED)
    weight = number(numbers, WEIGHT)
    # NOTE: do not assign the Chunk to a variable: Triton would make tensors of its compile-time
    # constants.
    RULE(Chunk(tensor, start, count, streams, seed, grad_multiplier, scalars, weight, made, RUN,
               ALIGNED, grad, main, rest, first, second, output, average),
         FLAGS, CHUNK, ROWS)
