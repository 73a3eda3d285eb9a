"""The model's parameters as they were last seen, to notice what was done to them from outside."""

from __future__ import annotations

import itertools
import operator
import weakref
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mp_optim.slots.tensors import all_same, are_plain, held_tensor

_VERSION = operator.attrgetter("_version")
_DTYPE = operator.attrgetter("dtype")


class Marks(NamedTuple):
    """What tells that parameters were replaced, written, moved or laid out anew, as columns: one
    call of C for each entry.

    How large the memory is says its address: torch never resizes memory where it lies. Of what is
    contiguous the shape says the strides, so that True stands for them.
    """

    versions: list[int]
    addresses: list[int]
    shapes: list[torch.Size]
    strides: list[Any]
    dtypes: list[torch.dtype]

    @classmethod
    def of(cls, params: Sequence[Tensor], plain: bool) -> Marks:
        """The marks of some parameters; ``plain`` is whether all are plain tensors."""
        held = params if plain else list(map(held_tensor, params))
        versions = list(map(_VERSION, params))
        if plain:
            addresses = list(map(Tensor.data_ptr, held))
        else:
            # A DTensor counts what is done to it, its local tensor what is done to that.
            versions = list(map(operator.add, versions, map(_VERSION, held)))
            addresses = [tensor.data_ptr() if are_plain([tensor]) else 0 for tensor in held]
        strides: list[Any] = list(map(Tensor.is_contiguous, held))
        if not all(strides):
            strides = [yes or tensor.stride() for yes, tensor in zip(strides, held, strict=True)]
        shapes, dtypes = list(map(Tensor.size, held)), list(map(_DTYPE, held))
        return cls(versions, addresses, shapes, strides, dtypes)

    def rows(self) -> Iterable[tuple[Any, ...]]:
        """The marks of each parameter."""
        return zip(*self, strict=True)


class SeenParams:
    """Some parameters, and for each how often its data was written, where it lies, and how. To
    replace, write, move or reshape one changes that, ``param.data = ...`` included.

    An address alone may be that of other memory by now: torch tells when the memory of a parameter
    is freed, so that asking costs nothing and nothing is kept alive.

    Attributes:
        params: the tensors.
        plain: whether all of them are plain tensors.
        marks: how they were.
    """

    def __init__(self, params: Iterable[Tensor] = ()) -> None:
        self.params: list[Tensor] = []
        self.plain = True
        self.marks = Marks([], [], [], [], [])
        self._gone: set[int] = set()  # indices whose memory was freed
        self._watched: dict[int, weakref.ref[Any]] = {}
        self.extend(list(params))

    def extend(self, params: Sequence[Tensor]) -> None:
        """Take more parameters as seen."""
        start, plain = len(self.params), are_plain(params)
        self.params += params
        columns: Iterable[tuple[list[Any], list[Any]]]
        columns = zip(self.marks, Marks.of(params, plain), strict=True)
        for column, more in columns:
            column += more
        self.plain = self.plain and plain
        self._watch(range(start, len(self.params)))

    def look(self, params: Sequence[Tensor]) -> None:
        """Take what is there now as seen."""
        self.plain = are_plain(params)
        before, self.marks = self.marks, Marks.of(params, self.plain)
        moved = [
            index
            for index, param in enumerate(params)
            if self.marks.addresses[index] != before.addresses[index]
            or param is not self.params[index]
        ]
        self.params = list(params)
        self._watch([*moved, *self._gone])

    def written(self) -> None:
        """The parameters were written by a step, and by nothing else."""
        if self.plain:
            self.marks.versions[:] = map(_VERSION, self.params)
        else:
            self.marks = Marks.of(self.params, self.plain)

    def changed(self, params: Sequence[Tensor]) -> list[int]:
        """Indices of parameters that are other tensors than were last seen, or were written, moved
        or reshaped since."""
        same = all_same(params, self.params)
        marks = Marks.of(params, self.plain if same else are_plain(params))
        if same and marks == self.marks and not self._gone:
            return []
        rows = zip(params, self.params, marks.rows(), self.marks.rows(), strict=True)
        return [
            index
            for index, (param, seen, now, before) in enumerate(rows)
            if param is not seen or index in self._gone or now != before
        ]

    def moved(self, params: Sequence[Tensor]) -> bool:
        """Whether parameters are others than were last seen, or were moved or reshaped since; a
        write is neither."""
        if self._gone or not all_same(params, self.params):
            return True
        return Marks.of(params, self.plain)[1:] != self.marks[1:]

    def is_same(self, index: int, param: Tensor) -> bool:
        """Whether a parameter is the one that was last seen at an index, and was neither written,
        moved nor reshaped since."""
        if param is not self.params[index] or index in self._gone:
            return False
        now: Iterable[list[Any]] = Marks.of([param], self.plain)
        before: Iterable[list[Any]] = self.marks
        return all(a[0] == b[index] for a, b in zip(now, before, strict=True))

    def has_shape(self, index: int, param: Tensor) -> bool:
        """Whether a parameter has the shape of the one that was last seen at an index."""
        return held_tensor(param).shape == self.marks.shapes[index]

    def _watch(self, indices: Iterable[int]) -> None:
        """Notice when the memory of these parameters is freed: others' may get its address."""
        for index in list(indices):
            self._gone.discard(index)
            self._watched.pop(index, None)
            local = held_tensor(self.params[index])
            if are_plain([local]):
                self._watched[index] = _when_freed(local, index, self._gone)


