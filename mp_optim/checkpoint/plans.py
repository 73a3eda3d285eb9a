"""Who writes what: pure functions of what the ranks hold.

Entries that a rank holds whole are the same on many ranks: each rank sends a digest of each sheet
of them (the model's, the optimizer's), and only one rank for each digest sends the entries. Entries
of which it holds parts are its own.
"""

from __future__ import annotations

import hashlib
import heapq
import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain
from operator import attrgetter, itemgetter
from typing import NamedTuple

import torch
from torch import Tensor

from mp_optim.checkpoint.shards import places_of
from mp_optim.process.calls import uncollected
from mp_optim.slots.partition import Box

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
"""Entries held whole, by digest."""


@dataclass(frozen=True)
class Holding:
    whole: tuple[Held, ...]
    shards: tuple[Held, ...]

    @cached_property
    def sheets(self) -> Sheets:
        """What it holds whole, in sheets by what names begin with; by digest."""
        sheets_by_key: dict[str, list[Held]] = {}
        for entry in self.whole:
            sheets_by_key.setdefault(entry.name.partition(".")[0], []).append(entry)
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


@uncollected
def holding_of(tensors: Mapping[str, Tensor]) -> Holding:
    whole, shards = [], []
    for name, tensor in tensors.items():
        places = places_of(tensor)
        if places is None:
            whole.append(Held(name, tensor.dtype, tuple(tensor.shape)))
        elif places:
            shards.append(Held(name, tensor.dtype, tuple(tensor.shape), places))
    return Holding(tuple(whole), tuple(shards))


@uncollected
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
    for digest, wholes in sheets.items():
        for entry in wholes:
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


# -- what must not be -----------------------------------------------------------------------------


def _check_agreement(
    sheets: Sheets,
    ranks_of: Mapping[bytes, Sequence[int]],
    shards_of_ranks: Sequence[Sequence[Held]],
) -> None:
    """Entries of the same name must be the same thing everywhere: a copy that is not written must
    not differ."""
    seen: dict[str, tuple[_Form, int]] = {}
    boxes: dict[tuple[str, tuple[int, ...]], set[Box]] = {}
    wholes = ((ranks_of[digest][0], sheet) for digest, sheet in sheets.items())
    for rank, entries in chain(wholes, enumerate(shards_of_ranks)):
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


def check_cover(name: str, shape: tuple[int, ...], places: Iterable[Box]) -> None:
    """Raise ValueError unless boxes that differ make up a tensor, each element once."""
    places = list(places)
    covered, wanted = sum(place.numel for place in places), math.prod(shape)
    if covered != wanted:
        raise ValueError(
            f"{name} of shape {shape}: the ranks hold parts of {covered} elements together, not "
            f"{wanted}; is one of its ranks not among those that save?"
        )
    if any_overlap(places):
        raise ValueError(
            f"{name} of shape {shape}: ranks hold parts of it that overlap but are not the same"
        )


def any_overlap(places: Sequence[Box]) -> bool:
    """Whether any two of some boxes of a tensor, none of them empty, have an element in common."""
    if len(places) < 2:
        return False
    dims = range(len(places[0].offsets))
    dim = max(dims, key=lambda at: len({place.offsets[at] for place in places}))
    active: list[Box] = []
    for place in sorted(places, key=lambda one: one.offsets[dim]):
        active = [
            other for other in active if other.offsets[dim] + other.sizes[dim] > place.offsets[dim]
        ]
        if any(place.common(other) for other in active):
            return True
        active.append(place)
    return False
