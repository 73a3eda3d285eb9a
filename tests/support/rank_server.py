"""Fork ranks and programs from a process that has imported torch once.

:mod:`support.launch` starts it as ``python -m support.rank_server``. An import of torch takes two
seconds of a core. The server does not import ``mp_optim``, so each rank sets up kernels, threads
and hooks alone. The server prints a line when it is ready. Each line of stdin lists ranks to start;
lines of stdout give the process id and the exit status of each rank.
"""

import gc
import importlib
import json
import os
import runpy
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from types import ModuleType

_TORCH = (
    "torch._dynamo",  # torch.optim imports it at its first use, which takes a second.
    "torch.distributed.checkpoint",
    "torch.distributed.fsdp",
    "torch.distributed.tensor.parallel",
)
"""Parts of torch that torch or the workers import late."""


@dataclass(frozen=True)
class Rank:
    """A process to fork.

    Attributes:
        number: rank in the job.
        command: arguments of Python: ``-m`` and a module, ``-c`` and a text, or a file; then the
            arguments of the program.
        variables: the whole environment.
        output: file of stdout.
        log: file of stderr.
    """

    number: int
    command: list[str]
    variables: dict[str, str]
    output: str
    log: str

    def become(self) -> None:
        ours = _python_path(os.environ)
        others = [path for path in sys.path if path and path not in ours]
        sys.path[:] = [*_python_path(self.variables), *others]
        os.environ.clear()
        os.environ.update(self.variables)
        for number, path in enumerate((os.devnull, self.output, self.log)):
            os.dup2(os.open(path, os.O_WRONLY | os.O_APPEND if number else os.O_RDONLY), number)
        _measure_coverage()
        kind, *rest = self.command
        if kind == "-m":
            module, *sys.argv[1:] = rest
            runpy.run_module(module, run_name="__main__", alter_sys=True)
        elif kind == "-c":
            sys.argv[:] = [kind, *rest[1:]]
            sys.path.insert(0, "")
            main = sys.modules["__main__"] = ModuleType("__main__")
            exec(rest[0], vars(main))
        else:
            sys.argv[:] = self.command
            sys.path.insert(0, os.path.dirname(os.path.abspath(kind)))
            runpy.run_path(kind, run_name="__main__")


def _measure_coverage() -> None:
    if any(name.startswith("COVERAGE_PROCESS") for name in os.environ):
        importlib.import_module("coverage").process_startup()


def _python_path(variables: Mapping[str, str]) -> list[str]:
    return variables.get("PYTHONPATH", "").split(os.pathsep)


def serve() -> Rank | None:
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
    gc.collect()
    gc.freeze()  # A fork then neither scans these objects nor frees them at exit.
    _say(ready=os.getpid())
    rank = serve()
    if rank is None:
        os._exit(0)
    rank.become()
