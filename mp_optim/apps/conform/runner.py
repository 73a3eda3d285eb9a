"""Runner of checks in separate processes, where a crash or a hang is a finding, too.

A process writes its findings to a file, line by line. A missing line identifies the check that
ended the process. :func:`command_of` returns the command that repeats one check alone.
"""

from __future__ import annotations

import datetime
import json
import multiprocessing
import os
import shlex
import tempfile
import time
import warnings
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch.distributed as dist

from mp_optim.apps.conform import kit
from mp_optim.apps.conform.kit import (
    CHECKS,
    Check,
    Make,
    Nonconformance,
    NotApplicable,
    Refused,
    Subject,
)

LIMIT_SECONDS = 90.0
"""Time limit of one check, in seconds."""
_POLL_SECONDS = 0.05


@dataclass(frozen=True)
class Outcome:
    """The result of a check.

    Attributes:
        name: name of the check.
        status: ``passes``, ``FAILS``, ``refuses`` (raises an error for the caller) or ``does not
            apply``.
        message: the finding; empty if the check passes.
        seconds: duration of the check.
    """

    name: str
    status: str
    message: str = ""
    seconds: float = 0.0

    @property
    def check(self) -> Check:
        return CHECKS[self.name]

    @property
    def failed(self) -> bool:
        return self.status == FAILS

    @property
    def passed(self) -> bool:
        return self.status == PASSES


def run(
    subject: Subject, names: Sequence[str] = (), limit: float = LIMIT_SECONDS
) -> Generator[Outcome, None, None]:
    """Run checks in the order of :data:`CHECKS`, and yield their outcomes.

    Raises:
        ValueError: a check or the optimizer does not exist.
    """
    checks = subject.checks(names)
    for ranks in sorted({check.ranks for check in checks}):
        left = [check.name for check in checks if check.ranks == ranks]
        while left:
            for outcome in _job(subject, left, ranks, limit):
                left.remove(outcome.name)
                yield outcome


def _job(subject: Subject, names: list[str], ranks: int, limit: float) -> Iterator[Outcome]:
    """Start processes for some checks, and yield outcomes until a check ends the processes."""
    with tempfile.TemporaryDirectory() as folder:
        report, log = Path(folder, "report"), Path(folder, "log")
        report.touch()
        log.touch()
        work = Work(subject, tuple(names), ranks, report, log)
        processes = [_started(work, rank) for rank in range(ranks)]
        done: list[str] = []
        last, is_late = time.monotonic(), False
        while not is_late and any(process.is_alive() for process in processes):
            for outcome in _complete(report, ranks)[len(done) :]:
                done.append(outcome.name)
                last = time.monotonic()
                yield outcome
            is_late = time.monotonic() - last > limit
            time.sleep(_POLL_SECONDS)
        for process in processes:
            process.kill()
            process.join()
        for outcome in _complete(report, ranks)[len(done) :]:
            done.append(outcome.name)
            yield outcome
        why = f"no answer in {limit:.0f} s" if is_late else _end(processes, log)
        if broken := _broken(report, done):
            yield Outcome(broken, FAILS, why)
        elif not done:
            raise ValueError(f"{subject.path} cannot be checked: {why}")


