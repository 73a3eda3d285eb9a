"""Memory of a launch: what may be touched there, and by whom without a barrier between."""

from __future__ import annotations

import ctypes
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np

from ptx.parser import PtxError
from ptx.values import UNSIGNED, Array

_SPACE = 256
"""Pieces keep their addresses modulo this, and lie at least so far apart."""


class OutOfBoundsError(PtxError):
    """An access outside of every tensor of the launch."""


class MisalignedError(PtxError):
    """An access at an address that is no multiple of its width."""


class RaceError(PtxError):
    """Two threads touch a byte, one of them writes it, and nothing orders them."""


@dataclass(frozen=True)
class Piece:
    """Bytes of a launch, at an address that its kernel knows them by."""

    address: int
    bytes: Array


@dataclass(frozen=True)
class Threads:
    """Who touches memory: of each thread its number in the grid, and how many barriers of its
    block, and meetings of its warp, it has passed."""

    numbers: Array
    barriers: Array
    meetings: Array
    of_block: int

    def some(self, chosen: Array) -> Threads:
        return Threads(
            self.numbers[chosen], self.barriers[chosen], self.meetings[chosen], self.of_block
        )


def unordered(one: Threads, numbers: Array, barriers: Array, meetings: Array) -> Array:
    """Whether other threads' earlier accesses are not ordered before those of threads now; a
    number of -1 is nobody."""
    same_block = one.numbers // one.of_block == numbers // one.of_block
    same_warp = one.numbers // 32 == numbers // 32
    ordered = same_block & (one.barriers > barriers)
    ordered |= same_warp & (one.meetings > meetings)
    ordered |= one.numbers == numbers
    return (numbers >= 0) & ~ordered


class _Touched:
    """Who touched each byte last, and when. Several readers are noted as two: the first since a
    writer, and the last."""

    def __init__(self, size: int) -> None:
        self.numbers = np.full(size, -1, np.int64)
        self.barriers = np.zeros(size, np.int32)
        self.meetings = np.zeros(size, np.int32)

    def clashes(self, places: Array, threads: Threads) -> Array:
        return unordered(
            threads, self.numbers[places], self.barriers[places], self.meetings[places]
        )

    def note(self, places: Array, threads: Threads) -> None:
        self.numbers[places] = threads.numbers
        self.barriers[places] = threads.barriers
        self.meetings[places] = threads.meetings


