"""Writing of a checkpoint's tensors: first a plan, and then the files.

The plan decides which rank writes which boxes (slices of tensors). Pure functions compute the plan
from descriptions of the tensors that each rank has. Ranks communicate only for the plan. Many ranks
have the same whole tensors, so descriptions of whole tensors form groups (sheets) by the first
component of their names. A rank sends only the sheets that the first rank does not have, and the
boxes of its sharded tensors.

Ranks write independently. So a save can write its files in the background, from a snapshot of the
boxes. Each writing thread has its own file, so that no thread waits for another thread.
"""

from __future__ import annotations

import hashlib
import heapq
import itertools
import os
import zlib
from collections.abc import Collection, Mapping, Sequence
from concurrent import futures
from concurrent.futures import Future
from contextlib import closing
from dataclasses import dataclass, field
from functools import partial
from operator import itemgetter
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
from mp_optim.core.flat_shard import boxes_of, piece
from mp_optim.core.partition import Box, check_cover, whole_box
from mp_optim.host.accelerator import accelerator_of
from mp_optim.host.calls import in_background
from mp_optim.host.host_share import host_share
from mp_optim.host.leases import Lease, SaveBorrow, StagedBytes, is_plain, lease_tensors
from mp_optim.process_groups.agreement import Ranks

LENT_FROM = 16 << 10
"""Smallest size in bytes of a tensor that a background save leases. Smaller tensors are copied,
because a copy then takes less time than a lease."""
FILE_FROM = 16 << 20
"""Fewest bytes of tensors in each data file of a rank that writes several files. A thread for a
smaller file would take more time than it saves."""
_MOST_FILES = 8
_TINY = 64
"""Largest size in bytes of a tensor that shares one copy in a file with equal tensors, such as step
counts."""
_BUFFER = 4 * BLOCK_BYTES
"""Size in bytes of a write buffer. A full buffer gets its checksums, and is then written to the
file."""
_BEGIN_EVERY = 32 << 20
"""Bytes after which Linux is told to begin writing the file to the disk, so that the last sync does
not wait for all bytes."""


# -- division of the tensors among ranks -----------------------------------------------------------

_Form = tuple[torch.dtype, tuple[int, ...], str]
"""Dtype and shape of a tensor, and "whole" or "sharded"."""


class Held(NamedTuple):
    """Description of a tensor that a rank has: name, dtype, shape, and the boxes of the tensor on
    the rank. ``places`` is None if the rank has the whole tensor."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    places: tuple[Box, ...] | None = None


Sheets = Mapping[bytes, Sequence[Held]]
"""Groups of tensor descriptions, by digest of the group. Equal groups of several ranks have one
digest. One group has the sharded tensors, without the rank's boxes."""

Share = Mapping[str, Collection[Box]]
"""The boxes that a rank writes, by the names of their tensors."""


def held_of(tensors: Mapping[str, Tensor]) -> tuple[Held, ...]:
    """Return descriptions of this rank's tensors. Sharded tensors are included even if this rank
    has no element of them."""
    return tuple(
        Held(name, tensor.dtype, tuple(tensor.shape), boxes_of(tensor))
        for name, tensor in tensors.items()
    )


def sheets_of(held: Sequence[Held]) -> Sheets:
    """Return the descriptions of whole tensors in groups (sheets), one for each first component of
    names, and the descriptions of sharded tensors in one group."""
    by_key: dict[str, list[Held]] = {}
    for entry in held:
        is_whole = entry.places is None
        key = entry.name.partition(".")[0] if is_whole else ""
        by_key.setdefault(key, []).append(entry if is_whole else entry._replace(places=()))
    return {
        hashlib.sha256(repr(sheet).encode()).digest(): tuple(sheet) for sheet in by_key.values()
    }


