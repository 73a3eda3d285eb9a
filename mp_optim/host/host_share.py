"""This rank's share of the host's cores: those that the process may use, divided by the ranks.

``torchrun`` sets ``OMP_NUM_THREADS=1`` for every rank, so torch's number of threads does not show
how many cores a rank has. All of it is read from files and variables, below a root that tests
replace.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import NamedTuple

_LOCAL_SIZES = ("LOCAL_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS")


class HostShare(NamedTuple):
    """A rank's part of its host.

    Attributes:
        threads: how many threads the host kernels run.
        reason: how this number came to be, in words.
    """

    threads: int
    reason: str


@dataclass(frozen=True)
class Host:
    """Facts that a process can find out about its host.

    Attributes:
        affinity: logical processors that it may run on.
        of_parent: logical processors that its parent may run on.
        environ: its variables.
        root: folder of ``sys`` and ``proc``.
    """

    affinity: frozenset[int]
    of_parent: frozenset[int] | None = None
    environ: Mapping[str, str] = field(default_factory=dict)
    root: Path = Path("/")

    def local_ranks(self) -> int:
        """Return how many ranks of the job are on this host, by the launcher's variables."""
        texts = [self.environ[name] for name in _LOCAL_SIZES if name in self.environ]
        return max(1, int(texts[0])) if texts and texts[0].isdecimal() else 1

    def read(self, path: str | Path) -> str | None:
        """Return the content of a small file below the root, stripped; None if it does not
        exist."""
        try:
            return (self.root / path).read_text().strip()
        except (OSError, UnicodeDecodeError):
            return None

    def cores(self) -> int:
        """Return the number of physical cores that the process may use. Hyperthreads do not count:
        the second thread of a core waits for the same memory."""
        path = "sys/devices/system/cpu/cpu{}/topology/thread_siblings_list"
        return len({self.read(path.format(cpu)) or str(cpu) for cpu in self.affinity})

    def quota(self) -> float | None:
        """Return the number of processors that the process's cgroups grant; None for all."""
        limits = []
        for folder in self.cgroups("cpu"):
            quota, _, period = (self.read(folder / "cpu.max") or "max").partition(" ")
            if quota == "max":
                quota = self.read(folder / "cpu.cfs_quota_us") or ""
                period = self.read(folder / "cpu.cfs_period_us") or ""
            if quota.isdecimal() and period.isdecimal() and int(period) > 0:
                limits.append(int(quota) / int(period))
        return min(limits, default=None)

    def cgroups(self, controller: str) -> list[Path]:
        """Return the folders, below the root, of the cgroups that limit this process, of versions 1
        and 2, each followed by its parents.

        Args:
            controller: "cpu" or "memory".
        """
        folders: dict[Path, None] = {}
        for line in (self.read("proc/self/cgroup") or "").splitlines():
            _, controllers, path = line.split(":", 2)
            if controllers and controller not in controllers.split(","):
                continue
            mounts = [controllers, controller] if controllers else ["unified", ""]
            below = Path(path.lstrip("/"))
            for mount in mounts:
                top = Path("sys/fs/cgroup") / mount
                folders |= dict.fromkeys([top / below, *(top / each for each in below.parents)])
        return list(folders)


def share_of(host: Host) -> HostShare:
    """Return a rank's share of its host. Ranks that the launcher bound keep all of their cores."""
    cores, ranks, quota = host.cores(), host.local_ranks(), host.quota()
    if host.of_parent is not None and host.affinity < host.of_parent:
        threads, reason = cores, f"bound to {cores} cores"
    elif ranks > 1:
        threads = max(1, cores // ranks)
        reason = f"{threads} of {cores} cores, which {ranks} local ranks share"
    else:
        threads, reason = cores, f"{cores} cores"
    if quota is not None and (granted := max(1, int(quota / ranks))) < threads:
        threads, reason = granted, f"{reason}, a CPU quota of {quota:g} leaves {granted} of them"
    return HostShare(threads, reason)


def _affinity(pid: int) -> frozenset[int]:
    try:
        return frozenset(os.sched_getaffinity(pid))
    except (AttributeError, OSError):
        return frozenset(range(os.cpu_count() or 1))


def this_host() -> Host:
    """Return the host of this process."""
    return Host(_affinity(0), _affinity(os.getppid()), os.environ)


@cache
def host_share() -> HostShare:
    """Return this process's share of its host, found out once."""
    return share_of(this_host())
