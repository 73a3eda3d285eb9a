"""Digests of an optimizer's parameters and state. The layout and the device of a tensor do not
change its digest.

The digest of a tensor is a sum over its elements, modulo 2^64. Each term is the element's bits as
an integer, times an odd factor for the tensor's name and the element's line, times an odd factor
for the element's column. An odd factor can be inverted modulo 2^64, so every change of a single
element changes the sum. Sums of shards add up to the sum of the whole tensor, so ranks exchange
only sums.

A line has at most 65,536 neighbouring elements of the last dimension. A run has neighbouring lines,
with at most 262,144 elements together. In each step ``sample=N`` reads about one of N runs, so that
N steps in a row read each run once.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache, partial
from typing import NamedTuple
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor

from mp_optim.checkpoint.entries import key_and_fqn
from mp_optim.checkpoint.inventory import Inventory, present_entries
from mp_optim.checkpoint.writing import Held, Share, held_of, plan_together
from mp_optim.core import Slot
from mp_optim.core.flat_shard import piece
from mp_optim.core.keyed_optimizer import SlotKeyedOptimizer
from mp_optim.core.model_parallel import ModelParallel
from mp_optim.core.partition import Box, whole_box
from mp_optim.core.slot_state import StateStore
from mp_optim.process_groups.agreement import Ranks
from mp_optim.process_groups.missing_ranks import call

LINE = 1 << 16
"""Largest number of elements of a line."""
RUN = 1 << 18
"""Largest number of elements of a run."""
_DOING = "adding up the digests of ranks"
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True)
class StepDigest:
    """A digest of an optimizer's parameters and state after a step. Two digests are equal if their
    ``step``, ``sample`` and ``value`` are equal.

    Attributes:
        step: number of the step.
        sample: the digest covers about one of ``sample`` runs of 262,144 elements.
        value: signed 64-bit sum over all ranks.
        grad_norm: gradient norm of the last step; None after an overflow. The norm is not compared,
            because its last bit may depend on the number of ranks.
        bytes_read: bytes of tensors that this rank read; not compared.
        per_tensor: sum of each tensor, by its name in a checkpoint; empty unless requested. The
            sums are not compared.
    """

    step: int
    sample: int
    value: int
    grad_norm: float | None = field(compare=False)
    bytes_read: int = field(compare=False)
    per_tensor: Mapping[str, int] = field(default_factory=dict, compare=False, repr=False)


def digest_of(
    stack: SlotKeyedOptimizer,
    step: int,
    grad_norm: float | None,
    sample: int,
    per_tensor: bool,
    ranks: Ranks,
) -> StepDigest:
    """Return the digest of a stack, as :meth:`mp_optim.MegatronOptimizer.step_digest` does.
    Collective over ``ranks``."""
    plan = _plan_of(stack, ranks, sample)
    is_stale = ranks.group is not None and _division(stack, ranks.group)[0] != plan.held
    own = {} if is_stale else plan.sums(stack, step)
    total = signed(sum(value for value, _ in own.values()))
    if (group := ranks.group) is not None:
        numbers = torch.tensor([total, int(is_stale)], device="cpu")
        call(group, _DOING, lambda: dist.all_reduce(numbers, group=group))
        total = int(numbers[0])
        if int(numbers[1]):
            # This rank or another rank has other tensors than when the ranks last divided the
            # boxes. So the ranks divide the boxes again, and every rank repeats the digest.
            share = plan_together(plan.held, ranks, _DOING)
            _divisions[stack][group] = plan.held, share
            del _plans[stack]
            return digest_of(stack, step, grad_norm, sample, per_tensor, ranks)
    sums: dict[str, int] = {}
    for of_rank in ranks.broadcast(ranks.gather(own)) if per_tensor else ():
        for name, (value, _) in of_rank.items():
            sums[name] = signed(sums.get(name, 0) + value)
    count = sum(nbytes for _, nbytes in own.values())
    return StepDigest(step, sample, total, grad_norm, count, sums)


# -- the boxes that a rank reads in a step --------------------------------------------------------


class _Part(NamedTuple):
    """A box of a tensor that this rank reads for digests. State that is stored in blocks is decoded
    whole, so all lines of such a tensor form one run."""

    entry: str
    place: Box
    in_blocks: bool

    def shift(self) -> int:
        """Return the number that decides in which steps the runs are read. Moments that are stored
        in blocks have one number for each parameter, because one call decodes all moments of a
        parameter."""
        return hash_of(key_and_fqn(self.entry)[1] if self.in_blocks else self.entry)


_Division = tuple[Sequence[Held], Share]
"""Descriptions of this rank's tensors at the last division of an optimizer's boxes among the ranks
of a process group, and the boxes that this rank has read since then."""
_divisions: WeakKeyDictionary[
    SlotKeyedOptimizer, WeakKeyDictionary[dist.ProcessGroup, _Division]
] = WeakKeyDictionary()


def _division(stack: SlotKeyedOptimizer, group: dist.ProcessGroup) -> _Division:
    """Return the last division of the optimizer's boxes among the ranks of a group; empty if the
    ranks have not divided them yet."""
    return _divisions.setdefault(stack, WeakKeyDictionary()).get(group, ((), {}))


@dataclass(frozen=True)
class _Plan:
    """The boxes that this rank reads for digests. A plan is valid while ``key`` and ``late`` do
    not change.

    NOTE: a plan must not refer to the optimizer, or the optimizer would never be freed.

    Attributes:
        key: ``plan_key`` of the stack, id of the process group, and ``sample``.
        parallel: names and partitions of parameters that ranks share.
        names: name of each slot's parameter on this rank.
        held: descriptions of this rank's tensors.
        late: descriptions of the tensors of each slot that may get state after the plan was made,
            because the store allocates state in the slot's first step.
        by_step: for each step number modulo ``sample``, the boxes to read, by slot.
    """

    key: tuple[object, int, int]
    parallel: ModelParallel
    names: Mapping[Slot, str]
    held: Sequence[Held]
    late: Mapping[Slot, Sequence[Held]]
    by_step: Mapping[int, Mapping[Slot, Mapping[_Part, None]]]

    def has_all_state(self, stack: SlotKeyedOptimizer) -> bool:
        """True if no slot has got, lost or replaced state since the plan was made."""
        present = partial(present_entries, stack, parallel=self.parallel)
        return all(
            held_of(present(slot, self.names[slot])) == held for slot, held in self.late.items()
        )

    def sums(self, stack: SlotKeyedOptimizer, step: int) -> dict[str, tuple[int, int]]:
        """Return, by tensor name, the digest of the elements that this rank reads in a step, and
        the number of bytes read."""
        found: dict[str, tuple[int, int]] = {}
        for slot, parts in self.by_step.get(step % self.key[2], {}).items():
            with_blocks = any(part.in_blocks for part in parts)
            entry = partial(present_entries, stack, slot, self.names[slot], self.parallel)
            tensors = entry(with_blocks=with_blocks)
            for part in parts:
                tensor = tensors[part.entry]
                size = _run_length(tensor.shape, part.in_blocks)
                for lines in lines_of(piece(tensor, part.place), part.place, tuple(tensor.shape)):
                    for some in lines.runs(size, part.shift() + step, self.key[2]):
                        total, count = found.get(part.entry, (0, 0))
                        total = signed(total + some.digest(part.entry))
                        found[part.entry] = total, count + some.values.nbytes
        return found


def _plan_of(stack: SlotKeyedOptimizer, ranks: Ranks, sample: int) -> _Plan:
    """Return the stored plan of a stack, or a new plan if the stack, its state, the process group
    or ``sample`` has changed."""
    key, plan = (stack.step_mark.plan_key, id(ranks.group), sample), _plans.get(stack)
    if plan is None or plan.key != key or not plan.has_all_state(stack):
        plan = _plans[stack] = _new_plan(stack, ranks, key)
    return plan


_plans: WeakKeyDictionary[SlotKeyedOptimizer, _Plan] = WeakKeyDictionary()


def _new_plan(stack: SlotKeyedOptimizer, ranks: Ranks, key: tuple[object, int, int]) -> _Plan:
    members, sample = ranks.members(), key[2]
    parallel = stack.model_parallel.among(members)
    left_out = {name for name, owner in parallel.copies.items() if owner in members}
    share = None if ranks.group is None else _division(stack, ranks.group)[1]
    names = Inventory((), stack, parallel).names
    held: list[Held] = []
    late: dict[Slot, Sequence[Held]] = {}
    by_step: dict[int, dict[Slot, dict[_Part, None]]] = {}
    for slot, name in names.items():
        if name in left_out:
            continue
        entries = partial(present_entries, stack, slot, name, parallel)
        stored, of_slot = entries(with_blocks=False), held_of(entries())
        held += of_slot
        store = stack.state_of(slot).store
        # A store of the base class keeps no state, because the parameter was never trained. When
        # the parameter becomes trainable, plan_key changes. So digests need not look at the slot.
        if store.allocates_late and type(store) is not StateStore:
            late[slot] = of_slot
        for entry, _, shape, places in of_slot:
            size = _run_length(shape, entry not in stored)
            for place in (whole_box(shape),) if places is None else places:
                if not place.numel or (share is not None and place not in share.get(entry, ())):
                    continue
                part = _Part(entry, place, entry not in stored)
                first, last = _line(place.offsets, shape), _line(_last_index(place), shape)
                for run in range(first // size, last // size + 1)[:sample]:
                    of_step = by_step.setdefault(-(run + part.shift()) % sample, {})
                    of_step.setdefault(slot, {})[part] = None
    return _Plan(key, parallel, names, tuple(held), late, by_step)


# -- lines and runs of a tensor -------------------------------------------------------------------


class Lines(NamedTuple):
    """Neighbouring lines of a tensor. All lines have the same columns, which may be a slice of the
    tensor's columns.

    Attributes:
        values: the elements, shape (lines, columns).
        line: number of the first line in the whole tensor.
        column: number of the first column in a line.
    """

    values: Tensor
    line: int
    column: int

    def runs(self, size: int, shift: int, sample: int) -> Iterator[Lines]:
        """Yield the lines of every run whose number plus ``shift`` is a multiple of ``sample``.

        Args:
            size: lines of a run.
            shift: number that changes with the step, so that each step selects other runs.
            sample: 1 selects every run, and N about one of N runs.
        """
        end = self.line + len(self.values)
        first = self.line // size
        for run in range(first + -(first + shift) % sample, (end - 1) // size + 1, sample):
            begin = max(self.line, run * size)
            some = self.values[begin - self.line : min(end, (run + 1) * size) - self.line]
            yield Lines(some, begin, self.column)

    def digest(self, name: str) -> int:
        """Return the sum over the elements, not reduced modulo 2^64.

        Args:
            name: name of the tensor.
        """
        total = 0
        for some in self.split():
            of_lines, of_columns = some.factors()
            sums = (bits_of(some.values) * of_columns).sum(1)
            total += int((sums * of_lines).sum()) * factor_of(name, some.line // LINE)
        return total

    def factors(self) -> tuple[Tensor, Tensor]:
        """Return the factors of the lines, shape (lines,), and of the columns, shape (columns,).
        All lines must be in one group of 65,536 (:func:`factor_of`), as after :meth:`split`."""
        of_lines, of_columns = weights_of(self.values.device)
        count, width = self.values.shape
        return of_lines[self.line % LINE :][:count], of_columns[self.column :][:width]

    def split(self) -> Iterator[Lines]:
        """Yield slices of the lines. The products of a slice stay in the cache, and all lines of a
        slice have one factor (:func:`factor_of`)."""
        begin, end = self.line, self.line + len(self.values)
        while begin < end:
            most = max(1, LINE // self.values.shape[1])
            stop = min(end, begin + most, begin + LINE - begin % LINE)
            yield Lines(self.values[begin - self.line : stop - self.line], begin, self.column)
            begin = stop


def changed_element(name: str, tensor: Tensor, difference: int) -> tuple[int, float] | None:
    """Find the single element in which another tensor differs from ``tensor``, by the digests
    alone.

    Return the element's row-major index, and its value in the other tensor; None if several
    elements differ.

    Args:
        name: name of the tensor.
        tensor: the whole tensor; elements of at most 4 bytes.
        difference: digest of the other tensor minus the digest of ``tensor``.
    """
    shape, width = tuple(tensor.shape), 1 << (8 * tensor.itemsize - 1)
    found: list[tuple[int, int]] = []
    for lines in lines_of(tensor.detach(), whole_box(shape), shape):
        for some in lines.split():
            of_lines, of_columns = some.factors()
            factor = pow(factor_of(name, some.line // LINE), -1, 1 << 64)
            explained = inverse(of_lines) * signed(difference * factor)
            changes = explained[:, None] * inverse(of_columns)
            bits = bits_of(some.values) + changes
            # ``changes`` has, for each element, the change that alone would explain the difference.
            # Keep only elements that the change turns into an integer of the element's width.
            small = (changes.abs() < 2 * width) & (bits >= -width) & (bits < width)
            for line, column in small.nonzero().tolist():
                row, number = divmod(some.line + line, _lines_per_row(shape))
                at = row * (shape[-1] if shape else 1) + number * LINE + some.column + column
                found.append((at, int(bits[line, column])))
    if len(found) != 1:
        return None
    index, value = found[0]
    integer = torch.tensor([value], dtype=_INTEGERS[tensor.itemsize], device="cpu")
    return index, integer.view(tensor.dtype).item()


def lines_of(tensor: Tensor, place: Box, shape: tuple[int, ...], row: int = 0) -> Iterator[Lines]:
    """Yield all elements of a box as lines.

    Args:
        tensor: the elements, in the shape of the box.
        place: the box.
        shape: shape of the tensor that has the box.
        row: number of the first row; not 0 if ``shape`` is a slice of the digested tensor. A row
            has all indices of the last dimension.
    """
    if len(shape) < 2:
        shape, tensor = (1, *(shape or (1,))), tensor.reshape(1, -1)
        place = Box((0, *(place.offsets or (0,))), tuple(tensor.shape))
    rows = math.prod(shape[1:-1])
    if place.sizes[1:-1] != shape[1:-1]:
        inner = Box(place.offsets[1:], place.sizes[1:])
        for at, some in enumerate(tensor, place.offsets[0]):
            yield from lines_of(some, inner, shape[1:], row + at * rows)
        return
    matrix, row, column = tensor.flatten(0, -2), row + place.offsets[0] * rows, place.offsets[-1]
    if shape[-1] <= LINE:
        yield Lines(matrix, row, column)
        return
    for at, some in enumerate(matrix, row):
        for number in range(column // LINE, (column + len(some) - 1) // LINE + 1):
            begin = max(column, number * LINE)
            cut = some[begin - column : (number + 1) * LINE - column]
            yield Lines(cut[None], at * _lines_per_row(shape) + number, begin % LINE)


def _lines_per_row(shape: Sequence[int]) -> int:
    """Return the number of lines in a row. A row has all indices of the last dimension."""
    return -(-max(1, *shape[-1:], 1) // LINE)


def _line(index: Sequence[int], shape: Sequence[int]) -> int:
    """Return the number of the line that has the element at ``index``."""
    row = 0
    for at, length in zip(index[:-1], shape[:-1], strict=True):
        row = row * length + at
    return row * _lines_per_row(shape) + (index[-1] // LINE if index else 0)


def _last_index(place: Box) -> list[int]:
    return [first + size - 1 for first, size in zip(*place, strict=True)]


def _run_length(shape: Sequence[int], in_blocks: bool) -> int:
    if in_blocks:
        return max(1, math.prod(shape[:-1]) * _lines_per_row(shape))
    return max(1, RUN // min(LINE, max(1, *shape[-1:], 1)))


# -- hashes ---------------------------------------------------------------------------------------


def signed(number: int) -> int:
    """Return the int64 value that equals an integer modulo 2^64."""
    return (number + (1 << 63)) % (1 << 64) - (1 << 63)


@lru_cache(maxsize=1 << 16)
def hash_of(name: str) -> int:
    return signed(int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "big"))


def bits_of(values: Tensor) -> Tensor:
    """Return the bits of each element as a signed integer of the element's width."""
    return values.view(_INTEGERS[values.itemsize])


@lru_cache(maxsize=1 << 16)
def factor_of(name: str, block: int) -> int:
    """Return the odd factor of the ``block``-th group of 65,536 lines of the tensor ``name``."""
    return hash_of(f"{block} {name}") | 1


@lru_cache
def weights_of(device: torch.device) -> tuple[Tensor, Tensor]:
    """Return odd factors for 65,536 lines, and for 65,536 columns: two int64 tensors of shape
    (65536,).

    The SplitMix64 generator (Steele et al. 2014) computes the factors.
    """
    x = torch.arange(1, 2 * LINE + 1, device="cpu") * signed(0x9E3779B97F4A7C15)
    x = (x ^ (x >> 30 & (1 << 34) - 1)) * signed(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> 27 & (1 << 37) - 1)) * signed(0x94D049BB133111EB)
    lines, columns = (x ^ (x >> 31 & (1 << 33) - 1) | 1).to(device).tensor_split(2)
    return lines, columns


def inverse(odd: Tensor) -> Tensor:
    """Return the inverses of odd int64 numbers modulo 2^64, by Newton's method."""
    x = odd
    for _ in range(5):  # 3 bits are right at first; each step doubles their number.
        x = x * (2 - odd * x)
    return x
