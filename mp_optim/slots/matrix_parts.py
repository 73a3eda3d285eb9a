"""Which ranks have which parts of a parameter's matrices: pure functions of shapes."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from torch import Tensor


class Box(NamedTuple):
    """A rectangle in a matrix: index of its first row and column, and how many it has."""

    row: int
    column: int
    rows: int
    columns: int

    @property
    def numel(self) -> int:
        return self.rows * self.columns

    def of(self, matrix: Tensor) -> Tensor:
        """The rectangle, as a view."""
        return matrix[
            self.row : self.row + self.rows,
            self.column : self.column + self.columns,
        ]


Part = tuple[Box, ...]
"""What a rank has of a matrix: rectangles, whose elements follow each other in its memory."""


def numel_of(part: Part) -> int:
    """Elements of a part."""
    return sum(box.numel for box in part)


def range_of(box: Box, first: int, stop: int) -> Part:
    """Elements [first, stop) of a rectangle that is flattened by rows: the end of a row, whole
    rows, the beginning of one."""
    part: list[Box] = []
    while first < stop:
        row, column = divmod(first, box.columns)
        whole_rows = 0 if column else (stop - first) // box.columns
        columns = min(box.columns - column, stop - first)
        piece = Box(box.row + row, box.column + column, max(whole_rows, 1), columns)
        part.append(piece)
        first += piece.numel
    return tuple(part)


def parts_of_range(part: Part, first: int, stop: int, matrices: int) -> list[Part]:
    """Of a stack of parts that is flattened, elements [first, stop): the part of each matrix."""
    numel = numel_of(part)
    return [
        _range_of_part(part, first - start, stop - start)
        for start in (index * numel for index in range(matrices))
    ]


def _range_of_part(part: Part, first: int, stop: int) -> Part:
    found: list[Box] = []
    for box in part:
        found += range_of(box, max(first, 0), min(stop, box.numel))
        first, stop = first - box.numel, stop - box.numel
    return tuple(found)


class Grid(NamedTuple):
    """Ranks along several axes, numbered by rows."""

    shape: tuple[int, ...]

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    def coordinates(self, rank: int) -> tuple[int, ...]:
        """Of a rank, one for each axis."""
        found = []
        for length in reversed(self.shape):
            rank, place = divmod(rank, length)
            found.append(place)
        return tuple(reversed(found))

    def block(self, *first: int) -> range:
        """The ranks with these first coordinates."""
        size = math.prod(self.shape[len(first) :])
        begin = 0
        for place, length in zip(first, self.shape, strict=False):
            begin = begin * length + place
        return range(begin * size, (begin + 1) * size)


@dataclass(frozen=True, eq=False)
class MatrixParts:
    """The matrices of one parameter, or those of a stack that some ranks have, and who has which
    part.

    Attributes:
        grid: the ranks; each has a part of each matrix, which may be empty.
        rows, columns: of a matrix.
        parts: for each matrix the part of each rank, in the order of the grid.
    """

    grid: Grid
    rows: int
    columns: int
    parts: tuple[tuple[Part, ...], ...]

    @cached_property
    def sizes(self) -> tuple[tuple[int, ...], ...]:
        """For each matrix the elements that each rank has of it."""
        sizes_of = {parts: tuple(map(numel_of, parts)) for parts in set(self.parts)}
        return tuple(sizes_of[parts] for parts in self.parts)

    @cached_property
    def _bounds(self) -> list[list[int]]:
        by_rank = zip(*self.sizes, strict=True)
        return [list(itertools.accumulate(sizes, initial=0)) for sizes in by_rank]

    def bounds(self, rank: int) -> list[int]:
        """Where a rank's part of each matrix begins among all its parts, and where the last one
        ends."""
        return self._bounds[rank] if self.parts else [0]
