"""The versions under a checkpoint's root, and how one comes to be the newest.

::

    <root>/latest               name of the newest complete version
    <root>/version-<n>/         a complete version: its manifest lists every file
    <root>/.version-<n>.*       one being written, or being deleted; cleared away by the next save

A version is written under its temporary name, synced, renamed, and becomes the newest one when
``latest`` is replaced. A process killed anywhere in between leaves ``latest`` where it was.
"""

from __future__ import annotations

import re
import shutil
from pathlib import Path

from mp_optim.checkpoint.durable import replace_durably, sync_directory
from mp_optim.checkpoint.folder import inside
from mp_optim.checkpoint.manifest import MANIFEST

LATEST = "latest"
_LONGEST = 4096
"""Bytes that are read of it; a name is shorter."""
_DEEPEST = 16
"""Folders, each with a ``latest`` of its own."""
_PREFIX = "version-"
_NAME = re.compile(rf"{_PREFIX}(\d+)")


def _numbered(root: Path) -> list[tuple[int, Path]]:
    """Versions in order, complete or not."""
    matched = [(_NAME.fullmatch(path.name), path) for path in root.glob(f"{_PREFIX}*")]
    return sorted((int(match[1]), path) for match, path in matched if match)


def complete_versions(root: Path) -> list[Path]:
    """Version directories that have a manifest, oldest first."""
    return [path for _, path in _numbered(root) if (path / MANIFEST).is_file()]


def staging_of(target: Path) -> Path:
    """Where a version is written before it is complete."""
    return target.with_name(f".{target.name}.incomplete")


def begin(root: Path) -> Path:
    """Clear away what interrupted saves left, and make an empty directory to write the next version
    into.

    Returns:
        The directory it will have when it is complete.

    Raises:
        FileExistsError: a file lies there.
    """
    if root.exists() and not root.is_dir():
        raise FileExistsError(
            f"{root} is a file, and a checkpoint is a folder: give another path, or move the file"
        )
    root.mkdir(parents=True, exist_ok=True)
    for left in root.glob(f".{_PREFIX}*"):
        shutil.rmtree(left, ignore_errors=True)
    last = max((number for number, _ in _numbered(root)), default=0)
    target = root / f"{_PREFIX}{last + 1}"
    staging_of(target).mkdir()
    return target


def publish(target: Path, keep: int | None) -> None:
    """Make a version whose files are all written and synced the newest, then delete all but
    ``keep`` complete ones."""
    root = target.parent
    sync_directory(staging_of(target))
    staging_of(target).rename(target)
    sync_directory(root)
    replace_durably(root / LATEST, f"{target.name}\n".encode())
    others = [path for path in complete_versions(root) if path != target]
    for old in [] if keep is None else others[: max(0, len(others) - keep + 1)]:
        doomed = old.with_name(
            f".{old.name}.deleted"
        )  # half of a version must not look like one
        old.rename(doomed)
        shutil.rmtree(doomed, ignore_errors=True)


def newest(path: Path) -> Path:
    """The version that ``path`` stands for: ``path`` itself if it is a version, or the one that
    ``latest`` names, which may lie in a folder with a ``latest`` of its own.

    Raises:
        FileNotFoundError: there is no complete checkpoint.
        ValueError: ``latest`` holds something else than the name of a version.
    """
    for _ in range(_DEEPEST):
        if (path / MANIFEST).is_file():
            return path
        found = latest_version(path)
        if found is None:
            raise FileNotFoundError(_no_checkpoint(path))
        if not (found / LATEST).is_file() and not (found / MANIFEST).is_file():
            raise FileNotFoundError(
                f"{path / LATEST} names {found.name}, which is not complete or not there; "
                f"complete are {[version.name for version in complete_versions(path)]}"
            )
        path = found
    raise ValueError(
        f"{path} is named by {_DEEPEST} files {LATEST}, each in the folder that the one before "
        "names; load a version by its own path"
    )


def _no_checkpoint(path: Path) -> str:
    others = [version.name for version in complete_versions(path)]
    hint = (
        f"; complete versions lie there: {others}, load one by its own path"
        if others
        else ""
    )
    return f"no complete checkpoint under {path} (there is no {LATEST} file){hint}"


def latest_version(root: Path) -> Path | None:
    """What ``latest`` names, if there is such a file.

    Raises:
        ValueError: it is empty, no text, a path, or a link that leads elsewhere.
    """
    pointer = root / LATEST
    if not pointer.is_file():
        return None
    try:
        with inside(root, LATEST, str(root)).open("rb") as file:
            name = file.read(_LONGEST).decode().strip()
        return inside(root, name, str(pointer))
    except ValueError as error:
        raise ValueError(
            f"{pointer} is damaged ({error}); write into it the name of one of the complete "
            "versions "
            f"{[version.name for version in complete_versions(root)]}, or load one by its own path"
        ) from error
