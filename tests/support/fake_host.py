"""Hosts that exist only as the files a kernel would show: processors, NUMA nodes, accelerators and
cgroups below a folder."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from mp_optim.host.host_share import Host


@dataclass(frozen=True)
class FakeHost:
    """How a host is built.

    Attributes:
        cores: physical cores, in equal parts on every node. hyperthreads: logical processors of
            each; processor ``c + cores`` is the second one of core ``c``, as Linux numbers them.
        accelerators: the NUMA node of each; -1 where the host does not say.
    """

    root: Path
    cores: int = 64
    nodes: int = 2
    hyperthreads: int = 2
    accelerators: Sequence[int] = (0, 0, 0, 0, 1, 1, 1, 1)

    def build(self) -> None:
        for cpu in range(self.cores * self.hyperthreads):
            siblings = range(cpu % self.cores, self.cores * self.hyperthreads, self.cores)
            self.write(
                f"sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list",
                ",".join(map(str, siblings)),
            )
        each = self.cores // self.nodes
        for node in range(self.nodes):
            ranges = []
            for thread in range(self.hyperthreads):
                first = thread * self.cores + node * each
                ranges.append(f"{first}-{first + each - 1}")
            self.write(f"sys/devices/system/node/node{node}/cpulist", ",".join(ranges))
        for index, node in enumerate(self.accelerators):
            self.write(f"sys/bus/pci/devices/{address(index)}/numa_node", str(node))

    def write(self, path: str, text: str) -> None:
        file = self.root / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"{text}\n")

    def seen_by(
        self,
        rank: int = 0,
        ranks: int = 1,
        affinity: Sequence[int] | None = None,
        of_parent: Sequence[int] | None = None,
        visible: Sequence[int] | None = None,
        **environ: str,
    ) -> Host:
        """What one of its local ranks finds; ``visible`` are the accelerators it sees."""
        all_cpus = range(self.cores * self.hyperthreads)
        shown = range(len(self.accelerators)) if visible is None else visible
        variables = {"LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(ranks)}
        return Host(
            frozenset(all_cpus if affinity is None else affinity),
            frozenset(all_cpus if of_parent is None else of_parent),
            variables | environ,
            [address(index) for index in shown],
            self.root,
        )


def address(index: int) -> str:
    """The PCI address of an accelerator."""
    return f"0000:{0x10 + index:02x}:00.0"
