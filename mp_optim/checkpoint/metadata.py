"""``.metadata`` of ``torch.distributed.checkpoint``: a pickle. Written for torch's own
``dcp.load``; read only where an older version of mp_optim wrote the checkpoint, by an unpickler
that makes plain records and can do nothing else."""

from __future__ import annotations

import io
import pickle
from collections.abc import Mapping
from itertools import product
from pathlib import Path
from typing import Any

import torch
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

from mp_optim.checkpoint.folder import is_plain_name
from mp_optim.checkpoint.index import Index, Saved, SavedBox, check_saved
from mp_optim.checkpoint.inert import InertUnpickler
from mp_optim.checkpoint.payload import header

METADATA = ".metadata"
"""The file in which torch.distributed.checkpoint keeps what is where."""


# -- for torch ------------------------------------------------------------------------------------


def as_metadata(index: Index, folder: Path) -> bytes:
    """The content of ``.metadata`` for files written by mp_optim. What is equal is one object,
    pickled once."""
    tensors: dict[str, TensorStorageMetadata | BytesStorageMetadata] = {}
    where: dict[MetadataIndex, _StorageInfo] = {}
    alike: dict[tuple[object, ...], TensorStorageMetadata] = {}
    for name, saved in index.entries.items():
        cut = tuple((box.offsets, box.sizes) for box in saved.boxes)
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
        for number, (box, chunk) in enumerate(
            zip(saved.boxes, metadata.chunks, strict=True)
        ):
            before = len(header(saved.dtype, box.sizes))
            where[MetadataIndex(name, chunk.offsets, number)] = _StorageInfo(
                box.file, box.start - before, box.length + before
            )
    paths = {name: (name,) for name in tensors}
    storage = StorageMeta(checkpoint_id=str(folder))
    return pickle.dumps(Metadata(tensors, paths, where, storage))


# -- of an older version --------------------------------------------------------------------------


_METADATA_MODULE = "torch.distributed.checkpoint.metadata"
_METADATA_CLASSES = (
    "Metadata",
    "TensorStorageMetadata",
    "ChunkStorageMetadata",
    "MetadataIndex",
    "TensorProperties",
    "StorageMeta",
    "_MEM_FORMAT_ENCODING",
)
_PATH_CLASSES = ("Path", "PosixPath", "WindowsPath", "PurePosixPath", "PureWindowsPath")
_RECORDS = {
    *product((_METADATA_MODULE,), _METADATA_CLASSES),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    ("torch.serialization", "_get_layout"),
    *product(("pathlib", "pathlib._local"), _PATH_CLASSES),
}


class _Reader(InertUnpickler):
    """Knows the classes of a checkpoint's metadata by name."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("torch", "Size"):
            return tuple
        dtype = getattr(torch, name, None) if module == "torch" else None
        if isinstance(dtype, torch.dtype):
            return dtype
        if (module, name) not in _RECORDS:
            raise pickle.UnpicklingError(
                f"it wants {module}.{name}, which no checkpoint needs"
            )
        return super().find_class(module, name)


def from_metadata(content: bytes, sizes: Mapping[str, int]) -> Index:
    """What and where, from a ``.metadata`` that torch wrote. No code in it runs.

    Args:
        sizes: bytes of the files that are there.

    Raises:
        ValueError: it is not that of tensors in files that are there.
    """
    try:
        plain = _content(_Reader(io.BytesIO(content)).load(), "Metadata")
        where = {
            (held["fqn"], held.get("offset")): _content(info, "_StorageInfo")
            for key, info in plain["storage_data"].items()
            for held in [_content(key, "MetadataIndex")]
        }
        entries = {
            name: _saved(name, _content(record, "TensorStorageMetadata"), where)
            for name, record in plain["state_dict_metadata"].items()
        }
    except (KeyboardInterrupt, SystemExit, MemoryError):
        raise
    except Exception as error:  # a damaged pickle raises anything
        raise ValueError(f"{type(error).__name__}: {error}") from error
    check_saved(entries, sizes)
    return Index(entries, None)


def _content(record: Any, kind: str) -> dict[str, Any]:
    content = getattr(record, "content", None)
    if type(record).__name__ != kind or not isinstance(content, dict):
        raise ValueError(f"it has {type(record).__name__} where {kind} belongs")
    return content


def _saved(
    name: str, record: Mapping[str, Any], where: Mapping[Any, Mapping[str, Any]]
) -> Saved:
    if not isinstance(name, str):
        raise ValueError(f"it has an entry called {name!r}")
    dtype = record["properties"].content[0]
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"{name} has the dtype {dtype!r}")
    boxes = []
    for chunk in record["chunks"]:
        held = _content(chunk, "ChunkStorageMetadata")
        info = where[name, held["offsets"]]
        if info.get("transform_descriptors") or not is_plain_name(
            info["relative_path"]
        ):
            raise ValueError(
                f"{name} lies in {info['relative_path']!r}, which is none of the checkpoint's files"
            )
        offsets, sizes = tuple(held["offsets"]), tuple(held["sizes"])
        place = info["relative_path"], info["offset"], info["length"]
        boxes.append(SavedBox(offsets, sizes, *place))
    return Saved(dtype, tuple(record["size"]), boxes)