def _when_freed(tensor: Tensor, index: int, gone: set[int]) -> weakref.ref[Any]:
    return weakref.ref(tensor.untyped_storage(), lambda _: gone.add(index))


_Span = tuple[str, int, int, str, Tensor]


def check_memory(named: Iterable[tuple[str, Tensor]]) -> None:
    """Refuse parameters whose elements share memory, with each other or with another parameter's.

    Raises:
        ValueError: there are some, naming them.
    """
    spans: list[_Span] = []
    for name, param in named:
        local = held_tensor(param)
        if local.is_meta or not are_plain([local]) or not local.numel():
            continue
        if not local.is_contiguous() and _is_expanded(local):
            raise ValueError(
                f"{name} has shape {tuple(local.shape)} and strides {local.stride()}: several of "
                "its elements are one memory (expand), so a step has no single value for them; "
                "make it with .contiguous() or .clone(), or train what it was expanded from"
            )
        first = local.data_ptr()
        end = first + (_last(local) + 1) * local.itemsize
        spans.append((str(local.device), first, end, name, local))
    spans.sort(key=lambda span: span[:3])
    for one, other in itertools.pairwise(spans):
        # Without a neighbour that overlaps there is no pair at all.
        if one[0] == other[0] and other[1] < one[2]:
            _check_pairs(spans)
            return


def _check_pairs(spans: list[_Span]) -> None:
    for index, (device, _, end, name, tensor) in enumerate(spans):
        later = itertools.islice(spans, index + 1, None)
        for there, start, _, other, another in later:
            if there != device or start >= end:
                break
            if _meet(tensor, another):
                raise ValueError(
                    f"{name} and {other} are two parameters that share memory, which two states "
                    "would step against each other; tie them by using one Parameter in both "
                    "modules"
                )


def _last(tensor: Tensor) -> int:
    """How far the last element is from the first, in elements."""
    extents = zip(tensor.shape, tensor.stride(), strict=True)
    return sum((size - 1) * step for size, step in extents)


def _is_expanded(tensor: Tensor) -> bool:
    reach = 0
    sides = zip(tensor.stride(), tensor.shape, strict=True)
    for step, size in sorted(side for side in sides if side[1] > 1):
        if step <= reach:  # it may be: torch.as_strided can interlock rows
            different = torch.unique(_places(tensor)).numel()
            return bool(different < tensor.numel())
        reach += (size - 1) * step
    return False


def _meet(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors whose memory overlaps have an element in common: columns of one matrix
    have none."""
    if one.is_contiguous() and other.is_contiguous():
        return True
    theirs = torch.isin(_addresses(one), _addresses(other))
    return bool(theirs.any())


def _addresses(tensor: Tensor) -> Tensor:
    """The address of each element, in units of the parameter's elements."""
    return _places(tensor) + tensor.data_ptr() // tensor.itemsize


def _places(tensor: Tensor) -> Tensor:
    """How far each element is from the first, in elements."""
    places = torch.zeros(1, dtype=torch.int64, device="cpu")
    for size, step in zip(tensor.shape, tensor.stride(), strict=True):
        along = torch.arange(size, device="cpu") * step
        places = (places.unsqueeze(-1) + along).flatten()
    return places
