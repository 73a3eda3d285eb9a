"""Writing tensors, in two parts.

Planning decides which rank writes what; it is where the ranks talk. Writing then needs no other
rank, so it can happen in the background, from a snapshot of just what this rank writes.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from weakref import WeakKeyDictionary

import torch.distributed as dist
from torch import Tensor

from mp_optim.checkpoint.data_files import Item, Part, write_files
from mp_optim.checkpoint.durable import write_durably
from mp_optim.checkpoint.entries import STATE
from mp_optim.checkpoint.garbage import uncollected
from mp_optim.checkpoint.index import INDEX, Index, Saved, SavedBox, as_json
from mp_optim.checkpoint.manifest import FileSum, file_sum
from mp_optim.checkpoint.metadata import METADATA, as_metadata
from mp_optim.checkpoint.pieces import piece, whole_place
from mp_optim.checkpoint.plans import Holding, Share, Whole, holding_of, shares
from mp_optim.checkpoint.ranks import Ranks
from mp_optim.process import device_staging, host_memory
from mp_optim.process.device_leases import DeviceLoans, StagedBytes
from mp_optim.process.leases import Copies, Lease, Lent, give_back, is_plain, lend

LENT_FROM = 16 << 10
"""Bytes of a tensor from which a copy costs more than a lease."""


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
    _lent: Lent | None = field(default=None, repr=False)

    def take_snapshot(self) -> None:
        """Make sure that what is written are the bits of now: borrow what the optimizer keeps, and
        parameters on accelerators; copy the rest to the host.

        NOTE: the model's tensors on the host are copied because anybody may write them; the
        optimizer's state is written by this package alone, which calls ``before_writing``. Buffers
        are written in forward.
        """
        lendable = {
            at: value
            for at, item in enumerate(self.items)
            if (value := _lendable(item)) is not None
        }
        loans = DeviceLoans()
        self._lent = lend(list(lendable.values()), loans)
        leases: dict[int, Lease] = dict(zip(lendable, self._lent.leases, strict=True))
        self.items = [
            item._replace(
                content=leases.get(at)
                or _lent_of_device(item, loans, self.params)
                or _copied(item, self._lent.copies)
            )
            for at, item in enumerate(self.items)
        ]
        loans.start(self._lent.copies.take)

    def wait_for_device(self, timeout: float | None = None) -> bool:
        """Wait until nothing of an accelerator is borrowed any more; whether that is so."""
        lent = self._lent
        return lent is None or lent.loans.wait(timeout)

    def give_back(self) -> None:
        """Borrow nothing any more, and let go of what was copied."""
        if self._lent is not None:
            give_back(self._lent)
            self._lent, self.items = None, []

    @uncollected()
    def write(self) -> list[Part]:
        """Write this rank's files, synced. No communication."""
        names = (f"__{self.rank}_{number}.distcp" for number in itertools.count())
        return write_files(self.items, map(self.folder.joinpath, names))

    @uncollected()
    def finish(self, parts: list[Part]) -> dict[str, FileSum]:
        """On the first rank, after all have written: write what is where.

        Returns:
            The files of all ranks.
        """
        index = _index_of(parts)
        files = {part.file: part.sum for part in parts}
        contents = {INDEX: as_json(index), METADATA: as_metadata(index, self.folder)}
        for name, content in contents.items():
            write_durably(self.folder / name, content)
            files[name] = file_sum(self.folder / name)
        return files


def _lendable(item: Item) -> Tensor | None:
    """What is to be written, if it may be lent."""
    value = item.content
    if not isinstance(value, Tensor) or not item.entry.name.startswith(STATE):
        return None
    is_plain = value.is_contiguous() and not value.is_complex()
    if host_memory.is_on_host(value) and value.nbytes >= LENT_FROM and is_plain:
        return value
    return None


def _lent_of_device(
    item: Item, loans: DeviceLoans, params: Collection[str]
) -> StagedBytes | None:
    """What is to be written, if it lies on an accelerator and may be lent."""
    value, name = item.content, item.entry.name
    if not isinstance(value, Tensor) or not is_plain(value) or not value.nbytes:
        return None
    if value.is_complex() or not device_staging.can_stage(value):
        return None
    if value.nbytes < LENT_FROM:
        return loans.copy_small(value)
    if not value.is_contiguous():
        return None
    if name.startswith(STATE):
        return loans.lend_state(value, name)
    starts = value.data_ptr(), value.storage_offset() * value.itemsize
    if name in params and not any(start % 8 for start in starts):
        return loans.lend_param(value, name)
    return None


def _copied(item: Item, copies: Copies) -> Tensor:
    value = item.content
    assert isinstance(value, Tensor)
    if (
        host_memory.is_on_host(value)
        and value.is_contiguous()
        and value.nbytes >= LENT_FROM
    ):
        memory = copies.take(value.nbytes).view(value.dtype).view(value.shape)
        return memory.copy_(value)
    return value.to("cpu", copy=True)


def _index_of(parts: list[Part]) -> Index:
    entries: dict[str, Saved] = {}
    for part in parts:
        for (name, dtype, shape), place, start in part.written:
            saved = entries.setdefault(name, Saved(dtype, shape, []))
            length = math.prod(place.sizes) * dtype.itemsize
            saved.boxes.append(SavedBox(*place, part.file, start, length))
    sums = {part.file: part.blocks for part in parts}
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
        writing = Writing(
            folder, ranks.rank, list(_items(tensors, holding, share)), params
        )
    if snapshot:
        try:
            ranks.agree("copying what is saved", writing.take_snapshot)
        except BaseException:
            writing.give_back()
            raise
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
) -> Iterator[Item]:
    for entry in holding.whole:
        if entry.name in share.whole:
            place = whole_place(entry.shape)
            yield Item(entry, place, piece(tensors[entry.name], place))
    for part in holding.parts:
        entry, left_out = Whole(*part[:3]), share.left_out.get(part.name, ())
        for place in part.places:
            if place not in left_out:
                yield Item(entry, place, piece(tensors[part.name], place))
