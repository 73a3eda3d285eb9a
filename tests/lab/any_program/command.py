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
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hypothesis import HealthCheck, Phase, seed, settings
from hypothesis.stateful import run_state_machine_as_test

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


def one_round(options: Options, number: int, limit: int) -> str:
    """Carry out programs; return the first failure with its program, or "" if there is none."""
    first: list[str] = []
    before = AnyProgram.counts.copy()

    def note(error: Exception, lines: list[str]) -> None:
        nonlocal before
        if not first:  # programs that shrinking tries do not count
            before = AnyProgram.counts.copy()
            first.append("\n".join(lines))

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
    except Exception as error:
        AnyProgram.counts.clear()
        AnyProgram.counts.update(before)
        return f"{_in_short(error)}\n{_shortest(error) or ''.join(first)}"
    return ""


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


def main(options: Options) -> int:
    """Returns the exit status: 1 if a program failed."""
    if options.replay is not None:
        replay(options.replay)
        return 0
    logging.getLogger("mp_optim").setLevel(logging.CRITICAL)
    most = options.programs or (math.inf if options.minutes else 100)
    end = time.monotonic() + 60 * (options.minutes or math.inf)
    failed = number = 0
    counts = AnyProgram.counts
    counts.clear()
    while failed < options.failures and counts["programs"] < most and time.monotonic() < end:
        limit = int(min(PROGRAMS_A_ROUND, most - counts["programs"]))
        if failure := one_round(options, number, limit):
            failed += 1
            print(f"FAILED in round {number}, of seed {options.seed + number}:\n{failure}")
        number += 1
    print(f"{counts.pop('programs')} programs, {failed} failures; operations:")
    print(", ".join(f"{name} {count}" for name, count in counts.most_common()))
    return int(bool(failed))
