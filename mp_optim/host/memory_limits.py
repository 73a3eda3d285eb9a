"""Host memory that this process may still take: the limits of its cgroups, the memory that the
system has available, and the process's own limits. Swap is not memory.

All of it is read from files below a root, which tests replace. A system without these files has no
known limit.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from mp_optim.host.host_share import Host

UNLIMITED = 1 << 60
"""Bytes from which a limit counts as unlimited: cgroups version 1 writes 2^63 rounded down to a
page."""


@dataclass(frozen=True)
class MemoryLimit:
    """One limit, and the bytes of it that are left.

    Attributes:
        name: the limit as a user finds it, such as "memory.max of /sys/fs/cgroup/job".
        total: bytes that the limit allows.
        free: bytes that this rank may still take.
    """

    name: str
    total: int
    free: int


def memory_limits(host: Host) -> list[MemoryLimit]:
    """Return all limits of host memory that apply to this process.

    Page cache counts as free, because the system drops it on demand. Limits that the ranks of a
    host share are divided by their number (``Host.local_ranks``). Memory that ranks took already
    counts as part of their shares, so a rank may check after the others have allocated.
    """
    shared = [*_cgroup_limits(host), *_available(host)]
    ranks = host.local_ranks()
    if ranks > 1:
        resident = _resident_bytes(host, ranks)
        shared = [_share(limit, ranks, resident) for limit in shared]
    return [*shared, *_process_limits(host)]


# -- limits that all processes of a host or a container share -------------------------------------

_CACHE = {
    "memory.max": ("inactive_file", "active_file", "slab_reclaimable"),
    "memory.limit_in_bytes": ("total_inactive_file", "total_active_file"),
}
"""Names in ``memory.stat`` of memory that the system drops on demand. Shared memory is not in it,
though it is in ``file`` and ``cache``."""


def _cgroup_limits(host: Host) -> Iterator[MemoryLimit]:
    for folder in host.cgroups("memory"):
        for name, usage, cache in (
            ("memory.max", "memory.current", "memory.max"),
            ("memory.high", "memory.current", "memory.max"),
            ("memory.limit_in_bytes", "memory.usage_in_bytes", "memory.limit_in_bytes"),
        ):
            limit, used = _number(host, folder / name), _number(host, folder / usage)
            if limit is None or used is None:
                continue
            stat = _fields(host, folder / "memory.stat")
            used -= sum(stat.get(key, 0) for key in _CACHE[cache])
            yield MemoryLimit(f"{name} of /{folder}", limit, limit - max(used, 0))


def _available(host: Host) -> Iterator[MemoryLimit]:
    found = _fields(host, "proc/meminfo")
    if "MemAvailable" in found and "MemTotal" in found:
        yield MemoryLimit("MemAvailable", found["MemTotal"], found["MemAvailable"])


def _share(limit: MemoryLimit, ranks: int, resident: tuple[int, int] | None) -> MemoryLimit:
    """Return a limit that ranks share, for one of them.

    Args:
        resident: bytes that this rank and all ranks hold; None if that is not known. Then the share
            is that of the whole limit.
    """
    if resident is None:
        share = limit.total // ranks
    else:
        mine, of_all = resident
        share = (limit.free + of_all) // ranks - mine
    name = f"{limit.name}, which {ranks} ranks share"
    return MemoryLimit(name, limit.total, min(limit.free, share))


def _resident_bytes(host: Host, ranks: int) -> tuple[int, int] | None:
    """Return the bytes that this rank and all ranks of this host hold, if the ranks are the
    children of this process's parent, as torchrun starts them."""
    status = _status(host, "self")
    parent, me = status.get("PPid", 0), status.get("Pid", os.getpid())
    children = (host.read(f"proc/{parent}/task/{parent}/children") or "").split()
    if len(children) != ranks or str(me) not in children:
        return None
    sizes = [_status(host, child) for child in children]
    return _held(status), sum(map(_held, sizes))


def _held(status: Mapping[str, int]) -> int:
    return status.get("RssAnon", 0) + status.get("RssShmem", 0)


# -- limits of the process ------------------------------------------------------------------------

_OF_PROCESS = {
    "Max address space": ("RLIMIT_AS (ulimit -v)", "VmSize"),
    "Max data size": ("RLIMIT_DATA (ulimit -d)", "VmData"),
}


def _process_limits(host: Host) -> Iterator[MemoryLimit]:
    status = _status(host, "self")
    for line in (host.read("proc/self/limits") or "").splitlines():
        for label, (name, used) in _OF_PROCESS.items():
            soft = line.removeprefix(label).split()[:1] if line.startswith(label) else []
            if soft and soft[0].isdecimal() and used in status:
                yield MemoryLimit(name, int(soft[0]), int(soft[0]) - status[used])


# -- files ----------------------------------------------------------------------------------------


def _number(host: Host, path: Path) -> int | None:
    """Return the number in a file; None if it has none, or one that stands for no limit."""
    text = host.read(path) or ""
    return int(text) if text.isdecimal() and int(text) < UNLIMITED else None


def _status(host: Host, process: str) -> dict[str, int]:
    return _fields(host, f"proc/{process}/status")


def _fields(host: Host, path: str | Path) -> dict[str, int]:
    """Return the numbers of a file with one "name value" or "name: value kB" a line; in bytes where
    the file has kB."""
    found = {}
    for line in (host.read(path) or "").splitlines():
        name, _, rest = line.replace(":", " ", 1).partition(" ")
        words = rest.split()
        if words and words[0].isdecimal():
            found[name] = int(words[0]) * (1024 if words[1:] == ["kB"] else 1)
    return found
