"""A rank's data files: what it writes of a checkpoint, in several threads, summed up on the way.

Each thread has a file of its own, so that none waits for another.
"""

from __future__ import annotations

import heapq
import os
import queue
import threading
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from mp_optim.checkpoint.durable import begin_writing, naming
from mp_optim.checkpoint.manifest import BLOCK_BYTES, FileSum
from mp_optim.checkpoint.payload import header, memory_of
from mp_optim.checkpoint.pieces import Place
from mp_optim.checkpoint.plans import Whole
from mp_optim.process.host_share import host_share

_TINY = 64
"""Bytes up to which equal tensors of one file are written once (step counts)."""
_BUFFER = 4 * BLOCK_BYTES
"""Bytes that are summed up and written at a time."""
_BEGIN_EVERY = 32 << 20
"""Bytes after which the disk is told to begin, rather than at the end."""
FILE_FROM = 16 << 20
"""Bytes for which another file pays."""
_MOST_FILES = 8


class ReadOnce(Protocol):
    """Bytes that are read once, from the first to the last."""

    nbytes: int

    def read_into(self, to: Tensor) -> None:
        """Read the next bytes, as many as ``to`` has, which lies on the host."""


class Item(NamedTuple):
    """A box to write: its elements, or what they are read from."""

    entry: Whole
    place: Place
    content: Tensor | ReadOnce


class Written(NamedTuple):
    """A box in a file."""

    entry: Whole
    place: Place
    start: int


@dataclass(frozen=True)
class Part:
    """A file that a rank wrote."""

    file: str
    sum: FileSum
    blocks: Sequence[int]
    written: Sequence[Written]


class _Stopped(Exception):
    """Another file failed."""


def write_files(items: Sequence[Item], paths: Iterator[Path]) -> list[Part]:
    """Write boxes into files, synced: one for each thread that is worth it, none for no boxes.

    Raises:
        OSError: naming the file.
    """
    stop = threading.Event()
    pairs = zip(_shares(items), paths, strict=False)
    files = [_File(share, path, stop) for share, path in pairs]
    for file in files[1:]:
        file.start()
    for file in files[:1]:
        file.run()
    for file in files[1:]:
        file.join()
    failed = [file.error for file in files if file.error is not None]
    for error in sorted(failed, key=lambda error: isinstance(error, _Stopped)):
        raise error
    return [part for file in files for part in file.parts]


class _File(threading.Thread):
    """A thread that writes a file.

    Not one of an executor: those take no work any more when the process has come to its end, and
    then waits for its save.
    """

    def __init__(
        self, items: Sequence[Item], path: Path, stop: threading.Event
    ) -> None:
        super().__init__(name=f"saving {path.name}", daemon=False)
        self._items, self._path, self._stop_all = items, path, stop
        self.parts: list[Part] = []
        self.error: BaseException | None = None

    def run(self) -> None:
        try:
            self.parts = [_write_file(self._items, self._path, self._stop_all)]
        except BaseException as error:
            self._stop_all.set()
            self.error = error


