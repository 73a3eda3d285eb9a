"""Which of the host's processors are this rank's: its fair share, near its accelerator.

``torchrun`` sets ``OMP_NUM_THREADS=1`` for every rank, so torch's number of threads does not show
how many processors a rank has. What shows it: the processors the operating system lets the
process run on (its affinity), the CPU quota of its cgroup, how many ranks share the host
(``LOCAL_WORLD_SIZE``), and on hosts of several NUMA nodes, which of them the rank's accelerator is
attached to. All of it is read from files and variables, below a root that tests replace.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

from mp_optim.host.accelerator import CUDA

_LOCAL_SIZES = ("LOCAL_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS")
_LOCAL_RANKS = ("LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID")
_NODES = "sys/devices/system/node"
_CPUS = "sys/devices/system/cpu"


@dataclass(frozen=True)
class HostShare:
    """A rank's part of its host.

    Attributes:
        cpus: one logical processor of each core that is the rank's, ascending.
        threads: how many threads the host kernels run; fewer than ``cpus`` under a CPU quota.
        node: the NUMA node they are on; None if the host has one, or they are on several.
        reason: how it came to be, in words.
    """

    cpus: tuple[int, ...]
    threads: int
    node: int | None
    reason: str


@dataclass(frozen=True)
class Host:
    """What a process can find out about its host.

    Attributes:
        affinity: logical processors it may run on. of_parent: those its parent may.
        environ: its variables.
        accelerators: PCI addresses (``0000:1b:00.0``) of the accelerators it sees, by index.
        root: where ``sys`` and ``proc`` are.
    """

    affinity: frozenset[int]
    of_parent: frozenset[int] | None = None
    environ: Mapping[str, str] = field(default_factory=dict)
    accelerators: Sequence[str | None] = ()
    root: Path = Path("/")

    def local_ranks(self) -> tuple[int, int]:
        """How many ranks of the job are on this host, as its launcher says, and which of them this
        is."""
        found = []
        for names, default in ((_LOCAL_SIZES, 1), (_LOCAL_RANKS, 0)):
            texts = [self.environ[name] for name in names if name in self.environ]
            found.append(int(texts[0]) if texts and texts[0].isdecimal() else default)
        ranks = max(1, found[0])
        return ranks, min(found[1], ranks - 1)

    def read(self, path: str | Path) -> str | None:
        """A small file below the root, stripped; None if there is no such file."""
        try:
            return (self.root / path).read_text().strip()
        except (OSError, UnicodeDecodeError):
            return None

    @property
    def is_bound(self) -> bool:
        """Whether the launcher gave this process processors of its own: fewer than its parent's."""
        return self.of_parent is not None and self.affinity < self.of_parent

    def cores(self) -> list[tuple[int, ...]]:
        """The usable processors by physical core, ordered by the first of each."""
        cores = set()
        for cpu in self.affinity:
            siblings = self.read(f"{_CPUS}/cpu{cpu}/topology/thread_siblings_list")
            together = parse_list(siblings) if siblings else [cpu]
            cores.add(tuple(sorted({cpu, *together} & self.affinity)))
        return sorted(cores)

    def node_cpus(self) -> dict[int, frozenset[int]]:
        """The usable processors of each NUMA node that has any."""
        nodes = {}
        for folder in (self.root / _NODES).glob("node[0-9]*"):
            usable = self.affinity & set(parse_list(self.read(folder / "cpulist") or ""))
            if usable:
                nodes[int(folder.name.removeprefix("node"))] = frozenset(usable)
        return dict(sorted(nodes.items()))

    def node_of(self, accelerator: int | None) -> int | None:
        """The NUMA node an accelerator is attached to; None if that is not known."""
        if accelerator is None or accelerator >= len(self.accelerators):
            return None
        address = self.accelerators[accelerator]
        text = self.read(f"sys/bus/pci/devices/{address}/numa_node") if address else None
        return int(text) if text and text.isdecimal() else None  # -1: it does not know

    def quota(self) -> float | None:
        """Processors' worth of time that the process's cgroups grant; None if all of it."""
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