def shares(
    sheets_of_ranks: Sequence[Sheets], shards_of_ranks: Sequence[Sequence[Held]]
) -> list[Share]:
    """Return the boxes that each rank writes. Every element is written once, and ranks write about
    equal bytes.

    Args:
        sheets_of_ranks: groups of tensor descriptions of each rank.
        shards_of_ranks: descriptions of each rank's sharded tensors, with the rank's boxes.

    Raises:
        ValueError: ranks disagree about a tensor, or their boxes do not cover the tensor; the
            message names the tensor.
    """
    sheets = {digest: sheet for own in sheets_of_ranks for digest, sheet in own.items()}
    ranks_of: dict[bytes, list[int]] = {}
    for rank, own in enumerate(sheets_of_ranks):
        for digest in own:
            ranks_of.setdefault(digest, []).append(rank)
    _check_agreement(sheets, ranks_of, shards_of_ranks)
    width = {entry.name: entry.dtype.itemsize for sheet in sheets.values() for entry in sheet}
    holders: dict[tuple[str, Box], list[int]] = {}
    for digest, sheet in sheets.items():
        for entry in sheet:
            if entry.places is None:
                key = entry.name, whole_box(entry.shape)
                holders[key] = holders.get(key, []) + ranks_of[digest]
    for rank, held in enumerate(shards_of_ranks):
        for entry in held:
            for place in entry.places or ():
                holders.setdefault((entry.name, place), []).append(rank)
    order = [
        (len(ranks), -place.numel * width[name], name, place, ranks)
        for (name, place), ranks in holders.items()
    ]
    loads = [0] * len(sheets_of_ranks)
    written: list[dict[str, list[Box]]] = [{} for _ in loads]
    for _, size, name, place, ranks in sorted(order, key=itemgetter(0, 1)):
        writer = min(ranks, key=loads.__getitem__)
        loads[writer] -= size
        written[writer].setdefault(name, []).append(place)
    return [*written]


def _check_agreement(
    sheets: Sheets,
    ranks_of: Mapping[bytes, Sequence[int]],
    shards_of_ranks: Sequence[Sequence[Held]],
) -> None:
    """Check that ranks agree about the tensors.

    Raises:
        ValueError: tensors of one name differ between ranks, or the ranks together lack elements of
            a sharded tensor.
    """
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
                    f"{name} is {a[0]} {a[1]}, {a[2]} on rank {low}, but {b[0]} {b[1]}, {b[2]} on "
                    f"rank {high}, and a checkpoint has one tensor for each name; give different "
                    "tensors different names"
                )
            if places is not None:
                boxes.setdefault((name, shape), set()).update(places)
    for (name, shape), held_boxes in boxes.items():
        check_cover(name, shape, held_boxes)


# -- boxes to write --------------------------------------------------------------------------------


class Item(NamedTuple):
    """A box (slice of the tensor ``entry``) that this rank writes. ``content`` has the elements: a
    tensor, a lease of their host memory, or the staged copy of an accelerator's tensor."""

    entry: Held
    place: Box
    content: Tensor | Lease | StagedBytes


@dataclass(frozen=True)
class WrittenFile:
    """A data file after the write: file name, checksum, CRC-32 of each MiB, and the boxes in the
    file."""

    name: str
    sum: FileSum
    blocks: Sequence[int]
    written: Sequence[tuple[Held, SavedBox]]


