"""The files of a version but for the tensors: what is listed, what is where, and the same for
torch's readers. Nothing in them is believed before it was checked.

``manifest.json`` has the size and a checksum of each file. ``index.json`` has the entries: a tensor
is saved in boxes, whose elements are raw bytes in row-major order, so that a reader needs no
unpickler; and a CRC-32 of each MiB of the tensors' files, so that a reader of a part of one can
tell damage before it replaces anything. ``common.pt`` has the plain data. ``.metadata`` is a pickle
for ``torch.distributed.checkpoint``, which is never read here.
"""

from __future__ import annotations

import bisect
import ctypes
import hashlib
import io
import itertools
import json
import math
import mmap
import os
import pickle
import pickletools
import struct
import zipfile
import zlib
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache
from operator import add, le
from pathlib import Path
from typing import IO, Any, BinaryIO, NamedTuple, cast

import torch
from torch import Tensor
from torch._utils import _rebuild_tensor_v3
from torch.serialization import MAGIC_NUMBER, PROTOCOL_VERSION

from mp_optim.checkpoint.commit import MANIFEST, inside, is_plain_name, write_durably
from mp_optim.core.partition import Box

BLOCK_BYTES = 1 << 20
"""Bytes of a data file that have a CRC-32 of their own."""
INDEX = "index.json"
COMMON = "common.pt"
METADATA = ".metadata"
_MANIFEST_FORMAT = 2
_INDEX_FORMAT = 1
_MOST_BYTES = 1 << 62
_PARTS_OF_COMMON = {"optimizer", "extra", "model", "scheduler"}


# -- manifest.json --------------------------------------------------------------------------------


@dataclass(frozen=True)
class FileSum:
    """Size in bytes and one checksum of a file, hexadecimal.

    Attributes:
        sha256: SHA-256 of its content.
        blocks: of a data file, SHA-256 of the CRC-32s of its MiBs, 4 bytes each, the lowest first.
            They are computed several times as fast as SHA-256 of the content.
    """

    bytes: int
    sha256: str = ""
    blocks: str = ""

    @classmethod
    def of_blocks(cls, size: int, sums: Sequence[int]) -> FileSum:
        """The sum of a data file, from the CRC-32s of its MiBs."""
        packed = struct.pack(f"<{len(sums)}I", *sums)
        return cls(size, blocks=hashlib.sha256(packed).hexdigest())


Files = Mapping[str, FileSum]
"""The files of a version by name."""


def file_sum(path: Path) -> FileSum:
    digest, size = hashlib.sha256(), 0
    with path.open("rb") as file:
        while block := file.read(1 << 22):
            digest.update(block)
            size += len(block)
    return FileSum(size, digest.hexdigest())


def _blocks_sum(path: Path) -> FileSum:
    sums, size = [], 0
    with path.open("rb") as file:
        while block := file.read(BLOCK_BYTES):
            sums.append(zlib.crc32(block))
            size += len(block)
    return FileSum.of_blocks(size, sums)


def write_manifest(folder: Path, files: Files, world_size: int) -> None:
    """Write it where :func:`read_manifest` finds it."""
    sums = {}
    for name, entry in sorted(files.items()):
        sums[name] = {key: value for key, value in asdict(entry).items() if value != ""}
    facts = {"world_size": world_size, "torch": torch.__version__}
    content = {"format": _MANIFEST_FORMAT, **facts, "files": sums}
    write_durably(folder / MANIFEST, json.dumps(content, indent=1).encode())


