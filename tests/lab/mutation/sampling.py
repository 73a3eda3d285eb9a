"""Which faults are tried, and which tests may notice each."""

from __future__ import annotations

import ast
import random
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from operator import itemgetter
from pathlib import Path

from lab.mutation.covering import Covering
from lab.mutation.operators import Mutant, mutants_of

__all__ = ["PACKAGES", "Chooser", "Chosen", "mutants_in", "sample"]

PACKAGES: dict[str, tuple[str, ...]] = {
    name: (name,)
    for name in (
        *("mixed_precision", "offload", "core", "zero", "checkpoint"),
        *("rules", "muon", "kernels"),
    )
}
"""What a report has a row for. Triton's kernels are left out: what runs there is not Python."""
_QUICK = 10.0
"""Seconds that a quick test may take."""
_LEFT_OUT = "kernels/triton/kernels"


def mutants_in(root: Path, package: str) -> list[Mutant]:
    """Every fault for a package, in the order of its files."""
    found: list[Mutant] = []
    for part in PACKAGES[package]:
        top = root / "mp_optim" / part
        for path in [top] if top.is_file() else sorted(top.rglob("*.py")):
            if _LEFT_OUT not in str(path):
                found += mutants_of(str(path.relative_to(root)), path.read_text())
    return found


def sample(mutants: Sequence[Mutant], size: int, seed: int) -> list[Mutant]:
    """Some of the faults, spread evenly over functions: one of each in turn, in an order made of
    the seed."""
    generator = random.Random(seed)
    functions: dict[tuple[str, str], list[Mutant]] = defaultdict(list)
    for mutant in mutants:
        functions[mutant.path, mutant.function].append(mutant)
    queues = list(functions.values())
    generator.shuffle(queues)
    for queue in queues:
        generator.shuffle(queue)
    found: list[Mutant] = []
    while queues and len(found) < size:
        found += [queue.pop() for queue in queues]
        queues = [queue for queue in queues if queue]
    return found[:size]


@dataclass(frozen=True)
class Chosen:
    """The tests to run on a fault.

    Attributes:
        arguments: for pytest, those that are soonest done first.
        seconds: how long they take without the fault.
        covering: how many tests (files, for ranks) cover the fault; ``arguments`` may be fewer.
    """

    arguments: list[str]
    seconds: float
    covering: int


class Chooser:
    """Chooses tests by what covers a fault and what they cost.

    Args:
        root: the checkout. budget: seconds of quick tests that a fault is given; four times that
            for the slow ones, such as those that start ranks.
    """

    def __init__(self, root: Path, covering: Covering, budget: float) -> None:
        self._covering, self._budget = covering, budget
        self._uses: dict[str, dict[str, set[int]]] | None = None
        self._root = root

    def tests_for(self, mutant: Mutant) -> Chosen:
        """The tests that may notice a fault; none if no test runs its line."""
        tests, files = self._covering.of(mutant.path, range(mutant.first, mutant.last + 1))
        if not tests and not files:
            tests, files = self._covering.of(mutant.path, range(mutant.statement, mutant.last + 1))
        for path, lines in self._users(mutant):
            more, more_files = self._covering.of(path, lines)
            tests, files = tests | more, files | more_files
        seconds = {test: self._covering.seconds[test] for test in tests}
        quick = sorted((test for test in tests if seconds[test] <= _QUICK), key=seconds.__getitem__)
        arguments, spent = self._within(quick)
        slow = {file: self._covering.file_seconds(file) for file in files}
        slow |= {test: took for test, took in seconds.items() if took > _QUICK}
        spent_slowly = 0.0
        for test, took in sorted(slow.items(), key=itemgetter(1)):
            if took and (
                spent_slowly + took <= 4 * self._budget or not arguments
            ):  # at least one is run
                spent_slowly += took
                arguments.append(test)
        return Chosen(arguments, spent + spent_slowly, len(tests) + len(files))

    def _within(self, tests: Sequence[str]) -> tuple[list[str], float]:
        """The fastest test of each file, then the second ones, and so on, within the budget."""
        by_file: dict[str, list[str]] = defaultdict(list)
        for test in tests:
            by_file[test.partition("::")[0]].append(test)
        queues, found, spent = list(by_file.values()), [], 0.0
        while queues:
            for queue in queues:
                took = self._covering.seconds[queue[0]]
                if spent + took <= self._budget:
                    spent += took
                    found.append(queue[0])
                del queue[0]
            queues = [queue for queue in queues if queue]
        return found, spent

    def _users(self, mutant: Mutant) -> Iterator[tuple[str, set[int]]]:
        """Lines that use a name, for a fault in what runs when a module is imported."""
        if mutant.names and self._uses is None:
            self._uses = _uses_of_names(self._root)
        for name in mutant.names:
            yield from (self._uses or {}).get(name, {}).items()


def _uses_of_names(root: Path) -> dict[str, dict[str, set[int]]]:
    """For each name, the lines of each file that read it, and those of the functions called so."""
    found: dict[str, dict[str, set[int]]] = defaultdict(lambda: defaultdict(set))
    for path in sorted((root / "mp_optim").rglob("*.py")):
        relative = str(path.relative_to(root))
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load):
                found[node.id][relative].add(node.lineno)
            elif isinstance(node, ast.Attribute):
                found[node.attr][relative].add(node.lineno)
            elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                found[node.name][relative] |= {statement.lineno for statement in node.body}
    return found
