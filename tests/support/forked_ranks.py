"""Ranks of a test, forked from processes that have imported torch; see :mod:`support.rank_server`.

Two servers start the ranks in turn. They hash strings differently, so ranks that depend on the
order of a set do not agree by chance.
"""

import atexit
import contextlib
import dataclasses
import json
import os
import selectors
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from torch.distributed import TCPStore

from support.rank_server import Rank

_TESTS = Path(__file__).resolve().parents[1]
_COUNT = 2
_LAST_WORDS = "nanobind: leaked "
"""Message of Triton's bindings when a forked interpreter ends without freeing inherited objects."""


class _Server:
    """One fork server, which ends with this process."""

    def __init__(self, variables: Mapping[str, str], folder: Path) -> None:
        own = {k: v for k, v in variables.items() if not k.startswith("COVERAGE_PROCESS")}
        self._process = subprocess.Popen(
            [sys.executable, "-m", "support.rank_server"],
            env={**own, "PYTHONPATH": str(_TESTS)},
            cwd=folder,
            bufsize=0,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        assert self._process.stdin is not None and self._process.stdout is not None
        self._requests, self.answers = self._process.stdin, self._process.stdout
        self._rest = b""
        atexit.register(self._close)

    def _close(self) -> None:
        self._requests.close()
        self._process.wait()

    def wait_until_ready(self) -> None:
        while not list(self.events()):
            pass

    def start(self, ranks: Sequence[Rank]) -> None:
        line = json.dumps([dataclasses.asdict(rank) for rank in ranks]) + "\n"
        self._requests.write(line.encode())

    def events(self) -> Iterator[dict[str, int]]:
        """Yield the events that the server has written; block until the first event."""
        read = os.read(self.answers.fileno(), 65536)
        assert read, "a rank server ended"
        *lines, self._rest = (self._rest + read).split(b"\n")
        yield from map(json.loads, lines)


_servers: list[_Server] = []


class _Job:
    """Ranks that run concurrently.

    Attributes:
        running: process ids by rank, of ranks that have not ended.
        failed: exit status by rank of the first failure; the other ranks are then ended.
    """

    def __init__(self, servers: Sequence[_Server], ranks: Sequence[Rank]) -> None:
        self.running: dict[int, int] = {}
        self.failed: dict[int, int] = {}
        self._left, self._is_over = len(ranks), False
        self._selector = selectors.DefaultSelector()
        for index, server in enumerate(servers):
            if of_server := ranks[index :: len(servers)]:
                self._selector.register(server.answers, selectors.EVENT_READ, server)
                server.start(of_server)

    def wait(self, timeout: float) -> bool:
        deadline, in_time = time.monotonic() + timeout, True
        while self._left:
            for key, _ in self._selector.select(max(deadline - time.monotonic(), 0.0)):
                for event in key.data.events():
                    self._see(**event)
            if time.monotonic() > deadline:
                in_time, deadline = False, deadline + 3600.0
                self._end()
        return in_time

    def _see(self, number: int, pid: int = 0, status: int = 0) -> None:
        if pid:
            self.running[number] = pid
        else:
            del self.running[number]
            self._left -= 1
            if status and not self._is_over:
                self.failed[number] = status
        if self.failed or self._is_over:
            self._end()

    def _end(self) -> None:
        self._is_over = True
        for pid in self.running.values():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def run_forked(
    variables: Mapping[str, str],
    folder: Path,
    command: Sequence[str],
    size: int | None,
    timeout: float,
) -> str:
    """Run a program in several processes with the variables of ``torchrun``.

    Args:
        variables: environment of each process.
        folder: working directory.
        command: arguments of Python.
        size: number of ranks; None for one process without ranks.

    Returns:
        The stdout of each process, in the order of ranks.
    """
    if size is None:
        ended = [end_forked(variables, folder, command, timeout)]
    else:
        store = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
        of_all = {
            **variables,
            "WORLD_SIZE": str(size),
            "LOCAL_WORLD_SIZE": str(size),
            "GROUP_RANK": "0",
            "MASTER_ADDR": "localhost",
            "MASTER_PORT": str(store.port),
            "TORCHELASTIC_USE_AGENT_STORE": "True",
            "TORCHELASTIC_RESTART_COUNT": "0",
        }
        each = [{**of_all, "RANK": str(n), "LOCAL_RANK": str(n)} for n in range(size)]
        ended = _run_together(each, folder, command, timeout)
    failed = {rank: done.returncode for rank, done in enumerate(ended) if done.returncode}
    assert not failed, f"exit status by rank: {failed}\n{_said(ended)}"
    return "".join(done.stdout for done in ended)


def end_forked(
    variables: Mapping[str, str], folder: Path, command: Sequence[str], timeout: float
) -> subprocess.CompletedProcess[str]:
    (ended,) = _run_together([variables], folder, command, timeout)
    return ended


def _run_together(
    variables: Sequence[Mapping[str, str]], folder: Path, command: Sequence[str], timeout: float
) -> list[subprocess.CompletedProcess[str]]:
    if not _servers:
        _servers.extend(_Server(variables[0], folder) for _ in range(_COUNT))
        for server in _servers:
            server.wait_until_ready()
    with tempfile.TemporaryDirectory() as logs:
        ranks = [
            Rank(number, list(command), dict(own), f"{logs}/{number}.out", f"{logs}/{number}.log")
            for number, own in enumerate(variables)
        ]
        for rank in ranks:  # A rank may be ended before it begins.
            Path(rank.output).touch()
            Path(rank.log).touch()
        job = _Job(_servers, ranks)
        in_time = job.wait(timeout)
        ended = [
            subprocess.CompletedProcess(
                command,
                job.failed.get(rank.number, 0),
                Path(rank.output).read_text(),
                Path(rank.log).read_text().partition(_LAST_WORDS)[0],
            )
            for rank in ranks
        ]
    name = " ".join(command)[:200]
    assert in_time, f"{name} took longer than {timeout} s\n{_said(ended)}"
    return ended


def _said(ended: Sequence[subprocess.CompletedProcess[str]]) -> str:
    return "\n".join(
        f"-- rank {rank}\n{done.stdout[-4000:]}{done.stderr[-8000:]}"
        for rank, done in enumerate(ended)
    )