def read_manifest(folder: Path) -> Files:
    """The files of a checkpoint, which are all there with their sizes.

    Raises:
        FileNotFoundError: there is none, so the checkpoint is not complete.
        ValueError: files are missing or of another size, naming them; another format; or names that
            leave the folder.
    """
    path = inside(folder, MANIFEST, str(folder))
    if not path.is_file():
        raise FileNotFoundError(f"{folder} is no complete checkpoint: it has no {MANIFEST}")
    try:
        content = json.loads(_read_text(path))
        files = {name: FileSum(**entry) for name, entry in content["files"].items()}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"{path} is damaged: {error}") from error
    if content.get("format") != _MANIFEST_FORMAT:
        raise ValueError(
            f"{path} is not of format {_MANIFEST_FORMAT}: it was written by another version of "
            "mp_optim"
        )
    wrong = []
    for name, entry in files.items():
        file = inside(folder, name, str(path))
        size = file.stat().st_size if file.is_file() else "missing"
        if size != entry.bytes:
            wrong.append(f"{name}: {size}, expected {entry.bytes}")
    if wrong:
        raise ValueError(f"{folder} is damaged; bytes of its files: {'; '.join(wrong)}")
    return files


def _read_text(path: Path) -> bytes:
    """The content of a file that has to be text. Holes of a sparse one read as zeros, which no text
    has: so it takes no more memory than the file does of the disk.

    Raises:
        ValueError: it has zeros.
    """
    blocks = []
    with path.open("rb") as file:
        while block := file.read(BLOCK_BYTES):
            if b"\0" in block:
                raise ValueError(f"{path} is damaged: it has zero bytes, as no text has")
            blocks.append(block)
    return b"".join(blocks)


def _read_checked(folder: Path, files: Files, name: str) -> bytes:
    """The content of a file that is small enough to be checked always.

    Raises:
        ValueError: it is not in the manifest, or not what was written.
    """
    if name not in files:
        raise ValueError(
            f"{folder / MANIFEST} lists no {name}: this is no checkpoint of mp_optim's, or it is "
            "damaged"
        )
    path = inside(folder, name, MANIFEST)
    if path.suffix == ".json":
        content = _read_text(path)
        actual = FileSum(len(content), hashlib.sha256(content).hexdigest())
    else:
        content, actual = b"", file_sum(path)
    if actual != files[name]:
        raise ValueError(
            f"{folder} is damaged: the checksums of {[name]} are not those of its {MANIFEST}; "
            "nothing was loaded"
        )
    return content or path.read_bytes()


def verify_files(folder: Path, files: Iterable[tuple[str, FileSum]]) -> None:
    """Read files and compare their checksums.

    Raises:
        ValueError: naming those that differ.
    """
    wrong = []
    for name, expected in files:
        path = inside(folder, name, MANIFEST)
        actual = _blocks_sum(path) if expected.blocks else file_sum(path)
        if actual != expected:
            wrong.append(name)
    if wrong:
        raise ValueError(
            f"{folder} is damaged: the checksums of {wrong} are not those of its {MANIFEST}"
        )


# -- index.json -----------------------------------------------------------------------------------


class SavedBox(NamedTuple):
    """A box of a tensor in a file.

    Attributes:
        file: name of the file.
        start: first byte of its elements. length: bytes from there.
    """

    place: Box
    file: str
    start: int
    length: int


