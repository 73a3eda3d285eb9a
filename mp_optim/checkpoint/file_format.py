"""The files of a version other than the tensors: manifest, index, and metadata for torch's readers.

Every value in these files is checked before use. ``manifest.json`` has the size and a checksum of
each file. ``index.json`` has the name, dtype and shape of each tensor. A tensor is saved as one or
several boxes (slices), whose elements are raw bytes in row-major order, so no unpickler is needed
to read a tensor. The index also has a CRC-32 of each MiB of the tensors' files. A reader of some
elements can therefore detect damage before any value is replaced. ``.metadata`` is a pickle for
``torch.distributed.checkpoint``; this package never reads ``.metadata``.
"""

from __future__ import annotations

import ctypes
import hashlib
import io
import json
import math
import pickle
import struct
import zlib
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache
from operator import add, le
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._utils import _rebuild_tensor_v3
from torch.serialization import MAGIC_NUMBER, PROTOCOL_VERSION

from mp_optim.checkpoint.commit import MANIFEST, inside, is_plain_name, write_durably
from mp_optim.core.partition import Box

BLOCK_BYTES = 1 << 20
"""Length in bytes of a block of a data file. Each block has its own CRC-32."""
INDEX = "index.json"
METADATA = ".metadata"
_MANIFEST_FORMAT = 2
_INDEX_FORMAT = 1
_MOST_BYTES = 1 << 62


# -- manifest.json --------------------------------------------------------------------------------


@dataclass(frozen=True)
class FileSum:
    """Size and checksum of a file. Checksums are hexadecimal text.

    Attributes:
        bytes: size of the file in bytes.
        sha256: SHA-256 of the file's content; empty for a data file.
        blocks: for a data file, SHA-256 of the CRC-32s of its MiBs, 4 bytes each, the lowest byte
            first. CRC-32s are computed several times as fast as SHA-256 of the content.
    """

    bytes: int
    sha256: str = ""
    blocks: str = ""

    @classmethod
    def of_blocks(cls, size: int, sums: Sequence[int]) -> FileSum:
        """Return the checksum of a data file, from the CRC-32s of its blocks of 1 MiB."""
        packed = struct.pack(f"<{len(sums)}I", *sums)
        return cls(size, blocks=hashlib.sha256(packed).hexdigest())


Files = Mapping[str, FileSum]
"""The files of a version by name."""


def file_sum(path: Path, *, in_blocks: bool = False) -> FileSum:
    """Return the size and the checksum of a file.

    Args:
        path: the file.
        in_blocks: True for a data file, whose checksum is formed from the CRC-32 of each MiB.
    """
    digest, sums, size = hashlib.sha256(), [], 0
    with path.open("rb") as file:
        while block := file.read(BLOCK_BYTES):
            size += len(block)
            if in_blocks:
                sums.append(zlib.crc32(block))
            else:
                digest.update(block)
    return FileSum.of_blocks(size, sums) if in_blocks else FileSum(size, digest.hexdigest())


def write_manifest(folder: Path, files: Files, world_size: int) -> None:
    sums = {}
    for name, entry in sorted(files.items()):
        sums[name] = {key: value for key, value in asdict(entry).items() if value != ""}
    facts = {"world_size": world_size, "torch": torch.__version__}
    content = {"format": _MANIFEST_FORMAT, **facts, "files": sums}
    write_durably(folder / MANIFEST, json.dumps(content, indent=1).encode())


def read_manifest(folder: Path) -> Files:
    """Return the files of a version, after a check that all files exist with the listed sizes.

    Raises:
        FileNotFoundError: the manifest is missing, so the version is not complete.
        ValueError: files are missing or have another size, the manifest has another format, or a
            file name points outside the folder.
    """
    path = inside(folder, MANIFEST, str(folder))
    if not path.is_file():
        raise FileNotFoundError(
            f"{folder} is not a complete checkpoint: {MANIFEST} is missing; load another version"
        )
    text = _read_text(path)
    try:
        content = json.loads(text)
        files = {name: FileSum(**entry) for name, entry in content["files"].items()}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"{path} is damaged: {error}; load another version") from error
    if content.get("format") != _MANIFEST_FORMAT:
        raise ValueError(
            f"{path} does not have format {_MANIFEST_FORMAT}; load the checkpoint with the "
            "version of mp_optim that wrote it"
        )
    wrong = []
    for name, entry in files.items():
        file = inside(folder, name, str(path))
        size = file.stat().st_size if file.is_file() else "missing"
        if size != entry.bytes:
            wrong.append(f"{name}: {size}, expected {entry.bytes}")
    if wrong:
        raise ValueError(
            f"{folder} is damaged, because files have other sizes in bytes: {', '.join(wrong)}; "
            "load another version"
        )
    return files


