"""Reading tensors: everything a rank is about to read is checked before anything is replaced."""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import add, sub
from pathlib import Path
from typing import BinaryIO, NamedTuple

import torch
from torch import Tensor

from mp_optim.checkpoint.folder import inside
from mp_optim.checkpoint.garbage import uncollected
from mp_optim.checkpoint.index import (
    INDEX,
    Index,
    Saved,
    SavedBox,
    from_json,
)
from mp_optim.checkpoint.inert import load_plain
from mp_optim.checkpoint.manifest import BLOCK_BYTES, Manifest, read_checked
from mp_optim.checkpoint.metadata import METADATA, from_metadata
from mp_optim.checkpoint.payload import memory_of
from mp_optim.checkpoint.pieces import Place, narrowed, piece, places_of, whole_place
from mp_optim.checkpoint.plans import any_overlap

_STAGING_BYTES = 64 << 20
"""Bytes that are read at a time where elements do not go to where they belong at once; at least one
row."""


Look = Callable[[Tensor], None]
"""Raises ValueError if elements of a tensor may not have the values that they have."""


class _Copy(NamedTuple):
    """Elements ``[begin, begin + sizes)`` of a saved box of an entry, and the memory they belong
    in."""

    name: str
    box: SavedBox
    begin: tuple[int, ...]
    sizes: tuple[int, ...]
    target: Tensor

    def rows(self) -> tuple[int, int]:
        """Bytes of the box that hold them: whole rows of its first dimension."""
        if not self.sizes:
            return self.box.start, self.box.start + self.box.length
        row = math.prod(self.box.sizes[1:]) * self.target.itemsize
        first = self.box.start + self.begin[0] * row
        return first, first + self.sizes[0] * row

    def is_contiguous(self) -> bool:
        """Whether those bytes are nothing else, and belong in one piece of the host's memory."""
        return (
            self.sizes[1:] == self.box.sizes[1:]
            and self.target.device.type == "cpu"
            and self.target.is_contiguous()
        )


@dataclass(frozen=True)
class Reading:
    """What one rank reads of a version."""

    version: Path
    index: Index
    copies: Sequence[_Copy]

    def check(self, looks: Mapping[str, Look]) -> None:
        """Read it and compare checksums; nothing is written.

        Args:
            looks: by names of entries, what looks at their elements while they go by: some at a
                time, in a tensor of one dimension. Of a part they may be neighbours' elements, too.

        Raises:
            ValueError: bytes are not those that were written, naming the file; or what a look
                raises.
        """
        if self.index.sums is None:
            for file, copy in self._in_order():
                values = _unpickled(file, copy, self.version)
                looks.get(copy.name, _look_away)(values.reshape(-1))
            return
        for name, copies in self._by_file().items():
            with inside(self.version, name, INDEX).open("rb") as file:
                blocks = _Blocks(file, self.index.sums[name], self.version / name)
                for copy in sorted(copies, key=_Copy.rows):
                    blocks.check(copy, looks.get(copy.name))

    def read(self, names: Collection[str]) -> None:
        """Copy the elements of these entries to where they belong."""
        read = _read if self.index.sums is not None else _read_unpickled
        for file, copy in self._in_order():
            if copy.name in names:
                read(file, copy, self.version)

    def _by_file(self) -> dict[str, list[_Copy]]:
        copies: dict[str, list[_Copy]] = {}
        for copy in self.copies:
            copies.setdefault(copy.box.file, []).append(copy)
        return copies

    def _in_order(self) -> Iterator[tuple[BinaryIO, _Copy]]:
        """Every copy with its open file, in the order of the bytes."""
        for name, copies in self._by_file().items():
            with inside(self.version, name, INDEX).open(
                "rb", buffering=BLOCK_BYTES
            ) as file:
                for copy in sorted(copies, key=lambda one: one.box.start):
                    yield file, copy


@uncollected()
def read_index(version: Path, manifest: Manifest) -> Index:
    """What a version holds and where; of an older version of mp_optim, too.

    Raises:
        ValueError: what says so is damaged or no plain data.
    """
    name, parse = (
        (INDEX, from_json) if INDEX in manifest.files else (METADATA, from_metadata)
    )
    content = read_checked(version, manifest, name)
    sizes = {file: entry.bytes for file, entry in manifest.files.items()}
    try:
        return parse(content, sizes)
    except ValueError as error:
        raise ValueError(
            f"{version / name} is damaged or no plain data: {error}"
        ) from error


@uncollected()
def plan_reading(tensors: Mapping[str, Tensor], version: Path, index: Index) -> Reading:
    """Find the saved elements for every element of tensors of the saved dtypes and shapes.

    Raises:
        ValueError: elements are nowhere in the checkpoint, naming the tensor.
    """
    copies: list[_Copy] = []
    for name, tensor in tensors.items():
        saved = index.entries[name]
        places = places_of(tensor)
        for place in (whole_place(tuple(tensor.shape)),) if places is None else places:
            copies += _copies(name, saved, place, piece(tensor, place))
    return Reading(version, index, copies)


