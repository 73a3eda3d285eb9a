"""Files of a checkpoint by names that were read from a disk: they stay inside its folder."""

from __future__ import annotations

from pathlib import Path

_LONGEST = 255


def is_plain_name(name: object) -> bool:
    """Whether it names something that lies directly in a folder: no path, nothing unprintable, not
    the folder."""
    return (
        isinstance(name, str)
        and 0 < len(name) <= _LONGEST
        and name not in (".", "..")
        and name.isprintable()
        and not set(name) & {"/", "\\", ":"}
    )


def inside(folder: Path, name: str, named_by: str) -> Path:
    """What ``name`` means in a folder.

    Args:
        named_by: the file in which the name stands, for the error.

    Raises:
        ValueError: it is a path, or a link that leads out of the folder.
    """
    if not is_plain_name(name):
        raise ValueError(
            f"{named_by} names {name!r}, which is not the name of something in {folder}"
        )
    path = folder / name
    if path.is_symlink() and path.resolve().parent != folder.resolve():
        raise ValueError(
            f"{named_by} names {name!r}, a link that leads out of {folder}; put what it leads to "
            "there"
        )
    return path