def _shares(items: Sequence[Item]) -> list[list[Item]]:
    """The items by file, about as many bytes in each; in their order."""
    total = sum(item.content.nbytes for item in items)
    threads = host_share().threads // 2  # training needs the others
    count = max(1, min(total // FILE_FROM, threads, _MOST_FILES))
    loads = [(0, number) for number in range(count)]
    file_of = [0] * len(items)
    for at in sorted(range(len(items)), key=lambda at: -items[at].content.nbytes):
        load, number = loads[0]
        file_of[at] = number
        heapq.heapreplace(loads, (load + items[at].content.nbytes, number))
    shares: list[list[Item]] = [[] for _ in range(count)]
    for item, number in zip(items, file_of, strict=True):
        shares[number].append(item)
    return [share for share in shares if share]


def _write_file(items: Sequence[Item], path: Path, stop: threading.Event) -> Part:
    file = _SummedFile(path, stop)
    try:
        written = list(_written(file, items))
        return Part(path.name, file.finish(), file.blocks, written)
    finally:
        file.close()


def _written(file: _SummedFile, items: Sequence[Item]) -> Iterator[Written]:
    tiny: dict[tuple[torch.dtype, tuple[int, ...], bytes], int] = {}
    for entry, place, content in items:
        before = header(entry.dtype, place.sizes)
        start = file.size + len(before)
        if isinstance(content, Tensor):
            content = _plain(content)
            memory = memory_of(content)
            if len(memory) <= _TINY:
                key = entry.dtype, place.sizes, bytes(memory)
                start = tiny.setdefault(key, start)
            if start > file.size:
                file.write(before)
                file.write(memory)
        else:
            file.write(before)
            file.write_from(content)
        yield Written(entry, place, start)


def _plain(value: Tensor) -> Tensor:
    """Contiguous, on the host."""
    return (value.resolve_conj() if value.is_complex() else value).cpu().contiguous()


class _Behind(threading.Thread):
    """Writes what it is given to a file, in order, while the next is summed up.

    NOTE: what was given must not change until the next is taken, which waits for it.
    """

    def __init__(self, path: Path) -> None:
        super().__init__(name=f"writing {path.name}", daemon=False)
        self._path, self._file = path, path.open("wb", buffering=0)
        self._given: queue.Queue[memoryview | None] = queue.Queue()
        self._size = self._begun = 0
        self._error: BaseException | None = None
        self.start()

    def give(self, data: memoryview) -> None:
        """Write this next, once what was given before is written.

        Raises:
            OSError: that could not be.
        """
        self.wait()
        self._given.put(data)

    def wait(self) -> None:
        """Wait until all that was given is written."""
        self._given.join()
        if self._error is not None:
            raise self._error

    def run(self) -> None:
        while (data := self._given.get()) is not None:
            try:
                if self._error is None:
                    self._write(data)
            except BaseException as error:
                self._error = error
            finally:
                self._given.task_done()

    def _write(self, data: memoryview) -> None:
        with naming(self._path):
            while data:
                data = data[self._file.write(data) :]
                self._size = self._file.tell()
            if self._size - self._begun >= _BEGIN_EVERY:
                count = self._size - self._begun
                begin_writing(self._file.fileno(), self._begun, count)
                self._begun = self._size

    def sync(self) -> None:
        """Wait until everything is on the disk."""
        self.wait()
        with naming(self._path):
            os.fsync(self._file.fileno())

    def end(self) -> None:
        """End the thread and close the file; harmless the second time."""
        self._given.put(None)
        self.join()
        self._file.close()


class _SummedFile:
    """A new file, summed up while it is written, so that what was meant is on record, not what
    arrived."""

    def __init__(self, path: Path, stop: threading.Event) -> None:
        self._behind, self._stop = _Behind(path), stop
        memory = torch.empty((2, _BUFFER), dtype=torch.uint8, device="cpu")
        self._buffers, self._number = memory.unbind(), 0
        self._used = self.size = 0
        self.blocks: list[int] = []

    @property
    def _buffer(self) -> Tensor:
        """What is filled now; the other one may still be written."""
        return self._buffers[self._number]

    def write(self, data: bytes | memoryview) -> None:
        rest = memoryview(data)
        while rest:
            begin, end = self._room(len(rest))
            memory_of(self._buffer)[begin:end] = rest[: end - begin]
            rest = rest[end - begin :]

    def write_from(self, lease: ReadOnce) -> None:
        """Write all of what is lent."""
        left = lease.nbytes
        while left:
            begin, end = self._room(left)
            lease.read_into(self._buffer[begin:end])
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
        if self._stop.is_set():
            raise _Stopped
        data = memory_of(self._buffer)[: self._used]
        for begin in range(0, len(data), BLOCK_BYTES):
            self.blocks.append(zlib.crc32(data[begin : begin + BLOCK_BYTES]))
        self._behind.give(data)
        self._number, self._used = 1 - self._number, 0

    def finish(self) -> FileSum:
        """Write the rest and wait until everything is on the disk."""
        if self._used:
            self._put()
        self._behind.sync()
        return FileSum.of_blocks(self.size, self.blocks)

    def close(self) -> None:
        """Give up the file, or end with it after :meth:`finish`."""
        self._behind.end()
