"""What the kernels of all rules share: where a program works, and the elements of a tile."""

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
"""Where the weight of new main params in their averages lies among a launch's numbers."""


class Flags(NamedTuple):
    """What is compiled into a rule."""

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
        """Return the flags of a rule's scalars: its switches, and whether a parameter decays.

        Raises:
            ValueError: a switch is no field here, so that no kernel would know of it.
        """
        names = scalars.__slots__
        switches = {name: getattr(scalars, name) for name in cls._fields if name in names}
        values = {name: getattr(scalars, name) for name in names}
        named = {name for name, value in values.items() if isinstance(value, bool)}
        if unknown := named - switches.keys():
            raise ValueError(f"no kernel is compiled for {sorted(unknown)}: add it to Flags")
        has_decay = "decay" in names and bool(scalars.decay)
        return cls(has_decay, "l2" in names and bool(scalars.l2), **switches)


class Chunk(NamedTuple):
    """What a program works on.

    Attributes:
        tensor: its place in the tables. start: the chunk's first element. count: its elements.
        streams, seed: of random numbers: for each tensor a stream, and where in it the tensor
            begins. grad_multiplier: FP32, of gradients.
        scalars: ten FP32 numbers of the step; what each is, the rule knows.
        made: what the step itself made, or is to make, on the device.
        weight: of new main params in their averages.
        run: how many elements a thread takes side by side: 4, or 8. aligned: whether all tensors
            begin at multiples of 16 bytes.
        grad, main, rest, output, average: pointers to the first element; None where there is no
            column.
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
    """Return this program's tensor, its first element and its number of elements, 0 in a skipped
    step."""
    program = tl.program_id(0)
    tensor = tl.load(owners + program)
    start = (program - tl.load(firsts + tensor)).to(tl.int64) * CHUNK
    count = tl.minimum(tl.load(sizes + tensor) - start, CHUNK).to(tl.int32)
    if skip is not None:
        count = tl.where(tl.load(skip) != 0.0, 0, count)
    return tensor, start, count


@triton.jit
def number(numbers, index):
    """Return an FP32 scalar of the launch, which is stored as its bits."""
    return tl.load(numbers + index).to(tl.float32, bitcast=True)


@triton.jit
def numbers_of(numbers):
    """Return the scalars of a rule. Those that it does not read are not loaded."""
    return (number(numbers, 4), number(numbers, 5), number(numbers, 6), number(numbers, 7),
            number(numbers, 8), number(numbers, 9), number(numbers, 10), number(numbers, 11),
            number(numbers, 12), number(numbers, 13))


@triton.jit
def multiplier_of_grads(multiplier, ON_DEVICE: tl.constexpr):
    """Return the FP32 multiplier of gradients: the argument, or the number that it points to."""
    if ON_DEVICE:
        value = tl.load(multiplier)
    else:
        # the interpreter takes a denormal argument for a double
        value = tl.cast(
            multiplier, tl.float32
        )
    return value


@triton.jit
def located_in_tile(at, count, ROWS: tl.constexpr, STRIDE: tl.constexpr, RUN: tl.constexpr):
    """Return the blocks, shape (ROWS,), and elements, shape (ROWS, 256), of a tile whose first
    element is ``at``, and a mask of elements below ``count``.

    Rows are STRIDE elements apart.

    NOTE: a thread takes as many elements side by side as are in 16 bytes of the narrowest tensor,
    if it is not told of fewer, RUN. Beside FP32 tensors that would be two accesses for each of
    theirs, 32 bytes from thread to thread, and values that go through shared memory. The mask is
    made of numbers of which nothing was told: then its runs are found, and it is as wide.
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
    """Return the count of an aligned chunk that ends at a multiple of 16, else 0.

    Masks are then equal in runs of 16, so masked accesses are wide, too.

    NOTE: what is done with it and with other counts are not two ways of one condition. The compiler
    would make one of them, with a count of which it knows nothing.
    """
    even = 0
    if ALIGNED:
        even = tl.where(count % 16 == 0, count // 16, 0) * 16
    return even


@triton.jit
def each_tile(RULE: tl.constexpr, chunk, per_tensor, FLAGS: tl.constexpr, ROWS: tl.constexpr):
    """Let a rule step the whole tiles without masks, and the rest of the chunk as one masked tile.

    ``per_tensor`` is the number of this chunk's tensor that the rule's tile function takes: LAMB's
    trust ratio, or Muon's factor; None if it takes none."""
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
    """Return 32 random bits for each of these elements; None without noise."""
    words = None
    if chunk.streams is not None:
        pair = chunk.streams + 2 * chunk.tensor
        begin = chunk.start.to(tl.uint32) + tl.load(pair + 1).to(tl.uint32, bitcast=True)
        words = random_words(tl.load(pair), chunk.seed, begin, offsets)
    return words


@triton.jit
def gradient(chunk, main, tile, l2, HAS_L2: tl.constexpr):
    """Return the FP32 gradient times the multiplier, plus ``l2 * main``."""
    value = widened(fetch_tile(chunk.grad, tile)) * chunk.grad_multiplier
    if HAS_L2:
        value = value + main * l2
    return value


@triton.jit
def decayed(p, u, decay, FLAGS: tl.constexpr):
    """Return a decayed main param. With cautious decay, elements that the step moves away from 0 do
    not decay."""
    if FLAGS.has_decay:
        if FLAGS.cautious_wd:
            is_opposed = ((p > 0.0) & (u < 0.0)) | ((p < 0.0) & (u > 0.0))
            p = p - tl.where(is_opposed, 0.0, p * decay)
        else:
            p = p - p * decay
    return p


@triton.jit
def place_average(column, tensor, start, TYPE: tl.constexpr, ALIGNED: tl.constexpr):
    """Pointer to an average of gradients, of which a byte may hold two codes."""
    at = start
    if TYPE is not None:  # on its own: up to Triton 3.7 None is not compared with a dtype
        if TYPE == tl.uint8:
            at = start // 2
    return place(column, tensor, at, TYPE, ALIGNED)


def _name(launch):
    """Name a launch after its rule."""
    return launch.constants["RULE"].__name__


# A multiplier and a flag may lie anywhere in what holds several: no reason to compile once more.
@triton.jit(repr=_name, do_not_specialize_on_alignment=["multiplier", "skip"])
def step(owners, firsts, sizes, streams, numbers, multiplier, skip, grads, mains, rests, moments1,
         moments2, scales1, scales2, outputs, averages, made, RULE: tl.constexpr,
         FLAGS: tl.constexpr, KIND: tl.constexpr, ON_DEVICE: tl.constexpr, ALIGNED: tl.constexpr,
         CHUNK: tl.constexpr, ROWS: tl.constexpr, RUN: tl.constexpr):
    """Let a rule step the chunk of this program."""
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
    # NOTE: not given a name, which would make tensors of what is known when it is compiled.
    RULE(Chunk(tensor, start, count, streams, seed, grad_multiplier, scalars, weight, made, RUN,
               ALIGNED, grad, main, rest, first, second, output, average),
         FLAGS, CHUNK, ROWS)