def _copies(name: str, saved: Saved, place: Place, target: Tensor) -> list[_Copy]:
    """What fills one box of a tensor."""
    if not target.numel():
        return []
    result = []
    filled = []
    for box in saved.boxes:
        begins = tuple(map(max, place.offsets, box.offsets))
        ends = map(min, _ends(place), _ends(box))
        sizes = tuple(map(sub, ends, begins))
        if all(size > 0 for size in sizes):
            view = narrowed(target, map(sub, begins, place.offsets), sizes)
            inner = tuple(map(sub, begins, box.offsets))
            result.append(_Copy(name, box, inner, sizes, view))
            filled.append(Place(begins, sizes))
    count = sum(math.prod(copy.sizes) for copy in result)
    if count != target.numel() or any_overlap(filled):
        raise ValueError(
            f"{name}: the checkpoint does not hold each element of the box of {place.sizes} at "
            f"{place.offsets} once"
        )
    return result


def _ends(box: Place | SavedBox) -> Iterable[int]:
    return map(add, box.offsets, box.sizes)


def _look_away(values: Tensor) -> None:
    """At elements that may have any value."""


class _Blocks:
    """Blocks of a file, whose checksums are compared as they are read.

    Args:
        sums: of the file's blocks, in order.
    """

    def __init__(self, file: BinaryIO, sums: Sequence[int], path: Path) -> None:
        self._file, self._sums, self._path = file, sums, path
        self._number, self._block = -1, b""

    def check(self, copy: _Copy, look: Look | None) -> None:
        """Read the blocks that a copy needs, and look at their elements if somebody wants to."""
        begin, end = copy.rows()
        cut = b""
        for number in range(begin // BLOCK_BYTES, -(-end // BLOCK_BYTES)):
            block, start = self._read(number), number * BLOCK_BYTES
            if look is not None:
                part = bytearray(cut + block[max(0, begin - start) : end - start])
                count = len(part) // copy.target.itemsize
                if count:
                    look(torch.frombuffer(part, dtype=copy.target.dtype, count=count))
                cut = bytes(part[count * copy.target.itemsize :])

    def _read(self, number: int) -> bytes:
        if number != self._number:
            self._file.seek(number * BLOCK_BYTES)
            block = self._file.read(BLOCK_BYTES)
            if zlib.crc32(block) != self._sums[number]:
                raise ValueError(
                    f"{self._path} is damaged: bytes from {number * BLOCK_BYTES} on are not those "
                    "that were written; nothing was loaded"
                )
            self._number, self._block = number, block
        return self._block


def _read(file: BinaryIO, copy: _Copy, version: Path) -> None:
    begin, end = copy.rows()
    file.seek(begin)
    if copy.is_contiguous():
        _fill(file, memory_of(copy.target), version, copy)
        return
    first_dim, *others = copy.sizes or (1,)
    target = copy.target if copy.sizes else copy.target.view(1)
    rows = max(1, _STAGING_BYTES * first_dim // (end - begin))
    for start in range(0, first_dim, rows):
        count = min(rows, first_dim - start)
        staged = torch.empty(
            (count, *copy.box.sizes[1:]), dtype=target.dtype, device="cpu"
        )
        _fill(file, memory_of(staged), version, copy)
        part = narrowed(staged, (0, *copy.begin[1:]), (count, *others))
        target.narrow(0, start, count).copy_(part)


def _fill(file: BinaryIO, memory: memoryview, version: Path, copy: _Copy) -> None:
    count = file.readinto(memory)  # type: ignore[attr-defined]
    if count != len(memory):
        raise ValueError(
            f"{version / copy.box.file} ends at byte {file.tell()}, in the middle of a tensor"
        )


def _read_unpickled(file: BinaryIO, copy: _Copy, version: Path) -> None:
    copy.target.copy_(_unpickled(file, copy, version))


def _unpickled(file: BinaryIO, copy: _Copy, version: Path) -> Tensor:
    """Elements of a box that ``torch.save`` wrote."""
    file.seek(copy.box.start)
    try:
        tensor = load_plain(file.read(copy.box.length))
    except Exception as error:  # damage raises anything, and so does what is no tensor
        raise ValueError(
            f"{version / copy.box.file} is damaged: bytes {copy.box.start} to "
            f"{copy.box.start + copy.box.length} are no tensor ({type(error).__name__})"
        ) from error
    form = copy.target.dtype, copy.box.sizes
    if not isinstance(tensor, Tensor) or (tensor.dtype, tuple(tensor.shape)) != form:
        raise ValueError(
            f"{version / copy.box.file} is damaged: bytes {copy.box.start} to "
            f"{copy.box.start + copy.box.length} are another tensor than .metadata says"
        )
    return narrowed(tensor, copy.begin, copy.sizes)