def _read_text(path: Path) -> bytes:
    """Return the content of a text file, but refuse NUL bytes.

    A damaged or malicious sparse file may be huge and take little of the disk. Its missing bytes
    read as zeros, which text does not have. So the refusal limits the memory to the bytes on the
    disk.

    Raises:
        ValueError: the file contains NUL bytes.
    """
    blocks = []
    with path.open("rb") as file:
        while block := file.read(BLOCK_BYTES):
            if b"\0" in block:
                raise ValueError(
                    f"{path} is damaged: it contains NUL bytes, which text never has; load "
                    "another version"
                )
            blocks.append(block)
    return b"".join(blocks)


def read_checked(folder: Path, files: Files, name: str) -> bytes:
    """Return the content of a text file, after a comparison with the manifest's checksum.

    Raises:
        ValueError: the manifest does not list the file, or has another checksum.
    """
    if name not in files:
        raise ValueError(
            f"{folder / MANIFEST} does not list {name}, so the checkpoint is damaged or was "
            "written by another program; load another version"
        )
    content = _read_text(inside(folder, name, MANIFEST))
    if FileSum(len(content), hashlib.sha256(content).hexdigest()) != files[name]:
        raise ValueError(
            f"{folder} is damaged: the checksums of {[name]} differ from its {MANIFEST}; nothing "
            "was loaded, so load another version"
        )
    return content


def verify_files(folder: Path, files: Iterable[tuple[str, FileSum]]) -> None:
    """Read files and compare their checksums with the manifest's checksums.

    Raises:
        ValueError: checksums differ; the message names the files.
    """
    wrong = []
    for name, expected in files:
        path = inside(folder, name, MANIFEST)
        if file_sum(path, in_blocks=bool(expected.blocks)) != expected:
            wrong.append(name)
    if wrong:
        raise ValueError(
            f"{folder} is damaged: the checksums of {wrong} differ from its {MANIFEST}; load "
            "another version"
        )


# -- index.json -----------------------------------------------------------------------------------


class SavedBox(NamedTuple):
    """Bytes of one box of a tensor in a data file.

    Attributes:
        place: offsets and sizes of the box in the tensor.
        file: name of the file.
        start: first byte of the box's elements.
        length: number of bytes.
    """

    place: Box
    file: str
    start: int
    length: int


