"""Processes that run one case after the other, and are replaced when one hangs or dies.

They are forked from a server that has imported everything once, so a new one is there in a tenth of
a second.
"""

from __future__ import annotations

import contextlib
import itertools
import multiprocessing
import os
import sys
import tempfile
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection, wait
from pathlib import Path
from types import ModuleType
from typing import Any

import torch.distributed as dist

from lab.layout_fuzz.case import Case
from lab.layout_fuzz.running import Outcome
from lab.layout_fuzz.worker import receive, send, serve
from support.launch import PATH


class WorldLostError(RuntimeError):
    """A rank hung or died; the message has its number and its last output."""


@contextlib.contextmanager
def _no_main_module() -> Iterator[None]:
    main = sys.modules["__main__"]
    sys.modules["__main__"] = ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = main


class _Worker:
    def __init__(self, context: Any, kind: str, log: Path) -> None:
        self.log = log
        self.pipe: Connection
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=serve, args=(kind, theirs, str(log)), daemon=True)
        with _no_main_module():
            self.process.start()
        theirs.close()

    def last_words(self) -> str:
        return self.log.read_text(errors="replace")[-6000:] if self.log.exists() else ""

    def end(self) -> None:
        self.process.kill()
        self.process.join()
        self.pipe.close()
        self.log.unlink(missing_ok=True)


class Pool:
    """Worlds of ranks, started when they are first needed.

    Args:
        patience: seconds that a phase of a case may take before it counts as hung.
        timeout: of the process groups, in seconds.
            short_timeout: of process groups with ranks that disagree.
    """

    def __init__(
        self, patience: float = 100.0, timeout: float = 30.0, short_timeout: float = 6.0
    ) -> None:
        self.patience, self.timeout, self.short_timeout = (patience, timeout, short_timeout)
        paths = [*PATH.split(os.pathsep), *filter(None, [os.environ.get("PYTHONPATH")])]
        os.environ.update(OMP_NUM_THREADS="1", PYTHONPATH=os.pathsep.join(dict.fromkeys(paths)))
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(["lab.layout_fuzz.worker"])
        self._logs = tempfile.TemporaryDirectory()
        self._workers: dict[str, list[_Worker]] = {"threads": [], "processes": []}
        self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self._numbers = itertools.count()
        self.restarts = 0

    def __enter__(self) -> Pool:
        return self

    def __exit__(self, *_: object) -> None:
        for kind in self._workers:
            self._end(kind)
        self._logs.cleanup()

    def run(self, case: Case, phase: int, folder: str) -> list[Outcome]:
        """Return the outcomes of all ranks.

        Raises:
            WorldLostError: one of them hung or died; the next case gets new processes.
        """
        kind, ranks = case.world, case.layouts[phase].ranks
        workers = self._started(kind, 1 if kind == "threads" else ranks)
        timeout = self.timeout if case.disagreement is None else self.short_timeout
        job = {
            "case": case,
            "phase": phase,
            "folder": folder,
            "ranks": ranks,
            "timeout": timeout,
            "name": f"world{next(self._numbers)}",
            "store": ("127.0.0.1", self._store.port),
            "patience": 0.7 * self.patience,
        }
        try:
            for rank, worker in enumerate(workers):
                send(worker.pipe, {**job, "rank": rank})
            answers = self._collect(workers, self.patience)
        except (WorldLostError, BrokenPipeError):
            self._restart(kind)
            raise
        try:
            self._collect(workers, 5.0)
        except WorldLostError:  # what failed has told so already; its ranks need not leave in order
            self._restart(kind)
        return [outcome for answer in answers for outcome in answer]

    def _restart(self, kind: str) -> None:
        self.restarts += 1
        self._end(kind)

    def _end(self, kind: str) -> None:
        for worker in self._workers[kind]:
            worker.end()
        self._workers[kind].clear()

    def _started(self, kind: str, count: int) -> list[_Worker]:
        workers = self._workers[kind]
        while len(workers) < count:
            workers.append(
                _Worker(self._context, kind, Path(self._logs.name) / f"{next(self._numbers)}.log")
            )
        return workers[:count]

    def _collect(self, workers: list[_Worker], seconds: float) -> list[Any]:
        answers: dict[int, Any] = {}
        deadline = time.monotonic() + seconds
        while len(answers) < len(workers):
            waiting = {
                worker.pipe: index for index, worker in enumerate(workers) if index not in answers
            }
            ready = wait(list(waiting), max(0.0, deadline - time.monotonic()))
            if not ready:
                raise WorldLostError(_report("hung", workers, set(waiting.values())))
            for pipe in ready:
                index = waiting[pipe]  # type: ignore[index]
                try:
                    answers[index] = receive(pipe)  # type: ignore[arg-type]
                except (EOFError, ConnectionResetError):
                    workers[index].process.join(5.0)
                    raise WorldLostError(_report("died", workers, {index})) from None
        return [answers[index] for index in range(len(workers))]


def _report(what: str, workers: list[_Worker], lost: set[int]) -> str:
    said = "\n".join(
        f"-- worker {index}, exit status "
        f"{workers[index].process.exitcode}:\n{workers[index].last_words()}"
        for index in sorted(lost)
    )
    return f"workers {sorted(lost)} {what}:\n{said}"
