"""Fake hosts: the processor and cgroup files of a Linux kernel, below a folder."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from mp_optim.host.host_share import Host


@dataclass(frozen=True)
class FakeHost:
    """A host with a number of cores and two logical processors per core.

    Attributes:
        cores: physical cores; processor ``c + cores`` is the second one of core ``c``, as Linux
            numbers them.
    """

    root: Path
    cores: int = 64

    def build(self) -> None:
        for cpu in range(2 * self.cores):
            first = cpu % self.cores
            path = f"sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list"
            self.write(path, f"{first},{first + self.cores}")

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
        **environ: str,
    ) -> Host:
        """Return the host as one of its local ranks sees it."""
        all_cpus = range(2 * self.cores)
        variables = {"LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(ranks)}
        return Host(
            frozenset(all_cpus if affinity is None else affinity),
            frozenset(all_cpus if of_parent is None else of_parent),
            variables | environ,
            self.root,
        )
