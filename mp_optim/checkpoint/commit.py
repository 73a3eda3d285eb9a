"""The versions in a checkpoint directory, and the commit of a new version.

- ``<path>/latest``: the name of the newest complete version.
- ``<path>/version-<n>/``: a complete version; its manifest lists every file.
- ``<path>/.version-<n>.*``: a version that is being written or deleted. The next save deletes such
  folders.

A version is written under a temporary name, synced and renamed. Then ``latest`` is replaced. If the
process is killed before that, ``latest`` still names the previous version.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

MANIFEST = "manifest.json"
LATEST = "latest"
_MOST_READ = 4096
"""Most bytes that are read of ``latest``, because a damaged file may be large. Every version name
is shorter."""
_PREFIX = "version-"
_NAME = re.compile(rf"{_PREFIX}(\d+)")
_LONGEST_NAME = 255


def _numbered(root: Path) -> list[tuple[int, Path]]:
    """Return (number, folder) of each version in a checkpoint directory, sorted by number. A
    version may be incomplete."""
    matched = [(_NAME.fullmatch(path.name), path) for path in root.glob(f"{_PREFIX}*")]
    return sorted((int(match[1]), path) for match, path in matched if match)


def versions(path: str | os.PathLike[str]) -> list[Path]:
    """Return the complete versions under a checkpoint directory, oldest first. Each version can
    be loaded by its own path."""
    return [folder for _, folder in _numbered(Path(path)) if (folder / MANIFEST).is_file()]


def staging_of(target: Path) -> Path:
    """Return the folder in which a version is written before it is complete."""
    return target.with_name(f".{target.name}.incomplete")


def begin(root: Path) -> Path:
    """Delete the folders of interrupted saves, and make an empty folder for the next version.

    Returns:
        The folder that the version will have when it is complete.

    Raises:
        FileExistsError: the root is a file.
    """
    if root.exists() and not root.is_dir():
        raise FileExistsError(
            f"{root} is a file, but a checkpoint is a folder; pass another path, or move the file"
        )
    root.mkdir(parents=True, exist_ok=True)
    for left in root.glob(f".{_PREFIX}*"):
        shutil.rmtree(left, ignore_errors=True)
    last = max((number for number, _ in _numbered(root)), default=0)
    target = root / f"{_PREFIX}{last + 1}"
    staging_of(target).mkdir()
    return target


def publish(target: Path, keep: int | None) -> None:
    """Make a version the newest, after all files of the version are written and synced. Then delete
    all complete versions except the newest ``keep``; None keeps all."""
    root = target.parent
    sync(staging_of(target))
    staging_of(target).rename(target)
    sync(root)
    replace_durably(root / LATEST, f"{target.name}\n".encode())
    others = [path for path in versions(root) if path != target]
    for old in [] if keep is None else others[: max(0, len(others) - keep + 1)]:
        # Rename the version first. If the process is killed during the deletion, the remaining
        # files must not look like a complete version.
        doomed = old.with_name(f".{old.name}.deleted")
        old.rename(doomed)
        shutil.rmtree(doomed, ignore_errors=True)


def newest(path: Path) -> Path:
    """Return ``path`` itself if it is a version, or else the version that the file
    ``<path>/latest`` names.

    Raises:
        FileNotFoundError: the folder has no complete checkpoint, ``latest`` is missing, or the
            version that ``latest`` names is not complete.
        ValueError: ``latest`` is empty, not text, a path, or a link to another folder.
    """
    if (path / MANIFEST).is_file():
        return path
    pointer, complete = path / LATEST, [version.name for version in versions(path)]
    if not pointer.is_file():
        raise FileNotFoundError(
            f"{path}: the file {LATEST}, which names the newest version, is missing; load one of "
            f"the complete versions {complete} by its own path"
            if complete
            else f"no complete checkpoint under {path}; pass the path of another checkpoint"
        )
    try:
        with inside(path, LATEST, str(path)).open("rb") as file:
            name = file.read(_MOST_READ).decode().strip()
        found = inside(path, name, str(pointer))
    except ValueError as error:
        raise ValueError(
            f"{pointer} is damaged ({error}); write the name of one of the complete versions "
            f"{complete} into the file, or load one of these versions by its own path"
        ) from error
    if not (found / MANIFEST).is_file():
        raise FileNotFoundError(
            f"{pointer} names {name}, which is missing or not complete; load one of the complete "
            f"versions {complete} by its own path"
        )
    return found


# -- names that were read from a disk -------------------------------------------------------------


def is_plain_name(name: object) -> bool:
    """True if a name is a file name in a folder: no path, no unprintable character, and not the
    folder itself."""
    return (
        isinstance(name, str)
        and 0 < len(name) <= _LONGEST_NAME
        and name not in (".", "..")
        and name.isprintable()
        and not set(name) & {"/", "\\", ":"}
    )


def inside(folder: Path, name: str, named_by: str) -> Path:
    """Return the path of the file ``name`` in a folder.

    Args:
        folder: the folder.
        name: a file name, read from a file that may be damaged.
        named_by: the file that ``name`` was read from, for the error.

    Raises:
        ValueError: ``name`` is a path, or a link to another folder.
    """
    if not is_plain_name(name):
        raise ValueError(
            f"{named_by} names {name!r}, which is a path instead of the name of a file or folder "
            f"in {folder}; load another version"
        )
    path = folder / name
    if path.is_symlink() and path.resolve().parent != folder.resolve():
        raise ValueError(
            f"{named_by} names {name!r}, a link to a folder outside {folder}; move the linked "
            f"folder into {folder}"
        )
    return path


# -- durable writes (fsync) -----------------------------------------------------------------------


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Return a context that adds the file's path to an OSError in the block, because the error of a
    full disk has no path."""
    try:
        yield
    except OSError as error:
        if error.filename is not None:
            raise
        raise OSError(error.errno, error.strerror, str(path)) from error


def sync(path: Path) -> None:
    """Wait until a file's content, or the names in a folder, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_durably(path: Path, content: bytes) -> None:
    """Write and sync a new file. The caller has to sync the folder."""
    with naming(path), path.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def replace_durably(path: Path, content: bytes) -> None:
    """Replace a file. After a crash the file has either its old content or the new content."""
    temporary = path.with_name(f".{path.name}.tmp")
    write_durably(temporary, content)
    os.replace(temporary, path)
    sync(path.parent)
