"""What a complete checkpoint consists of: size and checksum of each file, in ``manifest.json``."""

from __future__ import annotations

import hashlib
import json
import struct
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from mp_optim.checkpoint.durable import write_durably
from mp_optim.checkpoint.folder import inside

MANIFEST = "manifest.json"
BLOCK_BYTES = 1 << 20
"""Bytes of a data file that have a CRC-32 of their own."""
_FORMAT = 2
_OLD_FORMAT = 1
"""Its files all have a SHA-256."""


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


@dataclass(frozen=True)
class Manifest:
    """The files of a checkpoint by name, and facts about the save: ``world_size``, ``torch``."""

    files: Mapping[str, FileSum]
    facts: Mapping[str, Any]


def file_sum(path: Path) -> FileSum:
    """Read a file and sum it up."""
    digest, size = hashlib.sha256(), 0
    with path.open("rb") as file:
        while block := file.read(1 << 22):
            digest.update(block)
            size += len(block)
    return FileSum(size, digest.hexdigest())


def blocks_sum(path: Path) -> FileSum:
    """Read a data file and sum it up."""
    sums, size = [], 0
    with path.open("rb") as file:
        while block := file.read(BLOCK_BYTES):
            sums.append(zlib.crc32(block))
            size += len(block)
    return FileSum.of_blocks(size, sums)


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Write it where :func:`read_manifest` finds it."""
    files = {name: _as_json(entry) for name, entry in sorted(manifest.files.items())}
    write_durably(
        folder / MANIFEST,
        json.dumps(
            {"format": _FORMAT, **manifest.facts, "files": files}, indent=1
        ).encode(),
    )


def _as_json(entry: FileSum) -> dict[str, Any]:
    return {key: value for key, value in asdict(entry).items() if value != ""}


def read_manifest(folder: Path) -> Manifest:
    """The manifest of a checkpoint whose files are all there with their sizes.

    Raises:
        FileNotFoundError: there is none, so the checkpoint is not complete.
        ValueError: files are missing or of another size, naming them; another format; or names that
            leave the folder.
    """
    path = inside(folder, MANIFEST, str(folder))
    if not path.is_file():
        raise FileNotFoundError(
            f"{folder} is no complete checkpoint: it has no {MANIFEST}"
        )
    try:
        content = json.loads(read_text(path))
        files = {name: FileSum(**entry) for name, entry in content.pop("files").items()}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"{path} is damaged: {error}") from error
    if content.pop("format", None) not in (_FORMAT, _OLD_FORMAT):
        raise ValueError(
            f"{path} is not of format {_FORMAT} or {_OLD_FORMAT}: it was written by another "
            "version of mp_optim"
        )
    sizes = {name: _size(inside(folder, name, str(path))) for name in files}
    wrong = [
        f"{name}: {sizes[name]}, expected {entry.bytes}"
        for name, entry in files.items()
        if sizes[name] != entry.bytes
    ]
    if wrong:
        raise ValueError(f"{folder} is damaged; bytes of its files: {'; '.join(wrong)}")
    return Manifest(files, content)


def read_text(path: Path) -> bytes:
    """The content of a file that has to be text. Holes of a sparse one read as zeros, which no text
    has: so it takes no more memory than the file does of the disk.

    Raises:
        ValueError: it has zeros.
    """
    blocks = []
    with path.open("rb") as file:
        while block := file.read(BLOCK_BYTES):
            if b"\0" in block:
                raise ValueError(
                    f"{path} is damaged: it has zero bytes, as no text has"
                )
            blocks.append(block)
    return b"".join(blocks)


def _size(path: Path) -> int | str:
    return path.stat().st_size if path.is_file() else "missing"


def read_checked(folder: Path, manifest: Manifest, name: str) -> bytes:
    """The content of a file that is small enough to be checked always.

    Raises:
        ValueError: it is not in the manifest, or not what was written.
    """
    if name not in manifest.files:
        raise ValueError(
            f"{folder / MANIFEST} lists no {name}: this is no checkpoint of mp_optim's, or it is "
            "damaged"
        )
    path = inside(folder, name, MANIFEST)
    is_text = path.suffix == ".json"
    content = read_text(path) if is_text else b""
    actual = _sum_of(content) if is_text else file_sum(path)
    if actual != manifest.files[name]:
        raise ValueError(
            f"{folder} is damaged: the checksums of {[name]} are not those of its {MANIFEST}; "
            "nothing was loaded"
        )
    return content if is_text else path.read_bytes()


def _sum_of(content: bytes) -> FileSum:
    return FileSum(len(content), hashlib.sha256(content).hexdigest())


def verify_files(folder: Path, files: Iterable[tuple[str, FileSum]]) -> None:
    """Read files and compare their checksums.

    Raises:
        ValueError: naming those that differ.
    """
    wrong = [
        name
        for name, expected in files
        if _sum_like(expected, inside(folder, name, MANIFEST)) != expected
    ]
    if wrong:
        raise ValueError(
            f"{folder} is damaged: the checksums of {wrong} are not those of its {MANIFEST}"
        )


def _sum_like(expected: FileSum, path: Path) -> FileSum:
    return blocks_sum(path) if expected.blocks else file_sum(path)