@dataclass
class Writing:
    """The boxes that one rank writes in a save.

    Attributes:
        folder: folder of the version.
        rank: number of this rank.
        items: boxes to write.
        params: names of the model's parameters in the checkpoint.
    """

    folder: Path
    rank: int
    items: list[Item] = field(repr=False)
    params: Collection[str] = field(repr=False)
    _lent: SaveBorrow | None = field(default=None, repr=False)

    def take_snapshot(self) -> None:
        """Fix the bits to write. Lease the optimizer's state, and parameters on accelerators, and
        copy all other tensors.

        NOTE: Only this package writes the optimizer's state, and waits for leases before a write.
        Any code may write the model's tensors on the host, and forward writes buffers. So the
        model's host tensors and buffers are copied.
        """
        lendable = {
            at: value
            for at, item in enumerate(self.items)
            if (value := _lendable(item)) is not None
        }
        self._lent = lent = lease_tensors(list(lendable.values()))
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
        """Wait until the save leases no tensor of an accelerator. Return False if leases are left
        after ``timeout`` seconds."""
        # The thread of the save may set the attribute to None between two reads, so read it once.
        lent = self._lent
        return lent is None or lent.wait_for_devices(timeout)

    def give_back(self) -> None:
        """End all leases, and drop the copies."""
        if self._lent is not None:
            self._lent.give_back()
            self._lent, self.items = None, []

    def write(self) -> list[WrittenFile]:
        """Write and sync this rank's files, each in its own thread. Ranks do not communicate.

        Raises:
            OSError: a file cannot be written; the message has its path.
        """
        # A background save uses half of the threads, because training uses the other cores.
        threads = host_share().threads // (1 if self._lent is None else 2)
        # NOTE: do not use an executor's threads. A process may exit while a save runs, and waits
        # for the save, but executors refuse calls once the interpreter exits.
        writing = [
            in_background(partial(_write_file, items, self.folder / f"__{self.rank}_{at}.distcp"))
            for at, items in enumerate(_by_file(self.items, threads))
        ]
        try:
            return list(map(Future.result, writing))
        finally:
            # If a thread raised an error, wait for the other threads, too, because the caller may
            # free the memory that they read.
            futures.wait(writing)
            # Break a reference cycle: an error's traceback holds this frame, whose list holds the
            # future that holds the error.
            writing.clear()

    def finish(self, written: list[WrittenFile]) -> dict[str, FileSum]:
        """Write the index on the first rank, after all ranks have written their files.

        Args:
            written: the data files of all ranks.

        Returns:
            Sizes and checksums of all files, by name.
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
    is_large = value.is_cpu and value.nbytes >= LENT_FROM
    return value if is_large and value.is_contiguous() and not value.is_complex() else None


def _lent_of_device(item: Item, lent: SaveBorrow, params: Collection[str]) -> StagedBytes | None:
    """Lease a box on an accelerator, or copy a small box on its accelerator. Return None if the box
    must be copied to the host now."""
    value, name = item.content, item.entry.name
    if not isinstance(value, Tensor) or not is_plain(value) or not value.nbytes:
        return None
    if value.is_complex() or accelerator_of(value.device) is None:
        return None
    borrow = lent.of_device(value.device)
    if value.nbytes < LENT_FROM:
        return borrow.copy_small(value)
    if not value.is_contiguous():
        return None
    if name.startswith(STATE):
        return borrow.lease_state(value, name)
    starts = value.data_ptr(), value.storage_offset() * value.itemsize
    if name in params and not any(start % 8 for start in starts):
        return borrow.lease_param(value, name)
    return None


def _copied(item: Item, lent: SaveBorrow) -> Tensor:
    value = item.content
    assert isinstance(value, Tensor)
    if value.is_cpu and value.is_contiguous() and value.nbytes >= LENT_FROM:
        memory = lent.take(value.nbytes).view(value.dtype).view(value.shape)
        return memory.copy_(value)
    return value.to("cpu", copy=True)


# -- planning -------------------------------------------------------------------------------------


_plans: WeakKeyDictionary[dist.ProcessGroup, tuple[tuple[Held, ...], Share]] = WeakKeyDictionary()
"""By process group: descriptions of this rank's tensors at the group's last save, and the boxes
that this rank wrote. The next save writes these boxes again if all ranks have the same tensors
as before."""


def plan_writing(
    tensors: Mapping[str, Tensor],
    folder: Path,
    ranks: Ranks,
    *,
    snapshot: bool,
    params: Collection[str] = (),
) -> Writing:
    """Decide which boxes each rank writes. Equal tensors of several ranks are written once.

    Args:
        tensors: this rank's tensors by name; several ranks may have equal names.
        folder: an empty directory that all ranks see.
        ranks: the ranks that save.
        snapshot: True if code may change the tensors after this call; see
            :meth:`Writing.take_snapshot`.
        params: names of the model's parameters in ``tensors``.

    Raises:
        ValueError: ranks disagree about a tensor; the message names the tensor.
    """
    doing = "planning a checkpoint"
    held = ranks.run_on_all(doing, lambda: held_of(tensors))
    share: Share | None = None
    if ranks.group is None:
        _check_agreement({}, {}, [held])
    else:
        known, share = _plans.get(ranks.group, (None, None))
        is_unchanged = ranks.broadcast(all(ranks.gather(known == held)))
        if share is None or not is_unchanged:
            share = plan_together(held, ranks, doing)
        _plans[ranks.group] = held, share
    items = []
    for entry in held:
        for place in (whole_box(entry.shape),) if entry.places is None else entry.places:
            if share is None or place in share.get(entry.name, ()):
                content = piece(tensors[entry.name], place)
                items.append(Item(entry._replace(places=None), place, content))
    writing = Writing(folder, ranks.rank, items, params)
    if snapshot:
        try:
            ranks.run_on_all("copying tensors for a save", writing.take_snapshot)
        except BaseException:
            writing.give_back()
            raise
    return writing


def plan_together(held: Sequence[Held], ranks: Ranks, doing: str) -> Share:
    """Divide the tensors of all ranks, and return the boxes that this rank writes to a checkpoint
    or reads for a digest. The first rank decides for all ranks. Collective.

    Args:
        held: descriptions of this rank's tensors.
        ranks: the ranks that share the boxes.
        doing: name of the action, for errors.

    Raises:
        ValueError: ranks disagree about a tensor; the message names the tensor.
    """
    sheets = sheets_of(held)
    known = ranks.broadcast(set(sheets))
    mine = {digest: None if digest in known else sheet for digest, sheet in sheets.items()}
    gathered = ranks.gather((mine, [entry for entry in held if entry.places]))

    def decide() -> list[Share]:
        of_ranks = [
            {digest: sheets[digest] if sheet is None else sheet for digest, sheet in own.items()}
            for own, _ in gathered
        ]
        return shares(of_ranks, [shards for _, shards in gathered])

    return ranks.scatter(ranks.run_on_first(doing, decide) or [])


# -- data files -----------------------------------------------------------------------------------


def _by_file(items: Sequence[Item], threads: int) -> list[list[Item]]:
    """Return the boxes grouped by file. The files of a rank get about equal bytes. The boxes of a
    file keep their order."""
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


def _write_file(items: Sequence[Item], path: Path) -> WrittenFile:
    """Write and sync one data file. Equal tiny tensors share one copy in the file."""
    boxes: list[tuple[Held, SavedBox]] = []
    tiny: dict[tuple[torch.dtype, tuple[int, ...], bytes], int] = {}
    with closing(_SummedFile(path)) as file:
        for entry, place, content in items:
            before = header(entry.dtype, place.sizes)
            start = file.size + len(before)
            if isinstance(content, Tensor):
                value = content.resolve_conj() if content.is_complex() else content
                value = value.cpu().contiguous()
                memory = byte_view(value)
                if len(memory) <= _TINY:
                    start = tiny.setdefault((entry.dtype, place.sizes, bytes(memory)), start)
                if start > file.size:
                    file.write(before)
                    file.write(memory)
            else:
                file.write(before)
                file.write_from(content)
            length = place.numel * entry.dtype.itemsize
            boxes.append((entry, SavedBox(place, path.name, start, length)))
        return WrittenFile(path.name, file.finish(), file.blocks, boxes)


class _SummedFile:
    """A new file with checksums of its blocks. The checksums are computed from memory before the
    bytes are written, so that a later check finds a faulty write.

    One buffer is filled while another buffer is written in the background.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file = path.open("wb", buffering=0)
        memory = torch.empty((2, _BUFFER), dtype=torch.uint8, device="cpu")
        self._filled, self._written = memory.unbind()
        self._writing: Future[None] | None = None
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
        """Reserve at most ``wanted`` bytes of the buffer, and return their begin and end."""
        if self._used == _BUFFER:
            self._put()
        begin, end = self._used, min(_BUFFER, self._used + wanted)
        self.size += end - begin
        self._used = end
        return begin, end

    def _put(self) -> None:
        """Compute the checksums of the filled buffer, and start a write of the buffer in the
        background."""
        data = byte_view(self._filled)[: self._used]
        for begin in range(0, len(data), BLOCK_BYTES):
            self.blocks.append(zlib.crc32(data[begin : begin + BLOCK_BYTES]))
        if self._writing is not None:
            # NOTE: the other buffer is filled next, so the write of that buffer must have ended.
            self._writing.result()
        self._writing = in_background(partial(self._write, data))
        self._filled, self._written = self._written, self._filled
        self._used = 0

    def _write(self, data: memoryview) -> None:
        with naming(self._path):
            while data:
                data = data[self._file.write(data) :]
            end = self._file.tell()
            if end - self._begun >= _BEGIN_EVERY and hasattr(os, "posix_fadvise"):
                # DONTNEED makes Linux begin to write these pages to the disk. The pages also leave
                # the page cache, because no code reads them again.
                count = end - self._begun
                os.posix_fadvise(self._file.fileno(), self._begun, count, os.POSIX_FADV_DONTNEED)
                self._begun = end

    def finish(self) -> FileSum:
        """Write the remaining bytes, and wait until all bytes are on the disk."""
        if self._used:
            self._put()
        if self._writing is not None:
            self._writing.result()  # Raises the error of the last write, if the write failed.
        with naming(self._path):
            os.fsync(self._file.fileno())
        return FileSum.of_blocks(self.size, self.blocks)

    def close(self) -> None:
        """Close the file, after :meth:`finish` or after an error."""
        if self._writing is not None:
            futures.wait([self._writing])
        self._file.close()


