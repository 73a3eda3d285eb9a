"""Writing tensors, in two parts.

Planning decides which rank writes what; it is where the ranks talk. Writing then needs no other
rank, so it can happen in the background, from a snapshot of just what this rank writes.
"""

from __future__ import annotations

import hashlib
import math
import os
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor

from mp_optim.checkpoint.durable import naming, write_durably
from mp_optim.checkpoint.garbage import uncollected
from mp_optim.checkpoint.index import (
    BLOCK_BYTES,
    INDEX,
    Index,
    Saved,
    SavedBox,
    as_json,
)
from mp_optim.checkpoint.manifest import FileSum, file_sum
from mp_optim.checkpoint.metadata import METADATA, as_metadata
from mp_optim.checkpoint.payload import header, memory_of
from mp_optim.checkpoint.pieces import Place, piece, whole_place
from mp_optim.checkpoint.plans import Holding, Share, Whole, holding_of, shares
from mp_optim.checkpoint.ranks import Ranks

_TINY = 64
"""Bytes up to which equal tensors of one save are written once (step counts)."""


class _SummedFile:
    """A new file, summed up while it is written, so that what was meant is on record, not what
    arrived."""

    def __init__(self, path: Path) -> None:
        self._path, self._file = path, path.open("wb")
        self._block, self._used = bytearray(BLOCK_BYTES), 0
        self._digest = hashlib.sha256()
        self.size = 0
        self.blocks: list[int] = []

    def write(self, data: bytes | memoryview) -> None:
        self.size += len(data)
        rest = memoryview(data)
        while rest:
            take = min(BLOCK_BYTES - self._used, len(rest))
            if take == BLOCK_BYTES:
                self._put(rest[:take])
            else:
                self._block[self._used : self._used + take] = rest[:take]
                self._used += take
                if self._used == BLOCK_BYTES:
                    self._put(memoryview(self._block))
                    self._used = 0
            rest = rest[take:]

    def _put(self, block: memoryview) -> None:
        self.blocks.append(zlib.crc32(block))
        self._digest.update(block)
        with naming(self._path):
            self._file.write(block)

    def finish(self) -> FileSum:
        """Write the rest and wait until everything is on the disk."""
        if self._used:
            self._put(memoryview(self._block)[: self._used])
        with naming(self._path):
            self._file.flush()
            os.fsync(self._file.fileno())
            self._file.close()
        return FileSum(self.size, self._digest.hexdigest())

    def close(self) -> None:
        """Give up the file; harmless after :meth:`finish`."""
        with suppress(OSError):  # a full disk refuses what was buffered once more
            self._file.close()


class Written(NamedTuple):
    """A box in a file."""

    entry: Whole
    place: Place
    start: int


@dataclass(frozen=True)
class Part:
    """What one rank wrote: boxes, in one file or none."""

    file: str
    sum: FileSum | None = None
    blocks: Sequence[int] = ()
    written: Sequence[Written] = ()


@dataclass
class Writing:
    """One rank's share of a save that is planned."""

    folder: Path
    rank: int
    items: list[tuple[Whole, Place, Tensor]] = field(repr=False)

    def take_snapshot(self) -> None:
        """Copy to the host what this rank writes; the tensors may change from here on."""
        self.items = [
            (entry, place, value.to("cpu", copy=True))
            for entry, place, value in self.items
        ]

    @uncollected()
    def write(self) -> Part:
        """Write this rank's file, synced. No communication."""
        name = f"__{self.rank}_0.distcp"
        if not self.items:
            return Part(name)
        file = _SummedFile(self.folder / name)
        try:
            written = list(_written(file, self.items))
            return Part(name, file.finish(), file.blocks, written)
        finally:
            file.close()

    @uncollected()
    def finish(self, parts: list[Part]) -> dict[str, FileSum]:
        """On the first rank, after all have written: write what is where.

        Returns:
            The files of all ranks.
        """
        index = _index_of(parts)
        files = {part.file: part.sum for part in parts if part.sum is not None}
        contents = {INDEX: as_json(index), METADATA: as_metadata(index, self.folder)}
        for name, content in contents.items():
            write_durably(self.folder / name, content)
            files[name] = file_sum(self.folder / name)
        return files


