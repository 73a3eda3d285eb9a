"""Memory of the host and of simulated devices, with the last accesses to each byte."""

from __future__ import annotations

import bisect
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor, UntypedStorage

from support.accelerator.clocks import Actor

POISON = 0xFF
"""Value of every byte that no code may read: NaN as a floating-point value."""
_OWN_REFERENCES = 2
"""References to a storage that the simulation holds: one of the region and one of its twin. A view
that was recorded before its whole adds one reference."""


@dataclass(frozen=True)
class Span:
    """Bytes of a region, from ``start`` up to but not including ``end``."""

    region: Region
    start: int
    end: int


@dataclass(frozen=True)
class Deed:
    """A memory access: the bytes, and whether it writes.

    Attributes:
        is_download: True for a copy to the host that nothing waits for at once.
    """

    what: str
    spans: list[tuple[Span, bool]]
    is_download: bool = False


class Conflict(NamedTuple):
    """An access that is not ordered after an earlier access.

    Attributes:
        is_torn: True for a write to the source of a download, in either order. The result may be
            neither old nor new; a run that drops it is correct.
    """

    message: str
    is_torn: bool


@dataclass(frozen=True)
class Access:
    start: int
    end: int
    writes: bool
    actor: str
    moment: int
    deed: Deed

    def meets(self, start: int, end: int) -> bool:
        return self.start < end and start < self.end

    def __str__(self) -> str:
        return f"{'write' if self.writes else 'read'} by {self.deed.what} on {self.actor}"


class Region:
    """One allocation.

    Attributes:
        twin: the same memory under another storage, held by queued operations; the reference
            count of the first storage is the package's.
        device: index of the device; None for the host.
        home: the stream that the allocator would reuse the memory for.
        is_page_locked: True for the host side of a copy that nothing waited for at once.
        recorded: streams of ``record_stream``.
        guarded: streams with copies that torch's page-locked allocator records.
    """

    def __init__(self, storage: UntypedStorage) -> None:
        self.storage = storage
        self.base, self.size = storage.data_ptr(), storage.nbytes()
        self.twin = storage[0 : self.size]
        self.device: int | None = None
        self.home: Actor | None = None
        self.is_page_locked = False
        self.recorded: set[str] = set()
        self.guarded: set[str] = set()
        self.accesses: list[Access] = []
        self.parts: list[Region] = []
        self.is_given_back = False

    @property
    def is_let_go(self) -> bool:
        """True if only the simulation holds the memory."""
        count = torch._C._storage_Use_Count(self.storage._cdata)
        return count <= _OWN_REFERENCES + len(self.parts)

    def bytes(self, start: int = 0, end: int | None = None) -> Tensor:
        end = self.size if end is None else end
        tensor = torch.empty(0, dtype=torch.uint8)
        return tensor.set_(self.twin, start, (end - start,), (1,))  # type: ignore[call-overload]

    def alias(self, tensor: Tensor) -> Tensor:
        alias = torch.empty(0, dtype=tensor.dtype)
        first = (tensor.data_ptr() - self.base) // tensor.itemsize
        return alias.set_(self.twin, first, tensor.shape, tensor.stride())  # type: ignore[call-overload]

    def touch(
        self, actor: Actor, moment: int, span: Span, writes: bool, deed: Deed
    ) -> Iterator[Conflict]:
        """Record an access, and yield its conflicts with earlier accesses."""
        access = Access(span.start, span.end, writes, actor.name, moment, deed)
        for other in self.accesses:
            if (
                other.meets(span.start, span.end)
                and (writes or other.writes)
                and not actor.knows(other.actor, other.moment)
            ):
                is_torn = any(a.deed.is_download and not a.writes for a in (access, other))
                yield Conflict(f"{access} is not ordered after the {other}", is_torn)
        self.accesses = [other for other in self.accesses if not _is_outdated(other, access)]
        self.accesses.append(access)


def _is_outdated(old: Access, new: Access) -> bool:
    """True if every access after the new one is ordered after the old one, too."""
    covers = new.start <= old.start and old.end <= new.end
    return covers and (new.writes or (not old.writes and old.actor == new.actor))


class Memory:
    """All regions by address. Regions are freed only with this object."""

    def __init__(self) -> None:
        self._bases: list[int] = []
        self._regions: list[Region] = []

    def __iter__(self) -> Iterator[Region]:
        return iter(self._regions)

    def at(self, address: int) -> Region | None:
        place = bisect.bisect_right(self._bases, address) - 1
        if place < 0:
            return None
        region = self._regions[place]
        return region if address < region.base + region.size else None

    def of(self, tensor: Tensor) -> Region | None:
        storage = tensor.untyped_storage()
        if not tensor.numel() or storage.device.type == "meta":
            return None
        region = self.at(tensor.data_ptr())
        end = storage.data_ptr() + storage.nbytes()
        is_whole = region is not None and end <= region.base + region.size
        return region if is_whole else self._add(storage)

    def span(self, tensor: Tensor) -> Span | None:
        region = self.of(tensor)
        if region is None:
            return None
        steps = zip(tensor.shape, tensor.stride(), strict=True)
        reach = sum((size - 1) * stride for size, stride in steps) + 1
        start = tensor.data_ptr() - region.base
        return Span(region, start, start + reach * tensor.itemsize)

    def _add(self, storage: UntypedStorage) -> Region:
        region = Region(storage)
        place = bisect.bisect_left(self._bases, region.base)
        while place < len(self._regions) and self._bases[place] < region.base + region.size:
            # Views that were recorded before the whole storage.
            _take_over(region, self._regions.pop(place))
            self._bases.pop(place)
        self._bases.insert(place, region.base)
        self._regions.insert(place, region)
        return region


def _take_over(whole: Region, part: Region) -> None:
    shift = part.base - whole.base
    whole.parts.append(part)
    whole.device, whole.home = part.device, part.home
    for access in part.accesses:
        moved = replace(access, start=access.start + shift, end=access.end + shift)
        whole.accesses.append(moved)