class Saved(NamedTuple):
    """An entry: the whole tensor's dtype and shape, and its boxes."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    boxes: list[SavedBox]

    @property
    def bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class Index:
    """Everything a checkpoint holds: entries by name, and the CRC-32 of each block of each file."""

    entries: Mapping[str, Saved]
    sums: Mapping[str, Sequence[int]]


def as_json(index: Index) -> bytes:
    """The content of ``index.json``. Most entries are one box, which is the whole tensor: dtype,
    shape, number of the file, first byte."""
    files = sorted(index.sums)
    number = {name: at for at, name in enumerate(files)}
    entries: dict[str, list[Any]] = {}
    for name, (dtype, shape, boxes) in index.entries.items():
        entries[name] = [str(dtype).removeprefix("torch."), shape]
        if len(boxes) == 1 and boxes[0].place.sizes == shape:
            entries[name] += [number[boxes[0].file], boxes[0].start]
        else:
            plain = [[*box.place, number[box.file], box.start] for box in boxes]
            entries[name].append(plain)
    content = {
        "format": _INDEX_FORMAT,
        "block_bytes": BLOCK_BYTES,
        "files": files,
        "crc32": [list(index.sums[name]) for name in files],
        "entries": entries,
    }
    return json.dumps(content, separators=(",", ":")).encode()


def read_index(version: Path, files: Files) -> Index:
    """What a version holds and where.

    Raises:
        ValueError: the index is damaged or no plain data.
    """
    content = _read_checked(version, files, INDEX)
    sizes = {file: entry.bytes for file, entry in files.items()}
    try:
        return from_json(content, sizes)
    except ValueError as error:
        raise ValueError(f"{version / INDEX} is damaged or no plain data: {error}") from error


def from_json(content: bytes, sizes: Mapping[str, int]) -> Index:
    """Read it again, believing nothing.

    Args:
        sizes: bytes of the files that are there.

    Raises:
        ValueError: it is not what :func:`as_json` makes, or speaks of bytes that are not there.
    """
    try:
        plain = json.loads(content)
        if (plain["format"], plain["block_bytes"]) != (_INDEX_FORMAT, BLOCK_BYTES):
            raise ValueError("it was written by another version of mp_optim")
        files = plain["files"]
        sums = dict(zip(files, plain["crc32"], strict=True))
        for name, blocks in sums.items():
            if not is_plain_name(name) or name not in sizes:
                raise ValueError(f"it names the file {name!r}, which is none of the checkpoint's")
            if len(blocks) != -(-sizes[name] // BLOCK_BYTES) or not _are_counts(blocks):
                raise ValueError(f"it has no checksum for every block of {name}")
        entries = {name: _entry(entry, files) for name, entry in plain["entries"].items()}
    except (KeyError, TypeError, AttributeError, IndexError, RecursionError) as error:
        raise ValueError(f"{type(error).__name__}: {error}") from error
    _check_saved(entries, sizes)
    return Index(entries, sums)


def _entry(plain: Any, files: list[str]) -> Saved:
    dtype_name, plain_shape, *where = plain
    dtype = _dtype(dtype_name)
    shape = _shape(tuple(plain_shape))
    if len(where) == 2:
        where = [[((0,) * len(shape), shape, *where)]]
    boxes = []
    for offsets, lengths, number, start in where[0]:
        place = Box(_shape(tuple(offsets)), _shape(tuple(lengths)))
        if not _are_counts((number,)):
            raise ValueError(f"it has the number of a file {number!r}")
        boxes.append(SavedBox(place, files[number], start, place.numel * dtype.itemsize))
    return Saved(dtype, shape, boxes)


@lru_cache
def _dtype(name: str) -> torch.dtype:
    dtype = getattr(torch, name)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"it has the dtype {name!r}")
    return dtype


@lru_cache(maxsize=4096)
def _shape(numbers: tuple[int, ...]) -> tuple[int, ...]:
    """The same, of integers: one object for all that are equal."""
    if not _are_counts(numbers):
        raise ValueError(f"it has the shape or place {numbers}")
    return numbers


def _check_saved(entries: Mapping[str, Saved], sizes: Mapping[str, int]) -> None:
    """Raise ValueError unless every box is inside its tensor and its bytes inside a file that is
    there, and a tensor is no larger than its boxes."""
    for name, saved in entries.items():
        count = sum(box.place.numel for box in saved.boxes)
        if math.prod(saved.shape) > count:
            raise ValueError(
                f"{name}: the checkpoint does not hold each element of shape {saved.shape} once, "
                f"but {count}"
            )
        for box in saved.boxes:
            offsets, lengths = box.place
            if lengths is not saved.shape:
                ends = map(add, offsets, lengths)
                are_dims = len(offsets) == len(lengths) == len(saved.shape)
                if not are_dims or not all(map(le, ends, saved.shape)):
                    raise ValueError(
                        f"{name} of shape {saved.shape} has a box of {lengths} at {offsets}"
                    )
            are_numbers = _are_counts((box.start, box.length))
            if not are_numbers or box.start + box.length > sizes.get(box.file, -1):
                raise ValueError(
                    f"{name} lies at bytes {box.start} to {box.start + box.length} of "
                    f"{box.file!r}, which are not there"
                )


def _are_counts(values: Iterable[Any]) -> bool:
    return all(type(value) is int and 0 <= value < _MOST_BYTES for value in values)


# -- .metadata ------------------------------------------------------------------------------------


def as_metadata(index: Index, folder: Path) -> bytes:
    """Return the content of ``.metadata`` for files written by mp_optim. Equal parts are one object
    that is pickled once."""
    from torch.distributed.checkpoint.filesystem import _StorageInfo
    from torch.distributed.checkpoint.metadata import (
        BytesStorageMetadata,
        ChunkStorageMetadata,
        Metadata,
        MetadataIndex,
        StorageMeta,
        TensorProperties,
        TensorStorageMetadata,
    )

    tensors: dict[str, TensorStorageMetadata | BytesStorageMetadata] = {}
    where: dict[MetadataIndex, _StorageInfo] = {}
    alike: dict[tuple[object, ...], TensorStorageMetadata] = {}
    for name, saved in index.entries.items():
        cut = tuple(box.place for box in saved.boxes)
        metadata = alike.get((saved.dtype, saved.shape, cut))
        if metadata is None:
            chunks = [
                ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes))
                for offsets, sizes in cut
            ]
            metadata = TensorStorageMetadata(
                TensorProperties(dtype=saved.dtype), torch.Size(saved.shape), chunks
            )
            alike[saved.dtype, saved.shape, cut] = metadata
        tensors[name] = metadata
        for number, (box, chunk) in enumerate(zip(saved.boxes, metadata.chunks, strict=True)):
            before = len(header(saved.dtype, box.place.sizes))
            where[MetadataIndex(name, chunk.offsets, number)] = _StorageInfo(
                box.file, box.start - before, box.length + before
            )
    paths = {name: (name,) for name in tensors}
    storage = StorageMeta(checkpoint_id=str(folder))
    return pickle.dumps(Metadata(tensors, paths, where, storage))


# -- tensors in data files ------------------------------------------------------------------------
#
# Raw elements behind a header with which ``torch.load`` reads them, too: that of ``torch.save(...,
# _use_new_zipfile_serialization=False)``, whose elements come last and raw. It depends on the dtype
# and the shape alone, so it is made once for all tensors that share them: writing a small tensor is
# two copies, where ``torch.save`` takes hundreds of microseconds.

_PICKLE_PROTOCOL = 2  # what torch.load's safe unpickler knows
_KEY = "0"
_TENSOR, _STORAGE = object(), object()


class _Pickler(pickle.Pickler):
    """Pickles ``_TENSOR`` as a contiguous tensor over bytes that follow."""

    def __init__(self, file: io.BytesIO, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
        super().__init__(file, protocol=_PICKLE_PROTOCOL)
        self._dtype, self._shape = dtype, shape

    def reducer_override(self, obj: Any) -> Any:
        if obj is not _TENSOR:
            return NotImplemented
        sizes = [max(size, 1) for size in self._shape]
        strides = tuple(math.prod(sizes[dim + 1 :]) for dim in range(len(sizes)))
        hooks: OrderedDict[str, Any] = OrderedDict()
        made = _STORAGE, 0, self._shape, strides, False, hooks, self._dtype
        return _rebuild_tensor_v3, made

    def persistent_id(self, obj: Any) -> Any:
        if obj is not _STORAGE:
            return None
        count = math.prod(self._shape) * self._dtype.itemsize
        return "storage", torch.ByteStorage, _KEY, "cpu", count, None


@lru_cache(maxsize=4096)
def header(dtype: torch.dtype, shape: tuple[int, ...]) -> bytes:
    """What comes before the elements of a contiguous tensor."""
    buffer = io.BytesIO()
    system = {"protocol_version": PROTOCOL_VERSION, "little_endian": True}
    for part in (MAGIC_NUMBER, PROTOCOL_VERSION, system):
        pickle.dump(part, buffer, protocol=_PICKLE_PROTOCOL)
    _Pickler(buffer, dtype, shape).dump(_TENSOR)
    pickle.dump([_KEY], buffer, protocol=_PICKLE_PROTOCOL)
    return buffer.getvalue() + struct.pack("<q", math.prod(shape) * dtype.itemsize)


def byte_view(tensor: Tensor) -> memoryview:
    """The bytes of a contiguous tensor on the host, writable; the tensor has to outlive the
    view."""
    assert tensor.device.type == "cpu" and tensor.is_contiguous()
    if not tensor.nbytes:
        return memoryview(b"")
    return memoryview((ctypes.c_char * tensor.nbytes).from_address(tensor.data_ptr())).cast("B")


# -- common.pt ------------------------------------------------------------------------------------


def read_common(version: Path, files: Files) -> dict[str, Any]:
    """What is saved next to the tensors. Neither its checksum nor its pickle is taken on trust.

    Raises:
        ValueError: it is damaged, or not plain data.
    """
    content = _read_checked(version, files, COMMON)
    try:
        common: dict[str, Any] = load_plain(content)
        if not isinstance(common, dict) or not common.keys() >= _PARTS_OF_COMMON:
            raise ValueError(f"it has no {sorted(_PARTS_OF_COMMON)}")
        if not isinstance(common["model"], dict):
            raise ValueError(f"its 'model' is a {type(common['model']).__name__}")
        for group in (common["optimizer"] or {"param_groups": ()})["param_groups"]:
            if len(group["params"]) != len(set(group["param_names"])):
                raise ValueError("a param group has not one name for each parameter")
    except Exception as error:  # damage raises anything
        first = (str(error).splitlines() or [""])[0]
        raise ValueError(
            f"{version / COMMON} is damaged or no plain data: {type(error).__name__}: {first}"
        ) from error
    return common


# -- pickles of others ----------------------------------------------------------------------------
#
# Nothing in them is called, and they take no more memory than they have bytes. Torch's own safe
# unpickler makes objects of any size that a pickle names: ``bytearray(n)`` is eight bytes in a file
# and n in memory, a compressed record a thousandth. So a pickle is checked before torch reads it.

_BY_NUMBER = {"complex", "_MEM_FORMAT_ENCODING"}
"""What may be called with a number: all else would be something of that size."""
_LEGACY_PICKLES = 5
"""In a file that ``torch.save`` wrote before it wrote archives; elements follow."""


class Record:
    """Takes the place of a pickled object, and can do nothing."""

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
        pass


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

    def __init__(self, stream: BinaryIO) -> None:
        # An unpickler's memory grows to the highest number that a pickle gives an object; picklers
        # give them in order.
        start = stream.tell()
        for count, (opcode, number, _) in enumerate(pickletools.genops(stream)):
            if opcode.name.endswith("PUT") and not 0 <= int(number or 0) <= count:
                raise ValueError(f"it remembers object {number} when it has read {count}")
        stream.seek(start)
        super().__init__(stream)
        self._classes: dict[tuple[str, str], type[Record]] = {}

    def find_class(self, module: str, name: str) -> Any:
        return self._classes.setdefault((module, name), type(name, (Record,), {}))

    def persistent_load(self, pid: Any) -> Any:
        return Record()


def load_plain_file(path: str | os.PathLike[str]) -> Any:
    """What is in a file of ``torch.save``: plain data and tensors, or nothing is read.

    Raises:
        OSError: it cannot be opened.
        ValueError: it is no such file, damaged, holds objects of classes, or would take more memory
            than it has bytes.
    """
    with open(path, "rb") as file:
        try:
            # It may be larger than memory has room for twice.
            return load_plain(memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)))
        except Exception as error:  # zipfile's, pickle's, RuntimeError, and more
            first = (str(error).splitlines() or [""])[0]
            raise ValueError(
                f"{os.fspath(path)} is not a whole file of torch.save with nothing but plain data "
                f"and tensors: {type(error).__name__}: {first} (objects of classes could run code, "
                "and are not read)"
            ) from error


def load_plain(content: bytes | memoryview) -> Any:
    """What ``torch.save`` wrote: plain data and tensors, with ``weights_only``.

    Raises:
        Exception: it is damaged, no plain data, or would take more memory than it has bytes.
    """
    content = memoryview(content)
    whole = [content]
    if zipfile.is_zipfile(_stream(whole)):
        whole = _plain_archive(content)
    else:
        stream = _stream(whole)
        for _ in range(_LEGACY_PICKLES):
            InertUnpickler(stream).load()
    return torch.load(_stream(whole), map_location="cpu", weights_only=True)


def _plain_archive(content: memoryview) -> list[memoryview]:
    """A new archive of the records that were checked, byte for byte: another reader could find
    other records in the same file."""
    copied, records = _Pieces(), zipfile.ZipFile(_stream([content])).infolist()
    names = {record.filename for record in records}
    if len(names) < len(records) or sum(r.file_size for r in records) > len(content):
        raise ValueError("its records are larger than the file, or there twice")
    with zipfile.ZipFile(cast("IO[bytes]", copied), "w", zipfile.ZIP_STORED) as archive:
        for record in records:
            if record.compress_type != zipfile.ZIP_STORED:
                raise ValueError(f"its record {record.filename!r} is compressed")
            # not by ZipFile.read, which wants checksums that torch can leave out
            lengths = struct.unpack_from("<HH", content, record.header_offset + 26)
            start = record.header_offset + 30 + sum(lengths)
            value = content[start : start + record.file_size]
            if len(value) < record.file_size:
                raise ValueError(f"its record {record.filename!r} is cut off")
            if record.filename.endswith(".pkl"):
                InertUnpickler(io.BytesIO(value)).load()
            archive.writestr(record.filename, cast("bytes", value))
    return copied.pieces


class _Pieces:
    """A file for writing that keeps what it is given and copies nothing."""

    def __init__(self) -> None:
        self.pieces: list[memoryview] = []
        self._size = 0

    def write(self, data: bytes | memoryview) -> int:
        self.pieces.append(memoryview(data))
        self._size += len(data)
        return len(data)

    def tell(self) -> int:
        return self._size

    def flush(self) -> None:
        """Nothing waits."""


def _stream(pieces: Sequence[memoryview]) -> io.BufferedReader:
    return io.BufferedReader(_PieceReader(pieces))


class _PieceReader(io.RawIOBase):
    """A file for reading over several pieces of memory."""

    def __init__(self, pieces: Sequence[memoryview]) -> None:
        self._pieces = [piece for piece in pieces if piece]
        self._ends = list(itertools.accumulate(map(len, self._pieces)))
        self._at = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        size = self._ends[-1] if self._ends else 0
        start = {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: size}[whence]
        if start + offset < 0:
            raise ValueError(f"there is no byte {start + offset}")
        self._at = start + offset
        return self._at

    def readinto(self, to: Any, /) -> int:
        number = bisect.bisect_right(self._ends, self._at)
        if number == len(self._ends):
            return 0
        rest = self._pieces[number][self._at - self._ends[number] :]
        count = min(len(to), len(rest))
        to[:count] = rest[:count]
        self._at += count
        return count