class Saved(NamedTuple):
    """A tensor of a checkpoint: dtype and shape of the whole tensor, and its boxes in the files."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    boxes: list[SavedBox]

    @property
    def bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class Index:
    """The index of a version: tensors by name, and the CRC-32 of each MiB of each data file."""

    entries: Mapping[str, Saved]
    sums: Mapping[str, Sequence[int]]


def as_json(index: Index) -> bytes:
    """Return the content of ``index.json``.

    Most tensors are saved whole, as one box. For such a tensor the content has only the dtype, the
    shape, the number of the file and the first byte.
    """
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
    """Return the names of a version's tensors, and the positions of the tensors in the files.
    Check every value in the index.

    Raises:
        ValueError: the index is damaged, does not come from :func:`as_json`, or refers to bytes
            beyond a file.
    """
    content = read_checked(version, files, INDEX)
    sizes = {file: entry.bytes for file, entry in files.items()}
    try:
        plain = json.loads(content)
        if (plain["format"], plain["block_bytes"]) != (_INDEX_FORMAT, BLOCK_BYTES):
            raise ValueError("another version of mp_optim wrote the index")
        names = plain["files"]
        sums = dict(zip(names, plain["crc32"], strict=True))
        for name, blocks in sums.items():
            if not is_plain_name(name) or name not in sizes:
                raise ValueError(f"the file {name!r} of the index is not in the manifest")
            if len(blocks) != -(-sizes[name] // BLOCK_BYTES) or not _are_counts(blocks):
                raise ValueError(f"the index does not have one checksum for each MiB of {name}")
        entries = {}
        for name, entry in plain["entries"].items():
            entries[name] = _checked_entry(name, entry, names, sizes)
    except (ValueError, KeyError, TypeError, AttributeError, IndexError, RecursionError) as error:
        why = str(error)
        if not isinstance(error, ValueError):
            why = f"a value has another type ({type(error).__name__}: {error})"
        raise ValueError(
            f"{version / INDEX} is damaged or has objects other than plain data: {why}; load "
            "another version"
        ) from error
    return Index(entries, sums)


def _checked_entry(name: str, plain: Any, files: Sequence[str], sizes: Mapping[str, int]) -> Saved:
    """Return a tensor of the index, after checks: the boxes cover all elements, every box is inside
    the tensor, and the bytes of every box are inside an existing file.

    Args:
        name: name of the tensor.
        plain: the tensor's entry in ``index.json``.
        files: names of the data files, to which the entry refers by number.
        sizes: bytes of the checkpoint's files, by name.

    Raises:
        ValueError: a box or its bytes are outside, or elements are missing.
    """
    dtype_name, plain_shape, *where = plain
    dtype, shape = dtype_named(dtype_name), _shape(tuple(plain_shape))
    if len(where) == 2:
        where = [[((0,) * len(shape), shape, *where)]]
    boxes = []
    for plain_offsets, plain_lengths, number, start in where[0]:
        offsets, lengths = place = Box(_shape(tuple(plain_offsets)), _shape(tuple(plain_lengths)))
        if not _are_counts((number,)):
            raise ValueError(f"the file number {number!r} is not an integer >= 0")
        are_dims = len(offsets) == len(lengths) == len(shape)
        if not are_dims or not all(map(le, map(add, offsets, lengths), shape)):
            raise ValueError(
                f"the shard of {name} with shape {lengths} at offsets {offsets} is not inside the "
                f"shape {shape}"
            )
        box = SavedBox(place, files[number], start, place.numel * dtype.itemsize)
        are_numbers = _are_counts((start, box.length))
        if not are_numbers or start + box.length > sizes.get(box.file, -1):
            raise ValueError(
                f"{name} needs bytes {start} to {start + box.length} of {box.file!r}, which has "
                "fewer"
            )
        boxes.append(box)
    count = sum(box.place.numel for box in boxes)
    if math.prod(shape) > count:
        raise ValueError(
            f"{name}: the checkpoint must have each element of the shape {shape} once, but has "
            f"only {count} elements"
        )
    return Saved(dtype, shape, boxes)


@lru_cache
def dtype_named(name: str) -> torch.dtype:
    dtype = getattr(torch, name)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"the dtype {name!r} is not a dtype of torch")
    return dtype


@lru_cache(maxsize=4096)
def _shape(numbers: tuple[int, ...]) -> tuple[int, ...]:
    """Return a shape, after a check of its numbers. Equal shapes share one object."""
    if not _are_counts(numbers):
        raise ValueError(f"the shape or offsets {numbers} are not integers >= 0")
    return numbers


def _are_counts(values: Iterable[Any]) -> bool:
    return all(type(value) is int and 0 <= value < _MOST_BYTES for value in values)


# -- .metadata ------------------------------------------------------------------------------------


def as_metadata(index: Index, folder: Path) -> bytes:
    """Return the content of ``.metadata``, from which ``torch.distributed.checkpoint`` reads the
    tensors. Tensors with equal metadata share one object, so that the pickle stores the object
    once."""
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
# A tensor's raw elements follow a header, so that ``torch.load`` can read the tensor. The header is
# that of ``torch.save(..., _use_new_zipfile_serialization=False)``, which writes elements last and
# raw. A header depends only on dtype and shape, so tensors of equal dtype and shape share one
# header. Writing a small tensor takes two copies; ``torch.save`` takes hundreds of microseconds.

_PICKLE_PROTOCOL = 2  # torch.load's safe unpickler reads only this protocol.
_KEY = "0"
_TENSOR, _STORAGE = object(), object()


class _Pickler(pickle.Pickler):
    """Pickler that writes the placeholder ``_TENSOR`` as a contiguous tensor. The tensor's bytes
    are not in the pickle, but follow it in the file."""

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
    """Return the bytes that precede the elements of a contiguous tensor in a data file. With these
    bytes ``torch.load`` can read the tensor."""
    buffer = io.BytesIO()
    system = {"protocol_version": PROTOCOL_VERSION, "little_endian": True}
    for part in (MAGIC_NUMBER, PROTOCOL_VERSION, system):
        pickle.dump(part, buffer, protocol=_PICKLE_PROTOCOL)
    _Pickler(buffer, dtype, shape).dump(_TENSOR)
    pickle.dump([_KEY], buffer, protocol=_PICKLE_PROTOCOL)
    return buffer.getvalue() + struct.pack("<q", math.prod(shape) * dtype.itemsize)


def byte_view(tensor: Tensor) -> memoryview:
    """Return the bytes of a contiguous tensor on the host as a writable view. The tensor must
    outlive the view."""
    assert tensor.device.type == "cpu" and tensor.is_contiguous()
    if not tensor.nbytes:
        return memoryview(b"")
    return memoryview((ctypes.c_char * tensor.nbytes).from_address(tensor.data_ptr())).cast("B")
