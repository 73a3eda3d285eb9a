"""Number of kernel threads of a rank: the cores that the process may use, divided by the ranks of
the host.

``torchrun`` sets ``OMP_NUM_THREADS=1`` for every rank, so torch's number of threads is not the
number of available cores. The facts come from environment variables and from files below a root
folder, which tests replace.
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
    """A rank's share of the host's cores.

    Attributes:
        threads: number of threads of the host kernels.
        reason: explanation of this number, for messages.
    """

    threads: int
    reason: str


@dataclass(frozen=True)
class Host:
    """Facts about the host of a process.

    Attributes:
        affinity: logical processors on which the process may run.
        of_parent: logical processors on which the parent process may run; None if unknown.
        environ: environment variables.
        root: folder that contains ``sys`` and ``proc``.
    """

    affinity: frozenset[int]
    of_parent: frozenset[int] | None = None
    environ: Mapping[str, str] = field(default_factory=dict)
    root: Path = Path("/")

    def local_ranks(self) -> int:
        """Return the job's number of ranks on this host, from the launcher's environment
        variables."""
        texts = [self.environ[name] for name in _LOCAL_SIZES if name in self.environ]
        return max(1, int(texts[0])) if texts and texts[0].isdecimal() else 1

    def read(self, path: str | Path) -> str | None:
        """Return the stripped text of a file below the root folder; None if the file cannot be
        read."""
        try:
            return (self.root / path).read_text().strip()
        except (OSError, UnicodeDecodeError):
            return None

    def cores(self) -> int:
        """Return the number of physical cores on which the process may run.

        Hyperthreads do not count, because both threads of a core wait for the same memory.
        """
        path = "sys/devices/system/cpu/cpu{}/topology/thread_siblings_list"
        return len({self.read(path.format(cpu)) or str(cpu) for cpu in self.affinity})

    def quota(self) -> float | None:
        """Return the number of processors that the process's cgroups allow; None without a
        limit."""
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
        """Return the folders of the process's cgroups (versions 1 and 2), relative to the root
        folder.

        The parents of a cgroup follow the cgroup, because their limits apply, too.

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
    """Return a rank's share of the host's cores.

    A rank that the launcher bound to cores gets all these cores. Other ranks divide the cores
    evenly. A CPU quota of the cgroup, divided by the ranks, limits every share.
    """
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
    """Return the facts about this process's host."""
    return Host(_affinity(0), _affinity(os.getppid()), os.environ)


@cache
def host_share() -> HostShare:
    """Return this process's share of its host, computed once per process."""
    return share_of(this_host())
