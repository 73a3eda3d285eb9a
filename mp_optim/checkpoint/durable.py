"""Files that are on the disk when a function returns."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Errors of a disk that is full say which file they are about; those of ``write`` do not by
    themselves."""
    try:
        yield
    except OSError as error:
        if error.filename is not None:
            raise
        raise OSError(error.errno, error.strerror, str(path)) from error


def begin_writing(descriptor: int, start: int, count: int) -> None:
    """Have the system begin to bring some bytes of a file to the disk, and not wait for it."""
    if hasattr(
        os, "posix_fadvise"
    ):  # Linux begins with what it is told nobody will read
        os.posix_fadvise(descriptor, start, count, os.POSIX_FADV_DONTNEED)


def sync_file(path: Path) -> None:
    """Wait until a file's content is on the disk."""
    with path.open("rb") as file:
        os.fsync(file.fileno())


def sync_directory(path: Path) -> None:
    """Wait until a directory's entries are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_durably(path: Path, content: bytes) -> None:
    """Write a new file; its directory entry is the caller's to sync."""
    with naming(path), path.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def replace_durably(path: Path, content: bytes) -> None:
    """Write a file that has either its old content or the new one, whatever happens."""
    temporary = path.with_name(f".{path.name}.tmp")
    write_durably(temporary, content)
    os.replace(temporary, path)
    sync_directory(path.parent)
