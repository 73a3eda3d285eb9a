"""Reading of a version's tensors: a rank checks all bytes that it will read before it replaces any
value.

:func:`open_checkpoint` reads tensors without a model.
"""

from __future__ import annotations

import math
import os
import zlib
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from operator import sub
from pathlib import Path
from typing import BinaryIO, NamedTuple

import torch
from torch import Tensor

from mp_optim.checkpoint.commit import inside, newest
from mp_optim.checkpoint.file_format import (
    BLOCK_BYTES,
    INDEX,
    Files,
    Index,
    Saved,
    SavedBox,
    byte_view,
    read_index,
    read_manifest,
)
from mp_optim.core.flat_shard import held_boxes, piece
from mp_optim.core.partition import Box, any_overlap

_STAGING_BYTES = 64 << 20
"""Size in bytes of the host buffer for elements that cannot be read directly into their tensor. The
buffer has at least one row."""

ValueCheck = Callable[[Tensor], None]
"""Function that raises ValueError if the optimizer refuses a value in a tensor."""


class _Copy(NamedTuple):
    """Elements of a saved box that are copied into a tensor.

    Attributes:
        name: name of the saved tensor.
        box: the saved box.
        part: offsets and sizes of the elements in the saved box.
        target: view of the tensor that receives the elements.
    """

    name: str
    box: SavedBox
    part: Box
    target: Tensor

    def rows(self) -> tuple[int, int]:
        """Return the positions in the file of the rows of the box that have the elements: the first
        byte, and the byte after the last. A row is an index of the first dimension."""
        if not self.part.sizes:
            return self.box.start, self.box.start + self.box.length
        row = math.prod(self.box.place.sizes[1:]) * self.target.itemsize
        first = self.box.start + self.part.offsets[0] * row
        return first, first + self.part.sizes[0] * row