# -- parameters that several ranks hold under one name --------------------------------------------

SAMPLES = 64
"""Number of elements of a parameter, evenly spaced, that ranks compare. Comparing 64 elements is
enough to find shards or experts that have one name by mistake."""


def check_replicas(params: Mapping[str, Tensor], ranks: Ranks) -> None:
    """Check that parameters with one name have equal values on all ranks, because only one rank
    writes each parameter. Collective.

    A rank sends its digests only if they differ from the first rank's digests.

    Args:
        params: parameters by name. Only plain tensors are compared, because a DTensor describes its
            own layout.
        ranks: the ranks that save.

    Raises:
        ValueError: values differ; the message names the parameter and the ranks.
    """
    if ranks.size == 1:
        return
    # Copy the samples of one device and dtype to the host together.
    samples: dict[tuple[torch.device, torch.dtype], dict[str, Tensor]] = {}
    for name, param in params.items():
        if type(param) in (Tensor, torch.nn.Parameter) and param.device.type != "meta":
            flat = param.detach().reshape(-1)
            step = max(1, flat.numel() // SAMPLES)
            samples.setdefault((param.device, param.dtype), {})[name] = flat[::step][:SAMPLES]
    own: dict[str, bytes] = {}
    for (_, dtype), pieces in samples.items():
        content = torch.cat([*pieces.values()]).view(torch.uint8).cpu()
        of_each = torch.split(content, [piece.nbytes for piece in pieces.values()])
        for name, part in zip(pieces, of_each, strict=True):
            text = str(dtype).encode() + bytes(byte_view(part))
            own[name] = hashlib.sha256(text).digest()[:8]
    others = ranks.gather_differing(own, repr(own))
    ranks.run_on_first("comparing the ranks' parameters", lambda: _compare([own, *others[1:]]))


def _compare(digests_of_ranks: Sequence[Mapping[str, bytes] | None]) -> None:
    first: dict[str, tuple[int, bytes]] = {}
    for rank, digests in enumerate(digests_of_ranks):
        for name, digest in (digests or {}).items():
            other, expected = first.setdefault(name, (rank, digest))
            if digest != expected:
                raise ValueError(
                    f"{name}: ranks {other} and {rank} have different values under this name, and "
                    "a checkpoint has one value for each name. Describe how the ranks split the "
                    "model. Tensor parallelism: set tensor_model_parallel, partition_dim and "
                    "partition_stride of the parameter, and process_groups.tp (expert_tp for "
                    "experts). Experts: set process_groups.ep. Pipeline stages: set "
                    "process_groups.pp, and layer_number of each layer. Other layouts: set "
                    "global_names, a function that returns the name in the whole model. Pass "
                    "process_groups= and global_names= to get_megatron_optimizer. Without an "
                    "optimizer, pass model_parallel=ModelParallel.of(...)"
                )
