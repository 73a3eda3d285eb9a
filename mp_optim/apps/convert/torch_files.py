"""Reader of ``torch.save`` files from other programs, which may be malicious.

The reader calls no function that a pickle names, and uses no more memory than the file has bytes.
torch's safe unpickler alone would create objects of any size. For example, ``bytearray(n)`` takes
eight bytes in a file and n bytes in memory, and a compressed record may be a thousand times as
large in memory. So each pickle is checked before torch reads it.
"""

from __future__ import annotations

import io
import os
import pickle
import pickletools
import struct
import zipfile
from typing import Any, BinaryIO

import torch

_BY_NUMBER = {"complex", "_MEM_FORMAT_ENCODING"}
"""Names that a pickle may call with a number. A call of any other name with a number could allocate
memory of that size."""
_LEGACY_PICKLES = 5
"""Number of pickles at the start of a file in torch's old format. The elements of tensors follow
the pickles."""
_ARCHIVE = b"PK\x03\x04"


class Record:
    """Stand-in for a pickled object that runs no code of the object's class."""

    def __new__(cls, *args: Any, **_: Any) -> Record:
        is_sized = bool(args) and isinstance(args[0], (int, float))
        if is_sized and cls.__name__ not in _BY_NUMBER:
            raise pickle.UnpicklingError(
                f"the file calls {cls.__name__} with a number, which could allocate memory of any "
                "size"
            )
        seen: dict[int, Any] = {}
        waiting: list[Any] = [args]
        while waiting:
            value = waiting.pop()
            if isinstance(value, type) and value.__name__ == bytearray.__name__:
                raise pickle.UnpicklingError("the file calls a function that makes a bytearray")
            if isinstance(value, (tuple, list)) and id(value) not in seen:
                seen[id(value)] = value
                waiting += value
        return super().__new__(cls)

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def __setstate__(self, state: Any) -> None:
        pass


class InertUnpickler(pickle.Unpickler):
    """Unpickler that makes a record of every object that a pickle names, and imports nothing."""

    def __init__(self, stream: BinaryIO) -> None:
        # An unpickler's memory grows to the highest memo index, so refuse large indices. Picklers
        # number objects in order, so a valid index is at most the number of opcodes.
        start = stream.tell()
        for count, (opcode, number, _) in enumerate(pickletools.genops(stream)):
            if opcode.name.endswith("PUT") and not 0 <= int(number or 0) <= count:
                raise ValueError(
                    f"the file refers to object {number}, but has only {count} objects"
                )
        stream.seek(start)
        super().__init__(stream)
        self._classes: dict[tuple[str, str], type[Record]] = {}

    def find_class(self, module: str, name: str) -> Any:
        return self._classes.setdefault((module, name), type(name, (Record,), {}))

    def persistent_load(self, pid: Any) -> Any:
        return Record()


def load_plain_file(path: str | os.PathLike[str]) -> Any:
    """Return the plain data and tensors of a ``torch.save`` file.

    Raises:
        OSError: the file cannot be opened.
        ValueError: the file has another format, is damaged, holds objects of classes, or would take
            more memory than the file has bytes.
    """
    with open(path, "rb") as file:
        try:
            _check_pickles(file)
            file.seek(0)
            return torch.load(file, map_location="cpu", weights_only=True)
        except Exception as error:  # A damaged file can raise errors of zipfile, pickle and torch.
            first = (str(error).splitlines() or [""])[0]
            raise ValueError(
                f"{os.fspath(path)} is damaged, or has objects other than plain data and tensors, "
                f"which could run code ({type(error).__name__}: {first}); save the file again "
                "with only plain data and tensors"
            ) from error


def _check_pickles(file: BinaryIO) -> None:
    """Raise an exception if torch must not read the pickles of a file.

    A file with the first bytes of an archive is read as an archive, as torch does.
    """
    is_archive = file.read(len(_ARCHIVE)) == _ARCHIVE
    file.seek(0)
    if not is_archive:
        for _ in range(_LEGACY_PICKLES):
            InertUnpickler(file).load()
        return
    size, records = os.fstat(file.fileno()).st_size, zipfile.ZipFile(file).infolist()
    names = {record.filename for record in records}
    if len(names) < len(records) or sum(record.file_size for record in records) > size:
        raise ValueError("the file's records are larger than the file, or listed twice")
    for record in records:
        if record.compress_type != zipfile.ZIP_STORED:
            raise ValueError(
                f"the record {record.filename!r} is compressed; save the file with torch.save"
            )
        if record.filename.endswith(".pkl"):
            # Do not use ZipFile.read, because it needs checksums, which torch can omit.
            file.seek(record.header_offset + 26)
            lengths = struct.unpack("<HH", file.read(4))
            file.seek(sum(lengths), os.SEEK_CUR)
            InertUnpickler(io.BytesIO(file.read(record.file_size))).load()
