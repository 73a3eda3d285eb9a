"""Random programs over the public API against an oracle of its promises, for as long as you like.

$ python tests/lab programs --minutes 60 --seed 1

Ends with 1 if a program failed; its shortest form is printed, and can be carried out again with
--replay FILE.
"""

from __future__ import annotations

import logging
import math
import re
import time
from collections import Counter
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from hypothesis import HealthCheck, Phase, seed, settings
from hypothesis.stateful import run_state_machine_as_test
from rich.console import Console
from rich.table import Table

from lab.any_program import setups
from lab.any_program.machine import AnyProgram

LENGTHS = (6, 12, 25, 40)
"""Operations of a program, in turn."""
PROGRAMS_A_ROUND = 25


@dataclass
class Options:
    """Number and kind of random programs."""

    minutes: float | None = None
    """Stop after so many minutes."""
    programs: int | None = None
    """Stop after so many programs; 100 if --minutes is not given either."""
    seed: int = 0
    """Of the first round of programs; the next has the next one."""
    without: tuple[str, ...] = ()
    """Operations to leave out, by name, or "operation:kind"; "pending" takes state only where
    nothing was written from outside since the last step."""
    failures: int = 5
    """Stop after so many rounds that failed."""
    shrink: bool = True
    """Look for the shortest program that fails likewise."""
    replay: Path | None = None
    """Carry out the program in this file instead."""


@dataclass(frozen=True)
class Failure:
    """A program that failed.

    Attributes:
        programs: number of programs before it.
            seconds: time before it.
            message: the error.
            program: its operations.
    """

    programs: int
    seconds: float
    message: str
    program: str


@dataclass
class Tally:
    """Counts so far.

    Attributes:
        counts: programs and operations, without the shrinking of a failure.
        failures: one of each round that failed.
    """

    started: float = field(default_factory=time.monotonic)
    counts: Counter[str] = field(default_factory=Counter)
    failures: list[Failure] = field(default_factory=list)

    @property
    def seconds(self) -> float:
        return time.monotonic() - self.started


def one_round(options: Options, number: int, limit: int, tally: Tally) -> None:
    first: list[Failure] = []
    AnyProgram.counts = Counter()

    def note(error: Exception, lines: list[str]) -> None:
        if not first:
            tally.counts += AnyProgram.counts
            first.append(
                Failure(tally.counts["programs"], tally.seconds, _in_short(error), "\n".join(lines))
            )

    AnyProgram.on_failure, AnyProgram.without = (staticmethod(note), frozenset(options.without))
    seed(options.seed + number)(AnyProgram)
    phases = (Phase.generate, Phase.shrink) if options.shrink else (Phase.generate,)
    try:
        run_state_machine_as_test(
            AnyProgram,
            settings=settings(
                max_examples=limit,
                stateful_step_count=LENGTHS[number % len(LENGTHS)],
                deadline=None,
                database=None,
                suppress_health_check=list(HealthCheck),
                phases=phases,
                print_blob=False,
                report_multiple_bugs=False,
            ),
        )
        tally.counts += AnyProgram.counts
    except Exception as error:
        failure = (
            first[0]
            if first
            else Failure(tally.counts["programs"], tally.seconds, _in_short(error), "")
        )
        tally.failures.append(replace(failure, program=_shortest(error) or failure.program))


def _in_short(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0][:300]


def _shortest(error: BaseException) -> str:
    notes = "\n".join(getattr(error, "__notes__", []))
    found = re.search(
        r"^state = AnyProgram\(\)$.*?^state\.teardown\(\)$", notes, re.MULTILINE | re.DOTALL
    )
    return found[0] if found else ""


def replay(path: Path) -> None:
    """Carry out a printed program. Raises what it raises."""
    names: dict[str, Any] = {
        **vars(setups),
        "AnyProgram": AnyProgram,
        "inf": math.inf,
        "nan": math.nan,
    }
    program = path.read_text()
    if "AnyProgram()" not in program:
        program = f"state = AnyProgram()\n{program}\nstate.teardown()\n"
    exec(program, names)


def go_on(options: Options, tally: Tally) -> bool:
    """Whether there is time, and there are programs left."""
    programs = options.programs if options.programs or options.minutes else 100
    return (
        len(tally.failures) < options.failures
        and (programs is None or tally.counts["programs"] < programs)
        and (options.minutes is None or tally.seconds < options.minutes * 60)
    )


def report(tally: Tally, console: Console) -> None:
    table = Table(
        title=f"{tally.counts['programs']} programs, {tally.counts['operations']} operations, "
        f"{tally.seconds:.0f} s, {len(tally.failures)} failures"
    )
    table.add_column("operation")
    table.add_column("times", justify="right")
    for name, count in sorted(tally.counts.items(), key=lambda item: -item[1]):
        if name not in ("programs", "operations"):
            table.add_row(name, str(count))
    console.print(table)


def show_last(tally: Tally, console: Console) -> None:
    failure = tally.failures[-1]
    console.print(f"[red]after {failure.programs} programs, {failure.seconds:.1f} s:[/red]")
    console.print(
        f"{failure.message}\n{failure.program}", markup=False, highlight=False, soft_wrap=True
    )


def main(options: Options) -> int:
    """Returns the exit status: 1 if a program failed."""
    console = Console()
    if options.replay is not None:
        replay(options.replay)
        return 0
    logging.getLogger("mp_optim").setLevel(logging.CRITICAL)
    tally, number = Tally(), 0
    while go_on(options, tally):
        left = (
            PROGRAMS_A_ROUND
            if options.programs is None
            else options.programs - tally.counts["programs"]
        )
        before = len(tally.failures)
        one_round(options, number, max(1, min(PROGRAMS_A_ROUND, left)), tally)
        if len(tally.failures) > before:
            show_last(tally, console)
        number += 1
    report(tally, console)
    return int(bool(tally.failures))
