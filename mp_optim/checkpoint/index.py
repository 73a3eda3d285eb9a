"""What a checkpoint holds and where it lies: ``index.json``, plain data that is checked before it
is believed.

A tensor is saved in boxes. The elements of a box are raw bytes in row-major order, so a reader
needs no unpickler. Every file of tensors is summed up in blocks: a reader of a part of it can tell
damage before anything is replaced.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import torch

from mp_optim.checkpoint.folder import is_plain_name
from mp_optim.checkpoint.manifest import BLOCK_BYTES

INDEX = "index.json"
_FORMAT = 1
_MOST_BYTES = 1 << 62


class SavedBox(NamedTuple):
    """A box of a tensor in a file.

    Attributes:
        offsets: index of its first element in the tensor.
        sizes: its shape.
        file: name of the file.
        start: first byte of its elements; in a checkpoint of the old form, of what ``torch.save``
            wrote for it.
        length: bytes from there.
    """

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    file: str
    start: int
    length: int


class Saved(NamedTuple):
    """An entry: the whole tensor's dtype and shape, and its boxes."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    boxes: list[SavedBox]


@dataclass(frozen=True)
class Index:
    """Everything a checkpoint holds.

    Attributes:
        entries: by name.
        sums: CRC-32 of each block of each file; None in the old form, whose boxes are what
            ``torch.save`` wrote.
    """

    entries: Mapping[str, Saved]
    sums: Mapping[str, Sequence[int]] | None


def as_json(index: Index) -> bytes:
    """The content of ``index.json``."""
    assert index.sums is not None
    files = sorted(index.sums)
    number = {name: at for at, name in enumerate(files)}
    entries = {name: _plain(saved, number) for name, saved in index.entries.items()}
    content = {
        "format": _FORMAT,
        "block_bytes": BLOCK_BYTES,
        "files": files,
        "crc32": [list(index.sums[name]) for name in files],
        "entries": entries,
    }
    return json.dumps(content, separators=(",", ":")).encode()


def _plain(saved: Saved, number: Mapping[str, int]) -> list[Any]:
    """Most entries are one box, which is the whole tensor: dtype, shape, number of the file, first
    byte."""
    dtype, boxes = str(saved.dtype).removeprefix("torch."), saved.boxes
    if len(boxes) == 1 and boxes[0].sizes == saved.shape:
        return [dtype, saved.shape, number[boxes[0].file], boxes[0].start]
    plain = [[box.offsets, box.sizes, number[box.file], box.start] for box in boxes]
    return [dtype, saved.shape, plain]


def from_json(content: bytes, sizes: Mapping[str, int]) -> Index:
    """Read it again, believing nothing.

    Args:
        sizes: bytes of the files that are there.

    Raises:
        ValueError: it is not what :func:`as_json` makes, or speaks of bytes that are not there.
    """
    try:
        plain = json.loads(content)
        if (plain["format"], plain["block_bytes"]) != (_FORMAT, BLOCK_BYTES):
            raise ValueError("it was written by another version of mp_optim")
        files = plain["files"]
        sums = dict(zip(files, plain["crc32"], strict=True))
        _check_sums(sums, sizes)
        entries = {
            name: _entry(name, entry, files) for name, entry in plain["entries"].items()
        }
    except (KeyError, TypeError, AttributeError, IndexError, RecursionError) as error:
        raise ValueError(f"{type(error).__name__}: {error}") from error
    check_saved(entries, sizes)
    return Index(entries, sums)


def _entry(name: str, plain: Any, files: list[str]) -> Saved:
    dtype_name, plain_shape, *where = plain
    dtype = _dtype(dtype_name)
    shape = _shape(tuple(plain_shape))
    if len(where) == 2:
        length = math.prod(shape) * dtype.itemsize
        file = _file(files, where[0])
        box = SavedBox((0,) * len(shape), shape, file, where[1], length)
        return Saved(dtype, shape, [box])
    boxes = []
    for offsets, lengths, number, start in where[0]:
        begin, sizes = _shape(tuple(offsets)), _shape(tuple(lengths))
        length = math.prod(sizes) * dtype.itemsize
        boxes.append(SavedBox(begin, sizes, _file(files, number), start, length))
    return Saved(dtype, shape, boxes)


def _file(files: list[str], number: Any) -> str:
    if not _are_counts((number,)):
        raise ValueError(f"it has the number of a file {number!r}")
    name: str = files[number]
    return name


@lru_cache
def _dtype(name: str) -> torch.dtype:
    dtype = getattr(torch, name)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"it has the dtype {name!r}")
    return dtype


@lru_cache(maxsize=4096)
def _shape(numbers: tuple[int, ...]) -> tuple[int, ...]:
    """The same, of integers: one for all that are equal."""
    if not _are_counts(numbers):
        raise ValueError(f"it has the shape or place {numbers}")
    return numbers


def _check_sums(sums: Mapping[str, Any], sizes: Mapping[str, int]) -> None:
    for name, blocks in sums.items():
        if not is_plain_name(name) or name not in sizes:
            raise ValueError(
                f"it names the file {name!r}, which is none of the checkpoint's"
            )
        if len(blocks) != -(-sizes[name] // BLOCK_BYTES) or not _are_counts(blocks):
            raise ValueError(f"it has no checksum for every block of {name}")


def check_saved(entries: Mapping[str, Saved], sizes: Mapping[str, int]) -> None:
    """Raise ValueError unless every box lies inside its tensor and its bytes inside a file that is
    there, and a tensor is no larger than its boxes."""
    for name, saved in entries.items():
        count = sum(math.prod(box.sizes) for box in saved.boxes)
        if not _are_counts(saved.shape) or math.prod(saved.shape) > count:
            raise ValueError(
                f"{name}: the checkpoint does not hold each element of shape {saved.shape} once, "
                f"but {count}"
            )
        for box in saved.boxes:
            if box.sizes is not saved.shape and not _fits(box, saved.shape):
                raise ValueError(
                    f"{name} of shape {saved.shape} has a box of {box.sizes} at {box.offsets}"
                )
            are_numbers = _are_counts((box.start, box.length))
            if not are_numbers or box.start + box.length > sizes.get(box.file, -1):
                raise ValueError(
                    f"{name} lies at bytes {box.start} to {box.start + box.length} of "
                    f"{box.file!r}, which are not there"
                )


def _fits(box: SavedBox, shape: tuple[int, ...]) -> bool:
    return (
        len(box.offsets) == len(box.sizes) == len(shape)
        and _are_counts((*box.offsets, *box.sizes, *shape))
        and all(
            offset + size <= most
            for offset, size, most in zip(box.offsets, box.sizes, shape, strict=True)
        )
    )


def _are_counts(values: Iterable[Any]) -> bool:
    return all(type(value) is int and 0 <= value < _MOST_BYTES for value in values)
