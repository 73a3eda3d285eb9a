"""Pickles of others, read without anything in them being called, and without more memory than they
have bytes.

Torch's own safe unpickler makes what it is told to, of any size: ``bytearray(n)`` is eight bytes in
a file and n in memory, a compressed record a thousandth. So what it is to read is looked at first.
"""

from __future__ import annotations

import io
import pickle
import pickletools
import struct
import zipfile
from typing import Any

import torch

_BY_NUMBER = {"complex", "_MEM_FORMAT_ENCODING"}
"""What may be called with a number: all else would be something of that size."""
_LEGACY_PICKLES = 5
"""In a file that ``torch.save`` wrote before it wrote archives; elements follow."""


class Record:
    """What a pickled object held, and nothing it could do."""

    def __new__(cls, *args: Any, **_: Any) -> Record:
        is_sized = bool(args) and isinstance(args[0], (int, float))
        if is_sized and cls.__name__ not in _BY_NUMBER:
            raise pickle.UnpicklingError(f"it wants a {cls.__name__} of a size")
        if _mentions_bytes(args):
            raise pickle.UnpicklingError("it has something else make a bytearray")
        return super().__new__(cls)

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def __setstate__(self, state: Any) -> None:
        self.__dict__["content"] = state


def _mentions_bytes(args: tuple[Any, ...]) -> bool:
    seen: dict[int, Any] = {}
    waiting: list[Any] = [args]
    while waiting:
        value = waiting.pop()
        if isinstance(value, type) and value.__name__ == bytearray.__name__:
            return True
        if isinstance(value, (tuple, list)) and id(value) not in seen:
            seen[id(value)] = value
            waiting += value
    return False


class InertUnpickler(pickle.Unpickler):
    """Makes records of a class of its own of everything that a pickle names: nothing that is
    imported is called, or can be changed."""

    def __init__(self, stream: io.BytesIO) -> None:
        check_opcodes(stream)
        super().__init__(stream)
        self._classes: dict[tuple[str, str], type[Record]] = {}

    def find_class(self, module: str, name: str) -> Any:
        return self._classes.setdefault((module, name), type(name, (Record,), {}))

    def persistent_load(self, pid: Any) -> Any:
        return Record()


def check_opcodes(stream: io.BytesIO) -> None:
    """Raise unless a pickle remembers its objects in order, as picklers do; the stream stays where
    it is. (An unpickler's memory grows to the highest number that it is told.)

    Raises:
        ValueError: naming the number; or the pickle ends too early.
    """
    start = stream.tell()
    for count, (opcode, number, _) in enumerate(pickletools.genops(stream)):
        if opcode.name.endswith("PUT") and not 0 <= int(number or 0) <= count:
            raise ValueError(f"it remembers object {number} when it has read {count}")
    stream.seek(start)


def load_plain(content: bytes) -> Any:
    """What ``torch.save`` wrote: plain data and tensors, with ``weights_only``.

    Raises:
        Exception: it is damaged, no plain data, or would take more memory than it has bytes.
    """
    stream = io.BytesIO(content)
    if zipfile.is_zipfile(stream):
        stream = io.BytesIO(_plain_archive(content))
    else:
        stream.seek(0)
        for _ in range(_LEGACY_PICKLES):
            InertUnpickler(stream).load()
        stream.seek(0)
    return torch.load(stream, map_location="cpu", weights_only=True)


def _plain_archive(content: bytes) -> bytes:
    """An archive with the records of another one, each as it lies there: what was looked at is what
    is read, whoever else would find other records in the same bytes."""
    copied, records = io.BytesIO(), zipfile.ZipFile(io.BytesIO(content)).infolist()
    names = {record.filename for record in records}
    if len(names) < len(records) or sum(r.file_size for r in records) > len(content):
        raise ValueError("its records are larger than the file, or there twice")
    with zipfile.ZipFile(copied, "w", zipfile.ZIP_STORED) as archive:
        for record in records:
            if record.compress_type != zipfile.ZIP_STORED:
                raise ValueError(f"its record {record.filename!r} is compressed")
            value = _stored(content, record)
            if record.filename.endswith(".pkl"):
                InertUnpickler(io.BytesIO(value)).load()
            archive.writestr(record.filename, value)
    return copied.getvalue()


def _stored(content: bytes, record: zipfile.ZipInfo) -> bytes:
    """A record's bytes. Not by ``ZipFile.read``, which wants checksums that torch can leave out."""
    lengths = struct.unpack_from("<HH", content, record.header_offset + 26)
    start = record.header_offset + 30 + sum(lengths)
    value = content[start : start + record.file_size]
    if len(value) < record.file_size:
        raise ValueError(f"its record {record.filename!r} is cut off")
    return value
