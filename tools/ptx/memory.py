"""Memory of a launch: what may be touched there, and by whom without a barrier between."""

from __future__ import annotations

import ctypes
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np

from ptx.parser import PtxError
from ptx.values import UNSIGNED, Array

_WIDEST = 32
"""Bytes of the widest access."""
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
    """Bytes of a launch, at an address that its kernel knows them by; ``item`` of them are a
    number."""

    address: int
    bytes: Array
    item: int = 1


BARRIER = 1 << 16
"""A thread's time counts barriers of its block in these units, and meetings of its warp in ones."""


@dataclass(frozen=True)
class Threads:
    numbers: Array
    times: Array
    of_block: int

    def some(self, chosen: Array | slice) -> Threads:
        return Threads(self.numbers[chosen], self.times[chosen], self.of_block)

    def unordered(self, numbers: Array, times: Array) -> Array:
        mine, now = self.numbers[:, None], self.times[:, None]
        same_block = mine // self.of_block == numbers // self.of_block
        same_warp = mine // 32 == numbers // 32
        ordered = same_block & (now // BARRIER > times // BARRIER)
        ordered |= same_warp & (now % BARRIER > times % BARRIER)
        ordered |= mine == numbers
        return (numbers >= 0) & ~ordered


class _Touched:
    def __init__(self, granules: int) -> None:
        self._numbers, self._times = np.full(granules, -1, np.int32), np.zeros(granules, np.int32)

    def numbers(self, rows: Array, width: int) -> Array:
        return self._numbers.reshape(-1, width).take(rows, axis=0)

    def clashes(self, rows: Array, width: int, threads: Threads) -> Array | None:
        """Whether an access now is unordered, of each granule; None if all were their own."""
        numbers = self.numbers(rows, width)
        if ((numbers < 0) | (numbers == threads.numbers[:, None])).all():
            return None
        return threads.unordered(numbers, self._times.reshape(-1, width).take(rows, axis=0))

    def note(self, rows: Array, width: int, threads: Threads) -> None:
        self._numbers.reshape(-1, width)[rows] = threads.numbers[:, None]
        self._times.reshape(-1, width)[rows] = threads.times[:, None]

    def note_first(self, rows: Array, width: int, threads: Threads) -> None:
        is_new = self.numbers(rows, width) < 0
        if is_new.all():
            self.note(rows[::-1], width, threads.some(slice(None, None, -1)))
        elif is_new.any():
            at, column = np.nonzero(is_new[::-1])
            at = len(rows) - 1 - at
            self.note(rows[at] * width + column, 1, threads.some(at))

    def forget(self, rows: Array, width: int) -> None:
        self._numbers.reshape(-1, width)[rows] = -1


class Memory:
    """Some bytes, beginning anywhere, and who touched them: the last that wrote, and of those that
    read since, the first and the last.

    A thread that reads what others of its warp then write does not race with them: both are one
    instruction after another of the same warp.

    Args:
        granule: bytes that are noted as one: who touches some of them touches all.
        equal_writes: several threads may write the same value at once. Compilers have all threads
            that hold a value put it into a block's memory.
    """

    def __init__(self, size: int, granule: int = 1, equal_writes: bool = False) -> None:
        self._granule, self._equal_writes = granule, equal_writes
        size = -(-size // _WIDEST) * _WIDEST
        self.bytes = np.zeros(size, np.uint8)
        self._views = {width: self.bytes.view(dtype) for width, dtype in UNSIGNED.items()}
        size //= granule
        self._writers, self._first, self._last = _Touched(size), _Touched(size), _Touched(size)

    def load(self, places: Array, width: int, count: int, threads: Threads) -> Array:
        rows, granules = self._row(places, width * count)
        clashes = self._writers.clashes(rows, granules, threads)
        self._refuse(clashes, "reads what another wrote", places, threads)
        self._first.note_first(rows, granules, threads)
        self._last.note(rows, granules, threads)
        return self._views[width].reshape(-1, count).take(places // (width * count), axis=0)

    def store(self, places: Array, width: int, values: Array, threads: Threads) -> None:
        count = values.shape[1]
        rows, granules = self._row(places, width * count)
        clashes = self._writers.clashes(rows, granules, threads)
        self._refuse(clashes, "writes what another wrote", places, threads)
        warps = threads.numbers[:, None] // 32
        for readers in (self._first, self._last):
            clashes = readers.clashes(rows, granules, threads)
            if clashes is not None:
                clashes &= readers.numbers(rows, granules) // 32 != warps
            self._refuse(clashes, "writes what another read", places, threads)
            readers.forget(rows, granules)
        self._writers.note(rows, granules, threads)
        numbers = self._views[width].reshape(-1, count)
        numbers[places // (width * count)] = values
        clashes = self._writers.numbers(rows, granules) != threads.numbers[:, None]
        if self._equal_writes and clashes.any():
            found = numbers[places // (width * count)]
            clashes &= (found != values).any(axis=1)[:, None]
        self._refuse(clashes, "writes what another writes", places, threads)

    def _row(self, places: Array, width: int) -> tuple[Array, int]:
        width = max(width, self._granule)
        return places // width, width // self._granule

    def _refuse(self, clashes: Array | None, what: str, places: Array, threads: Threads) -> None:
        if clashes is not None and clashes.any():
            at = int(np.argmax(clashes.any(axis=1)))
            raise RaceError(f"thread {threads.numbers[at]} {what}, at byte {places[at]}")


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
        granule = min((piece.item for piece in self._pieces), default=1)
        self.memory = Memory(place + _SPACE, granule)
        for at, piece in zip(places, self._pieces, strict=True):
            self.memory.bytes[at : at + len(piece.bytes)] = piece.bytes

    def places(self, addresses: Array, width: int) -> Array:
        """Where accesses lie.

        Raises:
            OutOfBoundsError: in no tensor, or over the end of one.
            MisalignedError: not at a multiple of their width.
        """
        rest = addresses & np.uint64(width - 1)
        if rest.any():
            at = int(np.argmax(rest != 0))
            raise MisalignedError(f"{width} bytes at {int(addresses[at]):#x}")
        found = self._piece_of_first(addresses)
        outside = self._outside(addresses, width, found)
        if outside.any():  # then each for itself
            found = np.searchsorted(self._starts, addresses, side="right") - 1
            outside = self._outside(addresses, width, found)
        if outside.any():
            at = int(np.argmax(outside))
            raise OutOfBoundsError(
                f"{width} bytes at {int(addresses[at]):#x}, {self._nearest(int(addresses[at]))}"
            )
        return self._places[found] + (addresses - self._starts[found]).astype(np.int64)

    def _piece_of_first(self, addresses: Array) -> Array:
        firsts = np.searchsorted(self._starts, addresses[::32], side="right") - 1
        return np.repeat(firsts, 32)[: len(addresses)]

    def _outside(self, addresses: Array, width: int, found: Array) -> Array:
        last = self._ends[found] - np.uint64(width)
        return (found < 0) | (addresses < self._starts[found]) | (addresses > last)

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
    if not count:
        return np.zeros(0, np.uint8)
    return np.frombuffer((ctypes.c_uint8 * count).from_address(address), np.uint8)


def piece_of(tensor: Any) -> Piece:
    address = tensor.data_ptr()
    size = tensor.element_size()
    return Piece(address, bytes_at(address, tensor.numel() * size), size)
