"""Try random layouts of ranks, each against one process that steps the summed gradients.

$ python tests/lab layouts --layouts 300 --seed 1
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass

from lab.layout_fuzz.case import Case, grouped
from lab.layout_fuzz.drawing import draw
from lab.layout_fuzz.pool import Pool
from lab.layout_fuzz.trying import attempt


@dataclass
class Options:
    """Number of cases, and the first."""

    layouts: int = 100
    """Cases to try; with --minutes, at most so many."""
    seed: int = 0
    """Number of the first case; each other is one more."""
    minutes: float | None = None
    """Stop after so long."""
    case: int | None = None
    """Try this one alone, and print it."""


@dataclass
class Tally:
    tried: int = 0
    refused: int = 0
    among_threads: tuple[int, ...] = ()
    failed: tuple[int, ...] = ()


def explore(pool: Pool, cases: Iterable[Case], options: Options) -> Tally:
    """Try one case after the other, and print what is wrong."""
    tally, began = Tally(), time.monotonic()
    for case in cases:
        if options.minutes is not None and time.monotonic() - began > options.minutes * 60:
            break
        verdict = attempt(pool, case)
        tally.tried += 1
        tally.refused += verdict.refused
        if verdict.among_threads:
            tally.among_threads += (case.seed,)
            print(f"among threads alone: {grouped(case)}\n  {verdict.among_threads[0]}", flush=True)
        if verdict.faults:
            tally.failed += (case.seed,)
            print(
                f"FAILED after {time.monotonic() - began:.1f} s: {grouped(case)}\n{case}",
                flush=True,
            )
            print("\n".join(f"  {fault}" for fault in verdict.faults[:12]), flush=True)
    return tally


def main(options: Options) -> int:
    """Returns the exit status: 1 if a layout failed."""
    numbers = (
        range(options.seed, options.seed + options.layouts)
        if options.case is None
        else [options.case]
    )
    if options.case is not None:
        print(draw(options.case))
    began = time.monotonic()
    with Pool() as pool:
        tally = explore(pool, map(draw, numbers), options)
    print(
        f"{tally.tried} layouts from {numbers[0]}: {len(tally.failed)} failed "
        f"{list(tally.failed) or ''}, "
        f"{tally.refused} that torch refuses, {len(tally.among_threads)} failed among threads "
        "alone, "
        f"{time.monotonic() - began:.0f} s, {pool.restarts} restarts"
    )
    return 1 if tally.failed else 0