class Memory:
    """Some bytes, beginning anywhere, and who touched them.

    A thread that reads what others of its warp then write does not race with them: both are one
    instruction after another of the same warp.

    Args:
        equal_writes: several threads may write the same value at once. Compilers have all threads
            that hold a value put it into a block's memory.
    """

    def __init__(self, size: int, equal_writes: bool = False) -> None:
        self._equal_writes = equal_writes
        self.bytes = np.zeros(-(-size // 16) * 16, np.uint8)
        self._views = {width: self.bytes.view(dtype) for width, dtype in UNSIGNED.items()}
        size = len(self.bytes)
        self._writers, self._first, self._last = _Touched(size), _Touched(size), _Touched(size)

    def load(self, places: Array, width: int, threads: Threads) -> Array:
        """Numbers of ``width`` bytes."""
        each, who = _spread(places, width, threads)
        self._refuse(self._writers.clashes(each, who), each, who, "reads what another wrote")
        is_new = self._first.numbers[each] < 0
        is_new |= self._writers.barriers[each] > self._first.barriers[each]
        backwards = np.flatnonzero(is_new)[::-1]  # of those that read it now the first is noted
        self._first.note(each[backwards], who.some(backwards))
        self._last.note(each, who)
        return self._views[width][places // width]

    def store(self, places: Array, width: int, values: Array, threads: Threads) -> None:
        each, who = _spread(places, width, threads)
        self._refuse(self._writers.clashes(each, who), each, who, "writes what another wrote")
        for readers in (self._first, self._last):
            of_others = readers.numbers[each] // 32 != who.numbers // 32
            clashes = readers.clashes(each, who) & of_others
            self._refuse(clashes, each, who, "writes what another read")
        self._writers.note(each, who)
        self._views[width][places // width] = values
        clashes = self._writers.numbers[each] != who.numbers
        if self._equal_writes:
            clashes &= np.repeat(self._views[width][places // width] != values, width)
        self._refuse(clashes, each, who, "writes what another writes")

    def _refuse(self, clashes: Array, each: Array, who: Threads, what: str) -> None:
        if clashes.any():
            at = int(np.argmax(clashes))
            raise RaceError(f"thread {who.numbers[at]} {what}, at byte {each[at]}")


def _spread(places: Array, width: int, threads: Threads) -> tuple[Array, Threads]:
    """Every byte of accesses, and who touches it."""
    each = (places[:, None] + np.arange(width)).reshape(-1)
    return each, threads.some(np.repeat(np.arange(len(places)), width))


class GlobalMemory:
    """The tensors of a launch in one :class:`Memory`, found by address."""

    def __init__(self, pieces: Iterable[Piece]) -> None:
        self._pieces = _distinct(pieces)
        place, places = 0, []
        for piece in self._pieces:
            place += (piece.address - place) % _SPACE
            places.append(place)
            place += len(piece.bytes) + _SPACE
        self._starts = np.array([piece.address for piece in self._pieces], np.uint64)
        sizes = np.array([len(piece.bytes) for piece in self._pieces], np.uint64)
        self._ends = self._starts + sizes
        self._places = np.array(places, np.int64)
        self.memory = Memory(place + _SPACE)
        for at, piece in zip(places, self._pieces, strict=True):
            self.memory.bytes[at : at + len(piece.bytes)] = piece.bytes

    def places(self, addresses: Array, width: int) -> Array:
        """Where accesses lie.

        Raises:
            OutOfBoundsError: in no tensor, or over the end of one.
            MisalignedError: not at a multiple of their width.
        """
        if (addresses % np.uint64(width)).any():
            at = int(np.argmax(addresses % np.uint64(width) != 0))
            raise MisalignedError(f"{width} bytes at {int(addresses[at]):#x}")
        found = np.searchsorted(self._starts, addresses, side="right") - 1
        outside = (found < 0) | (addresses + np.uint64(width) > self._ends[found])
        if outside.any():
            at = int(np.argmax(outside))
            raise OutOfBoundsError(
                f"{width} bytes at {int(addresses[at]):#x}, {self._nearest(int(addresses[at]))}"
            )
        return self._places[found] + (addresses - self._starts[found]).astype(np.int64)

    def _nearest(self, address: int) -> str:
        for start, end in zip(self._starts.tolist(), self._ends.tolist(), strict=True):
            if start - 4096 <= address <= end + 4096:
                return f"near a tensor of {end - start} bytes at {start:#x}"
        return "near no tensor"

    def give_back(self) -> None:
        """Write what the launch left to the bytes that it was given."""
        for at, piece in zip(self._places.tolist(), self._pieces, strict=True):
            piece.bytes[:] = self.memory.bytes[at : at + len(piece.bytes)]


def _distinct(pieces: Iterable[Piece]) -> list[Piece]:
    """Pieces in order of their addresses; one that lies within another is a part of that.

    Raises:
        ValueError: two overlap otherwise.
    """
    found: list[Piece] = []
    for piece in sorted(pieces, key=lambda each: (each.address, -len(each.bytes))):
        if not len(piece.bytes):
            continue
        end = found[-1].address + len(found[-1].bytes) if found else 0
        if piece.address + len(piece.bytes) <= end:
            continue
        if piece.address < end:
            raise ValueError("two tensors of a launch overlap")
        found.append(piece)
    return found


def bytes_at(address: int, count: int) -> Array:
    """The bytes of this process at an address."""
    if not count:
        return np.zeros(0, np.uint8)
    return np.frombuffer((ctypes.c_uint8 * count).from_address(address), np.uint8)


def piece_of(tensor: Any) -> Piece:
    """A contiguous tensor's bytes."""
    address = tensor.data_ptr()
    return Piece(address, bytes_at(address, tensor.numel() * tensor.element_size()))
