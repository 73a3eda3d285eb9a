"""Runner of checks in a separate process, where a crash or a hang is a finding, too.

The process writes to a file when a check begins and when it ends. A check without an end in the
file is the check that crashed or hung. :func:`command_of` returns the command that repeats one
check alone.
"""

from __future__ import annotations

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
    """

    name: str
    status: str
    message: str = ""


def run(
    subject: Subject, names: Sequence[str] = (), limit: float = LIMIT_SECONDS
) -> Generator[Outcome, None, None]:
    """Run checks in the order of :data:`CHECKS`, and yield their outcomes.

    Raises:
        ValueError: a check or the optimizer does not exist.
    """
    left = [check.name for check in subject.checks(names)]
    while left:
        for outcome in _job(subject, left, limit):
            left.remove(outcome.name)
            yield outcome


def _job(subject: Subject, names: list[str], limit: float) -> Iterator[Outcome]:
    """Run checks in a new process, and yield outcomes until a check ends the process."""
    # A server forks the processes, so torch is imported once for all processes.
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([carry_out.__module__, "torch._dynamo"])
    with tempfile.TemporaryDirectory() as folder:
        report, log = Path(folder, "report"), Path(folder, "log")
        report.touch()
        log.touch()
        process = context.Process(
            target=carry_out, args=(subject, tuple(names), report, log), daemon=True
        )
        process.start()
        count = 0
        last, is_late = time.monotonic(), False
        while not is_late and process.is_alive():
            for outcome in _outcomes(report)[count:]:
                count += 1
                last = time.monotonic()
                yield outcome
            is_late = time.monotonic() - last > limit
            time.sleep(_POLL_SECONDS)
        process.kill()
        process.join()
        found = _outcomes(report)
        yield from found[count:]
        why = f"no answer in {limit:.0f} s" if is_late else _end(process, log)
        begun = [line["begun"] for line in _lines(report) if "begun" in line]
        if len(begun) > len(found):
            yield Outcome(begun[-1], FAILS, why)
        elif not found:
            raise ValueError(f"{subject.path} cannot be checked: {why}")


def _lines(report: Path) -> list[dict[str, Any]]:
    complete = report.read_text().rpartition("\n")[0]
    return [json.loads(line) for line in complete.splitlines()]


def _outcomes(report: Path) -> list[Outcome]:
    return [Outcome(**line) for line in _lines(report) if "name" in line]


def _end(process: BaseProcess, log: Path) -> str:
    """Describe how the process ended: by a signal, or with the last line of its output."""
    if process.exitcode is not None and process.exitcode < 0:
        return f"the process ended by signal {-process.exitcode}"
    lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
    return f"the process ended: {lines[-1][:200] if lines else 'nothing was said'}"


PASSES, FAILS, REFUSES, OTHER = ("passes", "FAILS", "refuses", "does not apply")
_LONGEST = 400


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


def carry_out(subject: Subject, names: Sequence[str], report: Path, log: Path) -> None:
    """Run checks in this process, and exit the process.

    Args:
        subject: the checked optimizer.
        names: names of the checks.
        report: the file for findings, one JSON object a line.
        log: the file for all other output.
    """
    output = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    for number in (1, 2):
        os.dup2(output, number)
    warnings.simplefilter("ignore")
    make = subject.maker()
    with report.open("a", buffering=1) as lines:
        for name in names:
            lines.write(json.dumps({"begun": name}) + "\n")
            status, message = outcome_of(name, make)
            found = {"name": name, "status": status, "message": message}
            lines.write(json.dumps(found) + "\n")
    os._exit(0)  # Exit without waiting for threads that the optimizer left running.


def command_of(check: Check, subject: Subject) -> str:
    """Return the shell command that runs one check, and fails if the optimizer does not conform."""
    made = f"kit.Subject({subject.path!r}, {dict(subject.settings)!r}).maker()"
    lines = [f"import torch, {check.function.__module__} as checks, {kit.__name__} as kit"]
    lines += [f"checks.{check.name}({made})", "print('conforms')"]
    return f"python -c {shlex.quote('; '.join(lines))}"
