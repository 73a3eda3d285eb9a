"""Writing tensors, in two parts.

Planning decides which rank writes what, by pure functions of what the ranks hold; it is where they
talk. Entries that a rank holds whole are the same on many ranks: each rank sends a digest of each
sheet of them (the model's, the optimizer's), and only one rank for each digest sends the entries.
Entries of which it holds parts are its own.

Writing then needs no other rank, so it can happen in the background, from a snapshot of just what
this rank writes. Each thread that writes has a file of its own, so that none waits for another.
"""

from __future__ import annotations

import hashlib
import heapq
import itertools
import math
import os
import threading
import zlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from concurrent import futures
from contextlib import closing
from dataclasses import dataclass, field
from functools import cached_property, partial
from operator import attrgetter, itemgetter
from pathlib import Path
from typing import NamedTuple
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor

from mp_optim.checkpoint.commit import naming, write_durably
from mp_optim.checkpoint.entries import STATE
from mp_optim.checkpoint.file_format import (
    BLOCK_BYTES,
    INDEX,
    METADATA,
    FileSum,
    Index,
    Saved,
    SavedBox,
    as_json,
    as_metadata,
    byte_view,
    file_sum,
    header,
)
from mp_optim.core.flat_shard import piece, places_of
from mp_optim.core.partition import Box, check_cover, whole_box
from mp_optim.host import host_memory, leases
from mp_optim.host.calls import in_background
from mp_optim.host.host_share import host_share
from mp_optim.host.leases import Lease, SaveBorrow, StagedBytes, is_plain, lend
from mp_optim.process_groups.agreement import Ranks

LENT_FROM = 16 << 10
"""Bytes of a tensor from which a copy costs more than a lease."""
FILE_FROM = 16 << 20
"""Bytes for which another file pays."""
_MOST_FILES = 8
_TINY = 64
"""Bytes up to which equal tensors of one file are written once (step counts)."""
_BUFFER = 4 * BLOCK_BYTES
"""Bytes that are summed up and written at a time."""
_BEGIN_EVERY = 32 << 20
"""Bytes after which the disk starts writing, rather than at the end."""


# -- who writes what ------------------------------------------------------------------------------

_Form = tuple[torch.dtype, tuple[int, ...], str]
"""Dtype, shape, and whether an entry is held "whole" or "sharded"."""