def _written(
    file: _SummedFile, items: list[tuple[Whole, Place, Tensor]]
) -> Iterator[Written]:
    tiny: dict[tuple[torch.dtype, tuple[int, ...], bytes], int] = {}
    for entry, place, value in items:
        if entry.dtype.is_complex:
            value = value.resolve_conj()
        content = value.cpu().contiguous()
        memory, before = memory_of(content), header(entry.dtype, place.sizes)
        start = file.size + len(before)
        if len(memory) <= _TINY:
            start = tiny.setdefault((entry.dtype, place.sizes, bytes(memory)), start)
        if start > file.size:
            file.write(before)
            file.write(memory)
        yield Written(entry, place, start)


def _index_of(parts: list[Part]) -> Index:
    entries: dict[str, Saved] = {}
    for part in parts:
        for (name, dtype, shape), place, start in part.written:
            saved = entries.setdefault(name, Saved(dtype, shape, []))
            length = math.prod(place.sizes) * dtype.itemsize
            saved.boxes.append(SavedBox(*place, part.file, start, length))
    sums = {part.file: part.blocks for part in parts if part.sum is not None}
    return Index(entries, sums)


# -- planning -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Plan:
    holding: Holding
    sheets: dict[bytes, tuple[Whole, ...]]
    share: Share


_plans: WeakKeyDictionary[dist.ProcessGroup, _Plan] = WeakKeyDictionary()
"""This rank's share at its last save with a group; good as long as no rank of it holds anything
else."""


def plan_writing(
    tensors: Mapping[str, Tensor], folder: Path, ranks: Ranks, *, snapshot: bool
) -> Writing:
    """Decide what each rank writes; equal entries of several ranks are written once.

    Args:
        tensors: this rank's entries; the same names may be on several ranks.
        folder: an empty directory that all ranks see.
        snapshot: copy what this rank writes.

    Raises:
        ValueError: ranks disagree about an entry, naming it.
    """
    what = "planning a checkpoint"
    held: list[Holding] = []
    sheets: dict[bytes, tuple[Whole, ...]] = {}
    known = _plans.get(ranks.group) if ranks.group is not None else None

    def describe() -> tuple[bool, list[bytes]]:
        held.append(holding_of(tensors))
        is_known = known is not None and known.holding == held[0]
        if ranks.size > 1:
            sheets.update(known.sheets if known and is_known else held[0].sheets())
        return is_known, list(sheets)

    told = ranks.agree(what, describe)
    (holding,) = held
    share = Share(frozenset(entry.name for entry in holding.whole))
    if ranks.group is not None:
        unchanged = ranks.broadcast(all(same for same, _ in told))
        if unchanged and known is not None:
            share = known.share
        else:
            share = _shared(holding, sheets, [digests for _, digests in told], ranks)
        _plans[ranks.group] = _Plan(holding, sheets, share)
    with uncollected():
        writing = Writing(folder, ranks.rank, list(_items(tensors, holding, share)))
    if snapshot:
        ranks.agree("copying what is saved", writing.take_snapshot)
    return writing


def _shared(
    holding: Holding,
    sheets: Mapping[bytes, tuple[Whole, ...]],
    held: list[list[bytes]],
    ranks: Ranks,
) -> Share:
    """This rank's share; ``held`` is everybody's digests on the first rank, which decides."""
    first: dict[bytes, int] = {}
    for rank, digests in enumerate(held):
        for digest in digests:
            first.setdefault(digest, rank)
    speakers = ranks.broadcast(first)
    mine = [digest for digest in sheets if speakers[digest] == ranks.rank]
    told = ranks.gather(({digest: sheets[digest] for digest in mine}, holding.parts))

    def decide() -> list[Share]:
        everything: dict[bytes, tuple[Whole, ...]] = {}
        for spoken, _ in told:
            everything |= spoken
        return shares(everything, held, [parts for _, parts in told])

    return ranks.scatter(ranks.on_first("planning a checkpoint", decide) or [])


def _items(
    tensors: Mapping[str, Tensor], holding: Holding, share: Share
) -> Iterator[tuple[Whole, Place, Tensor]]:
    for entry in holding.whole:
        if entry.name in share.whole:
            place = whole_place(entry.shape)
            yield entry, place, piece(tensors[entry.name], place)
    for part in holding.parts:
        entry, left_out = Whole(*part[:3]), share.left_out.get(part.name, ())
        for place in part.places:
            if place not in left_out:
                yield entry, place, piece(tensors[part.name], place)