def _started(work: Work, rank: int) -> BaseProcess:
    """Start one process, forked from a server that imports torch once for all of them."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([carry_out.__module__, "torch._dynamo"])
    process = context.Process(target=carry_out, args=(work, rank), daemon=True)
    process.start()
    return process


def _lines(report: Path) -> list[dict[str, Any]]:
    complete = report.read_text().rpartition("\n")[0]
    return [json.loads(line) for line in complete.splitlines()]


def _complete(report: Path, ranks: int) -> list[Outcome]:
    """Return outcomes of the checks that all ranks have ended, or that one rank has failed."""
    found: dict[str, list[dict[str, Any]]] = {}
    for line in _lines(report):
        if "name" in line:
            found.setdefault(line["name"], []).append(line)
    outcomes = []
    for name, lines in found.items():
        first = min(lines, key=_has_passed)
        if not _has_passed(first) or len(lines) == ranks:
            outcomes.append(Outcome(name, first["status"], first["message"], first["seconds"]))
    return outcomes


def _has_passed(line: dict[str, Any]) -> bool:
    return bool(line["status"] == PASSES)


def _broken(report: Path, done: list[str]) -> str | None:
    """Return the check that was started and did not end."""
    begun = [line["begun"] for line in _lines(report) if "begun" in line]
    return next((name for name in begun if name not in done), None)


def _end(processes: Sequence[BaseProcess], log: Path) -> str:
    """Describe how processes ended: by a signal, or with the last line of their output."""
    signals = [-p.exitcode for p in processes if p.exitcode is not None and p.exitcode < 0]
    lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
    said = lines[-1][:200] if lines else "nothing was said"
    return f"the process ended by signal {signals[0]}" if signals else f"the process ended: {said}"


PASSES, FAILS, REFUSES, OTHER = STATUSES = ("passes", "FAILS", "refuses", "does not apply")
_LONGEST = 400
_PATIENCE = datetime.timedelta(seconds=20)


def outcome_of(name: str, make: Make) -> tuple[str, str]:
    """Run one check, and return its status and its finding."""
    try:
        CHECKS[name].function(make)
    except Nonconformance as finding:
        return FAILS, str(finding)
    except Refused as said:
        return REFUSES, str(said)[:_LONGEST]
    except NotApplicable as why:
        return OTHER, str(why)
    except Exception as error:
        text = " ".join(str(error).split())[:_LONGEST]
        return FAILS, f"raised {type(error).__name__}: {text}"
    return PASSES, ""


@dataclass(frozen=True)
class Work:
    """The checks that one process runs. All ranks of a job get equal values.

    Attributes:
        subject: the checked optimizer.
        names: names of the checks.
        ranks: number of processes that run the checks together.
        report: the file for findings of all ranks.
        log: the file for all other output.
    """

    subject: Subject
    names: tuple[str, ...]
    ranks: int
    report: Path
    log: Path


def carry_out(work: Work, rank: int) -> None:
    """Run the checks of one process, and exit the process."""
    output = os.open(work.log, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    for number in (1, 2):
        os.dup2(output, number)
    warnings.simplefilter("ignore")
    if work.ranks > 1:
        os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(work.ranks))
        store = f"file://{work.report}.store"
        dist.init_process_group("gloo", store, timeout=_PATIENCE, rank=rank, world_size=work.ranks)
    make = work.subject.maker()
    with work.report.open("a", buffering=1) as report:
        for name in work.names:
            report.write(json.dumps({"rank": rank, "begun": name}) + "\n")
            start = time.monotonic()
            status, message = outcome_of(name, make)
            found = {"rank": rank, "name": name, "status": status, "message": message}
            found["seconds"] = time.monotonic() - start
            report.write(json.dumps(found) + "\n")
            if work.ranks > 1:
                if status != PASSES:
                    # End this process, which ends the other ranks, because they may wait for this
                    # rank.
                    break
                dist.barrier()
    os._exit(0)  # Exit without waiting for threads that the optimizer left running.


def command_of(check: Check, subject: Subject) -> str:
    """Return the shell command that runs one check, and fails if the optimizer does not conform."""
    start = "python -c"
    lines = [f"import torch, {check.function.__module__} as checks, {kit.__name__} as kit"]
    if check.ranks > 1:
        start = f"torchrun --standalone --nproc-per-node {check.ranks} --no-python {start}"
        lines.append("torch.distributed.init_process_group('gloo')")
    made = f"kit.Subject({subject.path!r}, {dict(subject.settings)!r}).maker()"
    lines += [f"checks.{check.name}({made})", "print('conforms')"]
    return f"{start} {shlex.quote('; '.join(lines))}"