def parse_list(text: str) -> list[int]:
    """Numbers of a kernel list such as ``0-3,8,10-11``."""
    numbers: list[int] = []
    for part in filter(None, text.split(",")):
        first, _, last = part.partition("-")
        numbers += range(int(first), int(last or first) + 1)
    return numbers


def share_of(host: Host, accelerator: int | None) -> HostShare:
    """A rank's share of its host.

    Args:
        accelerator: index of the rank's accelerator among those it sees; None without one.

    Cores are counted, not their hyperthreads: the kernels wait for memory, and a second thread of
    a core waits for the same. Ranks that the launcher bound keep all of what they were bound to.
    """
    local_ranks, local_rank = host.local_ranks()
    ranks, rank = (1, 0) if host.is_bound else (local_ranks, local_rank)
    nodes = host.node_cpus()
    node, sharing, place = None, ranks, rank
    if len(nodes) > 1:
        node, sharing, place = _on_nodes(host, nodes, ranks, rank, accelerator)
    cores = [core for core in host.cores() if node is None or nodes[node] & set(core)]
    first, last = len(cores) * place // sharing, len(cores) * (place + 1) // sharing
    mine = cores[first:last] or [cores[place % len(cores)]]  # one that others have, too
    cpus = tuple(core[0] for core in mine)
    threads, quota = len(cpus), host.quota()
    words = [_in_words(host, len(cpus), len(cores), sharing, node)]
    if quota is not None:
        granted = max(1, math.floor(quota / local_ranks))
        if granted < threads:
            threads = granted
            words.append(f"a CPU quota of {quota:g} leaves {granted} of them")
    return HostShare(cpus, threads, node, ", ".join(words))


def _on_nodes(
    host: Host, nodes: Mapping[int, frozenset[int]], ranks: int, rank: int, accelerator: int | None
) -> tuple[int | None, int, int]:
    """The rank's node, how many ranks share it, and which of them this is."""
    node = host.node_of(accelerator)
    if node is None or node not in nodes:
        if ranks < len(nodes):
            return None, ranks, rank
        each = math.ceil(ranks / len(nodes))
        return list(nodes)[rank // each], each, rank % each
    if accelerator == rank and len(host.accelerators) >= ranks:
        # Rank i drives accelerator i, as launchers have it; so those of the others are known too.
        there = [other for other in range(ranks) if host.node_of(other) == node]
        return node, len(there), there.index(rank)
    each = math.ceil(ranks / len(nodes))
    return node, each, rank % each


def _in_words(host: Host, mine: int, cores: int, sharing: int, node: int | None) -> str:
    where = "" if node is None else f" of NUMA node {node}"
    if host.is_bound:
        return f"bound to {mine} cores{where}"
    if sharing == 1:
        return f"{mine} cores{where}"
    return f"{mine} of {cores} cores{where}, which {sharing} local ranks share"


def _affinity(pid: int) -> frozenset[int]:
    try:
        return frozenset(os.sched_getaffinity(pid))
    except (AttributeError, OSError):
        return frozenset(range(os.cpu_count() or 1))


def _pci_addresses() -> list[str | None]:
    if not CUDA.is_initialized():
        return []
    addresses: list[str | None] = []
    for properties in CUDA.devices():
        try:
            domain, bus = properties.pci_domain_id, properties.pci_bus_id
            addresses.append(f"{domain:04x}:{bus:02x}:{properties.pci_device_id:02x}.0")
        except (AttributeError, TypeError, ValueError):  # not in every torch
            addresses.append(None)
    return addresses


_accelerator: int | None = None


def use_accelerator(index: int | None) -> None:
    """Set which CUDA device this rank uses; None if none."""
    global _accelerator
    if index != _accelerator:
        _accelerator = index
        host_share.cache_clear()


def this_host() -> Host:
    """Return the host of this process."""
    return Host(_affinity(0), _affinity(os.getppid()), os.environ, _pci_addresses())


@cache
def host_share() -> HostShare:
    """This process's share of its host, found out once for the accelerator it uses."""
    return share_of(this_host(), _accelerator)
