"""Mutation testing: put small faults into the package, one at a time, and see whether a test fails.

$ python tests/lab mutants cover --out ../mutants
$ python tests/lab mutants try --out ../mutants --packages precision slots --size 40 --seed 1
$ python tests/lab mutants report --out ../mutants

``cover`` runs the unit tests once and notes which test runs which line. ``try`` tries a sample of
faults on the tests that cover them, the fastest first; it goes on where it was interrupted. A fault
that no test notices survives.
"""

from __future__ import annotations

import itertools
import json
from collections import Counter, defaultdict
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import tyro

from lab.mutation.covering import Covering, measure
from lab.mutation.sampling import PACKAGES, Chooser, mutants_in, sample
from lab.mutation.trying import WARM, Workshop

ROOT = Path(__file__).resolve().parents[3]


@dataclass(frozen=True)
class Cover:
    """Run the tests once and note which runs which line. Minutes."""

    out: Path
    """Folder for all that is kept, outside of the checkout."""
    root: Path = ROOT
    """The checkout."""
    tests: tuple[str, ...] = ("tests/unit", "-m", "not slow and not gpu")
    """Arguments for pytest."""


@dataclass(frozen=True)
class Try:
    """Try a sample of faults."""

    out: Path
    """The folder that was given to cover."""
    root: Path = ROOT
    """The checkout; the one that was given to cover, or one whose lines are the same."""
    packages: tuple[str, ...] = tuple(PACKAGES)
    """Which parts of the package."""
    size: int = 40
    """Faults of each part, spread evenly over its functions."""
    seed: int = 0
    """Which sample."""
    again: Path | None = None
    """A folder with results: try the same faults instead, where the text that they change still
    exists."""
    survivors: bool = False
    """Of those, only the faults that survived or that no test covered."""
    budget: float = 40.0
    """Seconds of quick tests that a fault is given; four times that for slow ones, as those that
    start ranks."""
    patience: float = 60.0
    """Tests that take this many seconds more than six times as long as without the fault have
    noticed it, too."""
    warm: tuple[str, ...] = WARM
    """Modules to import before each fault is tried in a fork."""


@dataclass(frozen=True)
class Report:
    """Scores and survivors."""

    out: Path
    """The folder that was given to try."""
    show: bool = True
    """List the faults that survived."""


Options = (
    Annotated[Cover, tyro.conf.subcommand("cover")]
    | Annotated[Try, tyro.conf.subcommand("try")]
    | Annotated[Report, tyro.conf.subcommand("report")]
)


def results_in(folder: Path) -> list[dict[str, Any]]:
    """What was tried so far, in order."""
    path = folder / "results.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def key_of(result: dict[str, Any]) -> tuple[Any, ...]:
    return tuple(result[name] for name in ("path", "function", "operator", "old", "new", "nth"))


def chosen_mutants(options: Try, package: str) -> list[Any]:
    """The faults to try in a package."""
    mutants = mutants_in(options.root, package)
    if options.again is None:
        return sample(mutants, options.size, options.seed)
    wanted = {
        key_of(result)
        for result in results_in(options.again)
        if result["package"] == package
        and (not options.survivors or result["status"] in ("survived", "uncovered"))
    }
    return [mutant for mutant in mutants if mutant.key in wanted]


def try_them(options: Try) -> None:
    covering = Covering.read(options.out / "coverage")
    chooser = Chooser(options.root, covering, options.budget)
    queues = [
        [(package, mutant) for mutant in chosen_mutants(options, package)]
        for package in options.packages
    ]
    turns = itertools.zip_longest(
        *queues
    )  # so that what is there when it is interrupted is even, too
    plan = [step for turn in turns for step in turn if step is not None]
    known = {key_of(result) for result in results_in(options.out)}
    workshop = Workshop(options.root, options.out, options.patience, options.warm)
    for at, (package, mutant) in enumerate(plan, start=1):
        if mutant.key in known:
            continue
        chosen = chooser.tests_for(mutant)
        outcome = workshop.attempt(mutant, chosen)
        result = {
            "package": package,
            **asdict(mutant),
            **asdict(outcome),
            "seed": options.seed,
            "ran": len(chosen.arguments),
            "covering": chosen.covering,
        }
        with (options.out / "results.jsonl").open("a") as file:
            file.write(json.dumps(result) + "\n")
        print(
            f"{at}/{len(plan)} {outcome.status} {outcome.seconds:.1f} s, {len(chosen.arguments)} "
            "of "
            f"{chosen.covering} tests: {line_of(result)}",
            flush=True,
        )


def line_of(result: dict[str, Any]) -> str:
    """A fault in one line."""
    old, new = (" ".join(result[name].split()) for name in ("old", "new"))
    place = f"{result['path']}:{result['first']} {result['function']}"
    return f"{place}: {result['operator']}: {old} -> {new}"


def report(options: Report) -> None:
    """Per package: how many faults were tried, what came of them, and the share that was
    noticed."""
    results = results_in(options.out)
    counts: dict[str, Counter[str]] = defaultdict(Counter)
    for result in results:
        counts[result["package"]][result["status"]] += 1
    print("| package | faults | killed | timed out | survived | not covered | noticed |")
    print("|---|---|---|---|---|---|---|")
    for package, count in [*counts.items(), ("all", sum(counts.values(), Counter()))]:
        total, noticed = sum(count.values()), count["killed"] + count["timeout"]
        print(
            f"| {package} | {total} | {count['killed']} | {count['timeout']} | {count['survived']} "
            "| "
            f"{count['uncovered']} | {noticed / max(total, 1):.0%} |"
        )
    for result in results if options.show else []:
        if result["status"] in ("survived", "uncovered"):
            print(
                f"- {result['status']}, {result['ran']} of {result['covering']} tests: "
                f"{line_of(result)}"
            )


def main(options: Cover | Try | Report) -> int:
    """Returns the exit status: that of the tests for ``cover``, else 0."""
    if isinstance(options, Cover):
        return measure(options.root, options.out / "coverage", list(options.tests))
    if isinstance(options, Try):
        try_them(options)
    else:
        report(options)
    return 0