class Held(NamedTuple):
    """An entry, and the boxes that a rank holds of it; None for all."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    places: tuple[Box, ...] | None = None

    @property
    def bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


Sheets = Mapping[bytes, Sequence[Held]]
"""Entries that are the same on many ranks, by digest: those held whole, and, without boxes, those
that are split."""


@dataclass(frozen=True)
class Holding:
    """The entries of one rank.

    Attributes:
        whole: entries held whole.
        shards: entries that are split, also those of which this rank holds nothing.
    """

    whole: tuple[Held, ...]
    shards: tuple[Held, ...]

    @cached_property
    def sheets(self) -> Sheets:
        """Entries held whole, in one sheet for each beginning of names, and one sheet of the
        entries that are split; by digest."""
        sheets_by_key: dict[str, list[Held]] = {}
        for entry in self.whole:
            sheets_by_key.setdefault(entry.name.partition(".")[0], []).append(entry)
        if self.shards:
            sheets_by_key[""] = [entry._replace(places=()) for entry in self.shards]
        return {
            hashlib.sha256(repr(sheet).encode()).digest(): tuple(sheet)
            for sheet in sheets_by_key.values()
        }


@dataclass(frozen=True)
class WriteShare:
    """What a rank writes of what it holds.

    Attributes:
        whole: names of entries it holds whole.
        left_out: boxes that other ranks write, by name.
    """

    whole: frozenset[str]
    left_out: Mapping[str, tuple[Box, ...]] = field(default_factory=dict)


def holding_of(tensors: Mapping[str, Tensor]) -> Holding:
    whole, shards = [], []
    for name, tensor in tensors.items():
        places = places_of(tensor)
        if places is None:
            whole.append(Held(name, tensor.dtype, tuple(tensor.shape)))
        else:
            shards.append(Held(name, tensor.dtype, tuple(tensor.shape), places))
    return Holding(tuple(whole), tuple(shards))


def shares(
    sheets: Sheets, held: Sequence[Collection[bytes]], shards_of_ranks: Sequence[Sequence[Held]]
) -> list[WriteShare]:
    """What each rank writes: every element once, spread evenly.

    Args:
        sheets: of all ranks.
        held: digests of each rank's sheets.
        shards_of_ranks: what each rank holds of entries that are split.

    Raises:
        ValueError: ranks disagree about an entry, or hold parts that do not make a whole, naming
            it.
    """
    ranks_of: dict[bytes, list[int]] = {}
    for rank, digests in enumerate(held):
        for digest in digests:
            ranks_of.setdefault(digest, []).append(rank)
    _check_agreement(sheets, ranks_of, shards_of_ranks)
    loads = [0] * len(held)
    left_out = _shared_shards(shards_of_ranks, loads)
    written = _shared_wholes(sheets, ranks_of, loads)
    return list(map(WriteShare, map(frozenset, written), left_out))


def _shared_wholes(
    sheets: Sheets, ranks_of: Mapping[bytes, Sequence[int]], loads: list[int]
) -> list[list[str]]:
    """Each entry to the rank that has least to write of those that hold it; ``loads`` grow."""
    holders: dict[Held, tuple[bytes, ...]] = {}
    for digest, sheet in sheets.items():
        for entry in (entry for entry in sheet if entry.places is None):
            holders[entry] = (*holders.get(entry, ()), digest)
    alike: dict[tuple[bytes, ...], list[Held]] = {}
    for entry, held_by in holders.items():
        alike.setdefault(held_by, []).append(entry)
    written: list[list[str]] = [[] for _ in loads]
    for held_by, wholes in sorted(alike.items(), key=lambda item: len(item[0])):
        queue = [(loads[rank], rank) for digest in held_by for rank in ranks_of[digest]]
        heapq.heapify(queue)
        for entry in sorted(wholes, key=attrgetter("bytes"), reverse=True):
            load, rank = queue[0]
            written[rank].append(entry.name)
            loads[rank] = load + entry.bytes
            heapq.heapreplace(queue, (loads[rank], rank))
    return written


def _shared_shards(
    shards_of_ranks: Sequence[Sequence[Held]], loads: list[int]
) -> list[dict[str, tuple[Box, ...]]]:
    """The boxes that each rank leaves to another that holds them, too; ``loads`` grow."""
    first: dict[tuple[str, Box], int] = {}
    several: dict[tuple[str, Box], list[int]] = {}
    width: dict[str, int] = {}
    for rank, held in enumerate(shards_of_ranks):
        for entry in held:
            width[entry.name] = entry.dtype.itemsize
            for place in entry.places or ():
                other = first.setdefault((entry.name, place), rank)
                if other != rank:
                    several.setdefault((entry.name, place), [other]).append(rank)
    for (name, place), rank in first.items():
        if (name, place) not in several:
            loads[rank] += place.numel * width[name]
    left: list[dict[str, tuple[Box, ...]]] = [{} for _ in shards_of_ranks]
    for (name, place), ranks in several.items():
        writer = min(ranks, key=lambda rank: (loads[rank], rank))
        loads[writer] += place.numel * width[name]
        for rank in ranks:
            if rank != writer:
                left[rank][name] = (*left[rank].get(name, ()), place)
    return left


def _check_agreement(
    sheets: Sheets,
    ranks_of: Mapping[bytes, Sequence[int]],
    shards_of_ranks: Sequence[Sequence[Held]],
) -> None:
    """Raise ValueError if entries of one name differ between ranks, or if the ranks do not hold
    every element of a split entry that any of them knows of."""
    seen: dict[str, tuple[_Form, int]] = {}
    boxes: dict[tuple[str, tuple[int, ...]], set[Box]] = {}
    wholes = ((ranks_of[digest][0], sheet) for digest, sheet in sheets.items())
    for rank, entries in itertools.chain(wholes, enumerate(shards_of_ranks)):
        for name, dtype, shape, places in entries:
            own = (dtype, shape, "whole" if places is None else "sharded"), rank
            other = seen.setdefault(name, own)
            if other[0] != own[0]:
                (a, low), (b, high) = sorted((other, own), key=itemgetter(1))
                raise ValueError(
                    f"{name} is {a[0]} {a[1]}, {a[2]} on rank {low} and {b[0]} {b[1]}, {b[2]} on "
                    f"rank {high}; different things need different names"
                )
            if places is not None:
                boxes.setdefault((name, shape), set()).update(places)
    for (name, shape), held_boxes in boxes.items():
        check_cover(name, shape, held_boxes)


# -- what is written ------------------------------------------------------------------------------


class Item(NamedTuple):
    """A box to write: its elements, or what they are read from."""

    entry: Held
    place: Box
    content: Tensor | Lease | StagedBytes


@dataclass(frozen=True)
class WrittenFile:
    name: str
    sum: FileSum
    blocks: Sequence[int]
    written: Sequence[tuple[Held, SavedBox]]


@dataclass
class Writing:
    """One rank's share of a save that is planned.

    Attributes:
        params: entries that are parameters of the model.
    """

    folder: Path
    rank: int
    items: list[Item] = field(repr=False)
    params: Collection[str] = field(repr=False)
    _lent: SaveBorrow | None = field(default=None, repr=False)

    def take_snapshot(self) -> None:
        """Make sure that what is written are the bits of now: borrow what the optimizer keeps, and
        parameters on accelerators; copy the rest to the host.

        NOTE: the model's tensors on the host are copied because any code may write them; the
        optimizer's state is written by this package alone, which announces its writes. Buffers
        are written in forward.
        """
        lendable = {
            at: value
            for at, item in enumerate(self.items)
            if (value := _lendable(item)) is not None
        }
        self._lent = lent = lend(list(lendable.values()))
        lease_at: dict[int, Lease] = dict(zip(lendable, lent.leases, strict=True))
        self.items = [
            item._replace(
                content=lease_at.get(at)
                or _lent_of_device(item, lent, self.params)
                or _copied(item, lent)
            )
            for at, item in enumerate(self.items)
        ]
        lent.start()

    def wait_for_device(self, timeout: float | None = None) -> bool:
        """Wait until nothing of an accelerator is borrowed any more; whether that is so."""
        lent = self._lent  # which the save's thread may drop
        return lent is None or lent.wait_for_devices(timeout)

    def give_back(self) -> None:
        """Borrow nothing any more, and drop what was copied."""
        if self._lent is not None:
            self._lent.give_back()
            self._lent, self.items = None, []

    def write(self) -> list[WrittenFile]:
        """Write this rank's files, synced: one for each thread that is worth it. No communication.

        Raises:
            OSError: naming the file.
        """
        threads = host_share().threads // (1 if self._lent is None else 2)  # training has the rest
        names = (f"__{self.rank}_{number}.distcp" for number in itertools.count())
        paths = map(self.folder.joinpath, names)
        return _write_files(list(zip(_by_file(self.items, threads), paths, strict=False)))

    def finish(self, written: list[WrittenFile]) -> dict[str, FileSum]:
        """On the first rank, after all have written: write what is where.

        Returns:
            The files of all ranks.
        """
        entries: dict[str, Saved] = {}
        for file in written:
            for (name, dtype, shape, _), box in file.written:
                entries.setdefault(name, Saved(dtype, shape, [])).boxes.append(box)
        index = Index(entries, {file.name: file.blocks for file in written})
        files = {file.name: file.sum for file in written}
        contents = {INDEX: as_json(index), METADATA: as_metadata(index, self.folder)}
        for name, content in contents.items():
            write_durably(self.folder / name, content)
            files[name] = file_sum(self.folder / name)
        return files


def _lendable(item: Item) -> Tensor | None:
    value = item.content
    if not isinstance(value, Tensor) or not item.entry.name.startswith(STATE):
        return None
    is_large = host_memory.is_on_host(value) and value.nbytes >= LENT_FROM
    return value if is_large and value.is_contiguous() and not value.is_complex() else None


def _lent_of_device(item: Item, lent: SaveBorrow, params: Collection[str]) -> StagedBytes | None:
    """What is to be written, if it is on an accelerator and may be lent."""
    value, name = item.content, item.entry.name
    if not isinstance(value, Tensor) or not is_plain(value) or not value.nbytes:
        return None
    if value.is_complex() or not leases.can_stage(value):
        return None
    borrow = lent.of_device(value.device)
    if value.nbytes < LENT_FROM:
        return borrow.copy_small(value)
    if not value.is_contiguous():
        return None
    if name.startswith(STATE):
        return borrow.lend_state(value, name)
    starts = value.data_ptr(), value.storage_offset() * value.itemsize
    if name in params and not any(start % 8 for start in starts):
        return borrow.lend_param(value, name)
    return None


def _copied(item: Item, lent: SaveBorrow) -> Tensor:
    value = item.content
    assert isinstance(value, Tensor)
    if host_memory.is_on_host(value) and value.is_contiguous() and value.nbytes >= LENT_FROM:
        memory = lent.take(value.nbytes).view(value.dtype).view(value.shape)
        return memory.copy_(value)
    return value.to("cpu", copy=True)


# -- planning -------------------------------------------------------------------------------------


_plans: WeakKeyDictionary[dist.ProcessGroup, tuple[Holding, WriteShare]] = WeakKeyDictionary()
"""What this rank held at its last save with a group, and its share; good as long as no rank of it
holds anything else."""


def plan_writing(
    tensors: Mapping[str, Tensor],
    folder: Path,
    ranks: Ranks,
    *,
    snapshot: bool,
    params: Collection[str] = (),
) -> Writing:
    """Decide what each rank writes; equal entries of several ranks are written once.

    Args:
        tensors: this rank's entries; the same names may be on several ranks.
        folder: an empty directory that all ranks see.
        snapshot: let what this rank writes change meanwhile; see :meth:`Writing.take_snapshot`.
        params: entries that are parameters of the model.

    Raises:
        ValueError: ranks disagree about an entry, naming it.
    """
    held: list[Holding] = []
    known = _plans.get(ranks.group) if ranks.group is not None else None

    def describe() -> tuple[bool, list[bytes]]:
        new = holding_of(tensors)
        is_known = known is not None and known[0] == new
        held.append(known[0] if known and is_known else new)  # whose sheets are known, too
        return is_known, [*held[0].sheets] if ranks.size > 1 else []

    described = ranks.gather_results("planning a checkpoint", describe)
    (holding,) = held
    share = WriteShare(frozenset(entry.name for entry in holding.whole))
    if ranks.group is None:
        _check_agreement({}, {}, [holding.shards])
    else:
        unchanged = ranks.broadcast(all(is_known for is_known, _ in described))
        if unchanged and known is not None:
            share = known[1]
        else:
            share = _shared(holding, [digests for _, digests in described], ranks)
        _plans[ranks.group] = holding, share
    writing = Writing(folder, ranks.rank, list(_items(tensors, holding, share)), params)
    if snapshot:
        try:
            ranks.run_on_all("copying what is saved", writing.take_snapshot)
        except BaseException:
            writing.give_back()
            raise
    return writing


def _shared(holding: Holding, held: list[list[bytes]], ranks: Ranks) -> WriteShare:
    """This rank's share; ``held`` is all ranks' digests on the first, which decides."""
    sheets = holding.sheets
    first: dict[bytes, int] = {}
    for rank, digests in enumerate(held):
        for digest in digests:
            first.setdefault(digest, rank)
    speakers = ranks.broadcast(first)
    mine = [digest for digest in sheets if speakers[digest] == ranks.rank]
    held_shards = [entry for entry in holding.shards if entry.places]
    gathered = ranks.gather(({digest: sheets[digest] for digest in mine}, held_shards))

    def decide() -> list[WriteShare]:
        everything: dict[bytes, Sequence[Held]] = {}
        for spoken, _ in gathered:
            everything |= spoken
        return shares(everything, held, [shards for _, shards in gathered])

    return ranks.scatter(ranks.run_on_first("planning a checkpoint", decide) or [])


def _items(tensors: Mapping[str, Tensor], holding: Holding, share: WriteShare) -> Iterator[Item]:
    for entry in holding.whole:
        if entry.name in share.whole:
            place = whole_box(entry.shape)
            yield Item(entry, place, piece(tensors[entry.name], place))
    for shard in holding.shards:
        entry, left_out = shard._replace(places=None), share.left_out.get(shard.name, ())
        for place in shard.places or ():
            if place not in left_out:
                yield Item(entry, place, piece(tensors[shard.name], place))


# -- data files -----------------------------------------------------------------------------------


def _by_file(items: Sequence[Item], threads: int) -> list[list[Item]]:
    """The items by file, about as many bytes in each; in their order."""
    total = sum(item.content.nbytes for item in items)
    count = max(1, min(total // FILE_FROM, threads, _MOST_FILES))
    loads = [(0, number) for number in range(count)]
    file_of = [0] * len(items)
    for at in sorted(range(len(items)), key=lambda at: -items[at].content.nbytes):
        load, number = loads[0]
        file_of[at] = number
        heapq.heapreplace(loads, (load + items[at].content.nbytes, number))
    files: list[list[Item]] = [[] for _ in range(count)]
    for item, number in zip(items, file_of, strict=True):
        files[number].append(item)
    return [file for file in files if file]


def _write_files(files: Sequence[tuple[Sequence[Item], Path]]) -> list[WrittenFile]:
    """Write each in a thread; the first failure stops all.

    NOTE: these are no threads of an executor: that takes no work any more when the process has come
    to its end, and then waits for its save.
    """
    stop = threading.Event()
    written: dict[Path, WrittenFile] = {}
    errors: list[BaseException] = []

    def write(items: Sequence[Item], path: Path) -> None:
        try:
            with closing(_SummedFile(path, stop)) as file:
                boxes = list(_written(file, items, path.name))
                written[path] = WrittenFile(path.name, file.finish(), file.blocks, boxes)
        except BaseException as error:
            errors.append(error)  # NOTE: before others notice, which fail because of it
            stop.set()

    others = []
    for items, path in files[1:]:
        name = f"saving {path.name}"
        others.append(threading.Thread(target=write, args=(items, path), name=name, daemon=False))
        others[-1].start()
    for items, path in files[:1]:
        write(items, path)
    for thread in others:
        thread.join()
    if errors:
        del errors[1:]
        raise errors.pop()  # a frame that kept its own error would be a cycle
    return [written[path] for _, path in files]


def _written(
    file: _SummedFile, items: Sequence[Item], name: str
) -> Iterator[tuple[Held, SavedBox]]:
    tiny: dict[tuple[torch.dtype, tuple[int, ...], bytes], int] = {}
    for entry, place, content in items:
        before = header(entry.dtype, place.sizes)
        start = file.size + len(before)
        if isinstance(content, Tensor):
            value = content.resolve_conj() if content.is_complex() else content
            value = value.cpu().contiguous()
            memory = byte_view(value)
            if len(memory) <= _TINY:
                key = entry.dtype, place.sizes, bytes(memory)
                start = tiny.setdefault(key, start)
            if start > file.size:
                file.write(before)
                file.write(memory)
        else:
            file.write(before)
            file.write_from(content)
        length = place.numel * entry.dtype.itemsize
        yield entry, SavedBox(place, name, start, length)


class _SummedFile:
    """A new file, summed up before it is written, so that what was meant is on record, not what
    arrived. One buffer is filled while the other is written in the background."""

    def __init__(self, path: Path, stop: threading.Event) -> None:
        self._path, self._stop = path, stop
        self._file = path.open("wb", buffering=0)
        memory = torch.empty((2, _BUFFER), dtype=torch.uint8, device="cpu")
        self._filled, self._written = memory.unbind()
        self._writing: futures.Future[None] | None = None
        self._used = self.size = self._begun = 0
        self.blocks: list[int] = []

    def write(self, data: bytes | memoryview) -> None:
        rest = memoryview(data)
        while rest:
            begin, end = self._room(len(rest))
            byte_view(self._filled)[begin:end] = rest[: end - begin]
            rest = rest[end - begin :]

    def write_from(self, content: Lease | StagedBytes) -> None:
        """Write all bytes of leased or staged memory."""
        left = content.nbytes
        while left:
            begin, end = self._room(left)
            content.read_into(self._filled[begin:end])
            left -= end - begin

    def _room(self, wanted: int) -> tuple[int, int]:
        """Where in the buffer the next bytes go, at most so many."""
        if self._used == _BUFFER:
            self._put()
        begin, end = self._used, min(_BUFFER, self._used + wanted)
        self.size += end - begin
        self._used = end
        return begin, end

    def _put(self) -> None:
        """Sum up the buffer that is filled, and begin to write it."""
        if self._stop.is_set():
            raise RuntimeError("another file failed")
        data = byte_view(self._filled)[: self._used]
        for begin in range(0, len(data), BLOCK_BYTES):
            self.blocks.append(zlib.crc32(data[begin : begin + BLOCK_BYTES]))
        if self._writing is not None:
            self._writing.result()  # NOTE: only then the other buffer may be filled
        self._writing = in_background(partial(self._write, data))
        self._filled, self._written = self._written, self._filled
        self._used = 0

    def _write(self, data: memoryview) -> None:
        with naming(self._path):
            while data:
                data = data[self._file.write(data) :]
            end = self._file.tell()
            if end - self._begun >= _BEGIN_EVERY and hasattr(os, "posix_fadvise"):
                # Linux begins to write what is not going to be read
                count = end - self._begun
                os.posix_fadvise(self._file.fileno(), self._begun, count, os.POSIX_FADV_DONTNEED)
                self._begun = end

    def finish(self) -> FileSum:
        """Write the rest and wait until everything is on the disk."""
        if self._used:
            self._put()
        if self._writing is not None:
            self._writing.result()  # raises why it could not be written
        with naming(self._path):
            os.fsync(self._file.fileno())
        return FileSum.of_blocks(self.size, self.blocks)

    def close(self) -> None:
        """Give up the file, or end with it after :meth:`finish`."""
        if self._writing is not None:
            futures.wait([self._writing])
        self._file.close()