@dataclass(frozen=True)
class Reading:
    """The reads that fill tensors of one rank from the files of a version, sorted by position in
    the file.

    Attributes:
        version: folder of the version.
        index: names and positions of the version's tensors.
        copies: the reads, by file name.
    """

    version: Path
    index: Index
    copies: Mapping[str, Sequence[_Copy]]

    def check(self, value_checks: Mapping[str, ValueCheck]) -> None:
        """Read all bytes that :meth:`read` will read, and compare their checksums. No tensor is
        written.

        Args:
            value_checks: functions by the name of the saved tensor. Each function gets the tensor's
                elements in 1-D tensors of at most 1 MiB, which may include neighbouring elements.

        Raises:
            ValueError: bytes differ from the written bytes (the message names the file), or a value
                check raised.
        """
        for name, copies in self.copies.items():
            number, block = -1, b""
            with inside(self.version, name, INDEX).open("rb") as file:
                for copy in copies:
                    begin, end = copy.rows()
                    check, rest = value_checks.get(copy.name), b""
                    for wanted in range(begin // BLOCK_BYTES, -(-end // BLOCK_BYTES)):
                        if wanted != number:
                            number, block = wanted, self._checked_block(file, name, wanted)
                        if check is None:
                            continue
                        # An element may begin in one block and end in the next, so keep the bytes
                        # of an incomplete element for the next block.
                        start, dtype = number * BLOCK_BYTES, copy.target.dtype
                        rest += block[max(0, begin - start) : end - start]
                        if count := len(rest) // dtype.itemsize:
                            check(torch.frombuffer(bytearray(rest), dtype=dtype, count=count))
                        rest = rest[count * dtype.itemsize :]

    def _checked_block(self, file: BinaryIO, name: str, number: int) -> bytes:
        file.seek(number * BLOCK_BYTES)
        block = file.read(BLOCK_BYTES)
        if zlib.crc32(block) != self.index.sums[name][number]:
            raise ValueError(
                f"{self.version / name} is damaged: bytes from {number * BLOCK_BYTES} on differ "
                "from the written bytes; nothing was loaded, so load another version"
            )
        return block

    def read(self, names: Collection[str]) -> None:
        """Copy the elements of the named saved tensors into the tensors of this rank."""
        for name, copies in self.copies.items():
            with inside(self.version, name, INDEX).open("rb", buffering=BLOCK_BYTES) as file:
                for copy in copies:
                    if copy.name in names:
                        _read(file, copy, self.version)


def plan_reading(tensors: Mapping[str, Tensor], version: Path, index: Index) -> Reading:
    """Return the reads that fill every element of ``tensors`` from the files of a version. The
    tensors have the saved dtypes and shapes.

    Raises:
        ValueError: the checkpoint lacks elements of a tensor; the message names the tensor.
    """
    copies: dict[str, list[_Copy]] = {}
    for name, tensor in tensors.items():
        saved = index.entries[name]
        for place in held_boxes(tensor):
            target, filled = piece(tensor, place), []
            for box in saved.boxes if target.numel() else ():
                if (common := place.common(box.place)) is None:
                    continue
                inside = Box(tuple(map(sub, common.offsets, place.offsets)), common.sizes)
                of_box = Box(tuple(map(sub, common.offsets, box.place.offsets)), common.sizes)
                copy = _Copy(name, box, of_box, inside.of(target))
                copies.setdefault(box.file, []).append(copy)
                filled.append(common)
            if sum(part.numel for part in filled) != target.numel() or any_overlap(filled):
                raise ValueError(
                    f"{name}: the checkpoint does not have each element of the slice of shape "
                    f"{place.sizes} at offsets {place.offsets} once; load another version"
                )
    for of_file in copies.values():
        of_file.sort(key=_Copy.rows)
    return Reading(version, index, copies)


def _read(file: BinaryIO, copy: _Copy, version: Path) -> None:
    begin, end = copy.rows()
    file.seek(begin)
    is_of_host = copy.target.device.type == "cpu" and copy.target.is_contiguous()
    # If the elements are whole rows of the box, their order in the file is the tensor's own order.
    # So they are read directly into the tensor.
    if is_of_host and copy.part.sizes[1:] == copy.box.place.sizes[1:]:
        _fill(file, byte_view(copy.target), version, copy)
        return
    first_dim, *others = copy.part.sizes or (1,)
    target = copy.target if copy.part.sizes else copy.target.view(1)
    rows = max(1, _STAGING_BYTES * first_dim // (end - begin))
    for start in range(0, first_dim, rows):
        count = min(rows, first_dim - start)
        staged = torch.empty((count, *copy.box.place.sizes[1:]), dtype=target.dtype, device="cpu")
        _fill(file, byte_view(staged), version, copy)
        part = Box((0, *copy.part.offsets[1:]), (count, *others))
        target.narrow(0, start, count).copy_(part.of(staged))


def _fill(file: BinaryIO, memory: memoryview, version: Path, copy: _Copy) -> None:
    count = file.readinto(memory)  # type: ignore[attr-defined]
    if count != len(memory):
        raise ValueError(
            f"{version / copy.box.file} ends at byte {file.tell()}, in the middle of a tensor; "
            "load another version"
        )


# -- without a model ------------------------------------------------------------------------------


@dataclass(frozen=True)
class Contents:
    """A complete version that is open for reading.

    Attributes:
        version: folder of the version.
        entries: tensors by name, sorted.
        files: files of the version by name.
        index: positions of the tensors, and checksums of the files.
    """

    version: Path
    entries: dict[str, Saved]
    files: Files
    index: Index

    def read(self, name: str) -> Tensor:
        """Return one whole tensor on the host.

        Raises:
            ValueError: the file's bytes differ from the written bytes.
        """
        entry = self.entries[name]
        tensor = torch.empty(entry.shape, dtype=entry.dtype, device="cpu")
        reading = plan_reading({name: tensor}, self.version, self.index)
        reading.check({})
        reading.read({name})
        return tensor


def open_checkpoint(path: str | os.PathLike[str]) -> Contents:
    """Open the newest version under a checkpoint directory, or one version.

    Raises:
        FileNotFoundError: the directory has no complete checkpoint.
        ValueError: files of the version are damaged.
    """
    version = newest(Path(path))
    files = read_manifest(version)
    index = read_index(version, files)
    return Contents(version, dict(sorted(index.entries.items())), files, index)
