"""Which tests run which lines, and how long they take: from one run of the tests under coverage."""

from __future__ import annotations

import os
import subprocess
import sys
import xml.etree.ElementTree as ET
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from coverage import CoverageData

__all__ = ["Covering", "measure"]

_CONFIG = """\
[run]
source = {root}/mp_optim
branch = false
parallel = true
data_file = {folder}/data
context = ${{PYTEST_CURRENT_TEST}}
sigterm = true
patch = _exit
"""
"""Other processes that a test starts take its name from the variable that pytest sets; ranks end by
``os._exit``."""


@dataclass(frozen=True)
class Covering:
    """Who covers what.

    Attributes:
        tests: for each file and line, the tests that run it, in pytest's process or in one that
            they start.
        ranks: for each file and line, the test files whose fixtures start processes that run it. No
            test of such a file costs less than all of them.
        seconds: by test.
    """

    tests: dict[str, dict[int, set[str]]]
    ranks: dict[str, dict[int, set[str]]]
    seconds: dict[str, float]

    @classmethod
    def read(cls, folder: Path) -> Covering:
        """What :func:`measure` left in a folder."""
        seconds: dict[str, float] = {}
        for report in folder.glob("durations*.xml"):
            seconds |= _seconds(report)
        tests: dict[str, dict[int, set[str]]] = defaultdict(lambda: defaultdict(set))
        ranks: dict[str, dict[int, set[str]]] = defaultdict(lambda: defaultdict(set))
        for part in folder.glob("data*"):
            data = CoverageData(str(part))
            data.read()
            for path in data.measured_files():
                relative = "mp_optim/" + path.rpartition("/mp_optim/")[2]
                for line, contexts in data.contexts_by_lineno(path).items():
                    for context in filter(None, contexts):
                        test, in_fixture = _test_of(context)
                        if in_fixture:
                            ranks[relative][line].add(test.partition("::")[0])
                        else:
                            tests[relative][line].add(test)
        return cls(tests, ranks, seconds)

    @cached_property
    def _with_ranks(self) -> set[str]:
        return {file for lines in self.ranks.values() for files in lines.values() for file in files}

    def of(self, path: str, lines: Iterable[int]) -> tuple[set[str], set[str]]:
        """Tests, and test files with ranks, that run one of some lines."""
        mine, others = self.tests.get(path, {}), self.ranks.get(path, {})
        tests: set[str] = set()
        files: set[str] = set()
        for line in lines:
            tests |= mine.get(line, set())
            files |= others.get(line, set())
        apart = {test for test in tests if test.partition("::")[0] not in self._with_ranks}
        return apart & self.seconds.keys(), files

    def file_seconds(self, file: str) -> float:
        """How long a whole test file takes."""
        return sum(took for test, took in self.seconds.items() if test.startswith(f"{file}::"))


def _test_of(context: str) -> tuple[str, bool]:
    """The test that a context of coverage is named for, and whether its fixtures started the
    process."""
    if "|" in context.rpartition("]")[2]:  # pytest-cov's, with the phase
        return context.rpartition("|")[0], False
    test, _, phase = context.rpartition(" ")  # pytest's variable
    return test, phase == "(setup)"


def _seconds(report: Path) -> dict[str, float]:
    """Seconds of each test that passed."""
    found = {}
    for case in ET.parse(report).iter("testcase"):
        if not any(child.tag in ("failure", "error", "skipped") for child in case):
            file = case.get("file") or case.get("classname", "").replace(".", "/") + ".py"
            found[f"{file}::{case.get('name')}"] = float(case.get("time", 0.0))
    return found


def measure(root: Path, folder: Path, arguments: list[str]) -> int:
    """Run the tests of a checkout once, and leave in ``folder`` what :meth:`Covering.read`
    reads."""
    folder.mkdir(parents=True, exist_ok=True)
    config = folder / "config"
    config.write_text(_CONFIG.format(root=root, folder=folder))
    environment = {**os.environ, "PYTHONPATH": str(root), "COVERAGE_PROCESS_START": str(config)}
    environment.setdefault("OMP_NUM_THREADS", "1")
    environment.pop("PYTEST_CURRENT_TEST", None)
    command = [
        sys.executable,
        "-m",
        "pytest",
        *arguments,
        "-q",
        "-p",
        "no:cacheprovider",
        "--cov",
        f"--cov-config={config}",
        "--cov-context=test",
        "--cov-report=",
        f"--junitxml={folder / 'durations.xml'}",
        "-o",
        "junit_family=xunit1",
    ]
    return subprocess.run(command, cwd=root, env=environment, check=False).returncode
