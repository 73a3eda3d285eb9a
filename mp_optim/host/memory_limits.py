"""Host memory that this process may still allocate, by the limits of its cgroups, the system's
available memory, and the process's own limits. Swap does not count as memory.

The limits come from files below a root folder, which tests replace. On a system without these
files, memory is not limited.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from mp_optim.host.host_share import Host

UNLIMITED = 1 << 60
"""Number of bytes from which on a limit counts as no limit. cgroups version 1 writes 2^63, rounded
down to a page, for no limit."""


@dataclass(frozen=True)
class MemoryLimit:
    """A limit of host memory, and the bytes that are left.

    Attributes:
        name: name for messages, such as "memory.max of /sys/fs/cgroup/job".
        total: number of bytes that the limit allows.
        free: number of bytes that this rank may still allocate.
    """

    name: str
    total: int
    free: int


def memory_limits(host: Host) -> list[MemoryLimit]:
    """Return all limits of host memory for this process.

    Page cache counts as free, because the system drops it on demand. A limit that the ranks of a
    host share is divided by ``Host.local_ranks``. Memory that ranks have allocated already counts
    as part of their shares. So the result does not depend on which rank allocates first.
    """
    shared, memory = [*_cgroup_limits(host)], _fields(host, "proc/meminfo")
    if "MemAvailable" in memory and "MemTotal" in memory:
        shared.append(MemoryLimit("MemAvailable", memory["MemTotal"], memory["MemAvailable"]))
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
"""Keys of ``memory.stat`` for memory that the system drops on demand. Unlike ``file`` and
``cache``, these keys do not include shared memory."""


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


def _share(limit: MemoryLimit, ranks: int, resident: tuple[int, int] | None) -> MemoryLimit:
    """Return one rank's share of a limit.

    Args:
        limit: limit that the ranks share.
        ranks: number of ranks on the host.
        resident: bytes that this rank and all ranks hold. None if unknown; then the share is an
            equal part of the total.
    """
    if resident is None:
        share = limit.total // ranks
    else:
        mine, of_all = resident
        share = (limit.free + of_all) // ranks - mine
    name = f"{limit.name}, which {ranks} ranks share"
    return MemoryLimit(name, limit.total, min(limit.free, share))


def _resident_bytes(host: Host, ranks: int) -> tuple[int, int] | None:
    """Return the bytes that this rank holds, and the bytes that all ranks of the host hold.

    None if the ranks are not child processes of this process's parent. torchrun starts ranks as
    child processes of one parent.
    """
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
    """Return the number in a file; None if the file has no number, or a number that means no
    limit."""
    text = host.read(path) or ""
    return int(text) if text.isdecimal() and int(text) < UNLIMITED else None


def _status(host: Host, process: str) -> dict[str, int]:
    return _fields(host, f"proc/{process}/status")


def _fields(host: Host, path: str | Path) -> dict[str, int]:
    """Return the numbers in a file with lines "name value" or "name: value kB", by name. Values in
    kB are converted to bytes."""
    found = {}
    for line in (host.read(path) or "").splitlines():
        name, _, rest = line.replace(":", " ", 1).partition(" ")
        words = rest.split()
        if words and words[0].isdecimal():
            found[name] = int(words[0]) * (1024 if words[1:] == ["kB"] else 1)
    return found
