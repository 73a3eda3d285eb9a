"""Forks the ranks of tests: ``python -m support.rank_server``, which :mod:`support.launch` starts.

Torch takes a process two seconds of a core to import, most of what many a rank does. Here it is
imported once. Nothing of ``mp_optim`` is: what that sets up in a process (kernels, threads, hooks)
it sets up in each rank, which also ends like any program, through the interpreter's own exit.

A line of stdin has ranks to start; lines of stdout then say the process id of each, and the exit
status of each as it ends.
"""

from __future__ import annotations

import importlib
import json
import os
import runpy
import sys
from dataclasses import dataclass

_TORCH = (
    "torch._dynamo",  # torch.optim imports it at its first use, which takes a second
    "torch.distributed.checkpoint",
    "torch.distributed.fsdp",
    "torch.distributed.tensor.parallel",
)
"""What the workers import of it, and it imports when they use it."""


@dataclass(frozen=True)
class Rank:
    """One process to be.

    Attributes:
        number: among the ranks of the job.
        module: run as ``python -m`` would.
        variables: its whole environment.
        log: the file that it writes to.
    """

    number: int
    module: str
    arguments: list[str]
    variables: dict[str, str]
    log: str

    def become(self) -> None:
        """Be this process, in a fork."""
        os.environ.clear()
        os.environ.update(self.variables)
        sys.argv[1:] = self.arguments
        written = os.open(self.log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        for number, source in enumerate((os.open(os.devnull, os.O_RDONLY), written, written)):
            os.dup2(source, number)
        runpy.run_module(self.module, run_name="__main__", alter_sys=True)


def serve() -> Rank | None:
    """Start ranks until nobody asks any more; in a fork, the rank to become."""
    for line in sys.stdin:
        numbers: dict[int, int] = {}
        for given in json.loads(line):
            if (pid := os.fork()) == 0:
                return Rank(**given)
            numbers[pid] = given["number"]
            _say(number=given["number"], pid=pid)
        while numbers:
            pid, status = os.wait()
            _say(number=numbers.pop(pid), status=os.waitstatus_to_exitcode(status))
    return None


def _say(**event: int) -> None:
    print(json.dumps(event), flush=True)


if __name__ == "__main__":
    for name in _TORCH:
        importlib.import_module(name)
    if (rank := serve()) is not None:
        rank.become()
