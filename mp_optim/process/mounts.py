"""What lies below a folder, as the system's list of mounts says."""

from __future__ import annotations

from pathlib import Path

_MOUNTS = Path("/proc/self/mountinfo")
_REMOTE = {
    *("nfs", "nfs4", "cifs", "smb3", "9p", "afs", "ceph", "lustre", "gpfs", "beegfs"),
    *("glusterfs", "orangefs", "pvfs2", "wekafs", "virtiofs"),
}
_MEMORY = {"tmpfs", "ramfs"}


def not_a_local_disk(folder: Path) -> str:
    """``memory (tmpfs)``, or ``a network's file system (nfs4)``; empty for a disk, and where the
    system does not say."""
    kind = _file_system(folder.absolute())
    if kind in _MEMORY:
        return f"memory ({kind})"
    if kind in _REMOTE or kind.startswith("fuse."):
        return f"a network's file system ({kind})"
    return ""


def _file_system(folder: Path) -> str:
    """Of the mount nearest above a folder; of several there, the last."""
    nearest = (-1, "")
    try:
        lines = _MOUNTS.read_text().splitlines()
    except OSError:
        return ""
    for line in lines:
        before, _, after = line.partition(" - ")
        # Fields: id, parent, device, root, where; spaces are written as \040.
        where = before.split(" ")[4].encode().decode("unicode_escape")
        kind = after.partition(" ")[0]
        if folder.is_relative_to(where) and len(where) >= nearest[0]:
            nearest = (len(where), kind)
    return nearest[1]
