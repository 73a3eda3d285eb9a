"""``python tests/lab mutants``: what it changes, what it picks, and that it tells a test that
notices from one that does not."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from collections import Counter

import pytest

from support.launch import ROOT

SOURCE = '''\
"""A module."""
from functools import cache

__all__ = ["f"]
LIMIT = 3


@cache
def f(x: int = 1, *, scale: float = 2.0) -> float | None:
    """What it does."""
    if x < LIMIT and not scale > 1.0:
        raise ValueError(f"x={x - 1}: too small")
    total = -x * scale
    for part in [y for y in range(x) if y % 2]:
        total += max(part, x, key=abs)
        if part: break
    return total if x else None


class Thing:
    def set(self, value: int) -> None:
        self.value = pow(value, 2, mod=7)
        print("é", value)
'''


def test_every_fault_compiles_and_changes_what_the_module_does():
    from lab.mutation.operators import mutants_of

    mutants = mutants_of("m.py", SOURCE)
    assert len({mutant.key for mutant in mutants}) == len(mutants)
    tree = ast.dump(ast.parse(SOURCE))
    for mutant in mutants:
        assert ast.dump(ast.parse(mutant.applied(SOURCE))) != tree, mutant
    kinds = Counter(mutant.operator for mutant in mutants)
    assert kinds.keys() == {
        "comparison boundary",
        "opposite comparison",
        "and/or",
        "removed not",
        "removed sign",
        "arithmetic",
        "constant",
        "string",
        "swapped branches",
        "dropped filter",
        "other call",
        "swapped arguments",
        "dropped argument",
        "removed call",
        "removed assignment",
        "removed raise",
        "returned None",
        "other jump",
        "negated condition",
        "dropped decorator",
    }
    changed = {mutant.old for mutant in mutants}
    assert not {'"f"', '"""A module."""', "x - 1"} & changed and "'f'" not in changed
    assert {mutant.names for mutant in mutants if mutant.old == "3"} == {("LIMIT",)}


def test_a_sample_is_spread_evenly_over_functions_and_stays_the_same():
    from lab.mutation.operators import mutants_of
    from lab.mutation.sampling import sample

    mutants = [m for name in "abcd" for m in mutants_of(f"{name}.py", SOURCE)]
    picked = sample(mutants, 16, seed=5)
    counts = Counter((mutant.path, mutant.function) for mutant in picked)
    assert len(counts) == 12 and set(counts.values()) <= {
        1,
        2,
    }  # f, Thing.set and the module's top, of four files
    assert picked == sample(mutants, 16, seed=5) != sample(mutants, 16, seed=6)
    assert len(set(picked)) == 16 and len(sample(mutants, 10**6, seed=0)) == len(mutants)


MODULE = """\
def negated(x):
    return -x


def unseen(x):
    return not x


def in_a_process():
    raise SystemExit(3)


def in_a_fork():
    raise SystemExit(4)


def unused(x):
    return x
"""
TESTS = f"""\
import os
import subprocess
import sys
from pathlib import Path

from mp_optim import core

sys.path.append({str(ROOT / "tests")!r})
from support.forked_ranks import end_forked


def test_one():
    assert core.negated(3) == -3
    core.unseen(1)


def test_other_process():
    run = [sys.executable, "-c", "from mp_optim import core; core.in_a_process()"]
    assert subprocess.run(run).returncode == 3


def fork(text):
    return end_forked(os.environ, Path.cwd(), ["-c", text], 60).returncode


def test_a_server_that_forks():
    assert fork("pass") == 0


def test_another_process_that_it_forks():
    assert fork("from mp_optim import core; core.in_a_fork()") == 4
"""


@pytest.mark.slow
def test_faults_are_noticed_or_survive(tmp_path):
    """A package in which it is known what no test sees; one fault is in what another process
    runs, and one in what a process runs that is forked from one of an earlier test."""
    root, out = tmp_path / "checkout", tmp_path / "out"
    files = {
        "mp_optim/__init__.py": "",
        "mp_optim/core/__init__.py": MODULE,
        "tests/unit/test_core.py": TESTS,
    }
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    subprocess.run(["git", "init", "-q", str(root)], check=True)
    run = [sys.executable, str(ROOT / "tests/lab"), "mutants"]
    subprocess.run(
        [*run, "cover", "--out", out, "--root", root, "--tests", "tests/unit"], check=True
    )
    attempt = [
        *run,
        "try",
        "--out",
        out,
        "--root",
        root,
        "--packages",
        "core",
        "--warm",
        "pytest",
        "--size",
    ]
    for size in ("4", "99"):  # the second goes on where the first ended
        subprocess.run([*attempt, size], check=True)
    results = [json.loads(line) for line in (out / "results.jsonl").read_text().splitlines()]
    assert (root / "mp_optim/core/__init__.py").read_text() == MODULE
    assert {(r["function"], r["operator"]): r["status"] for r in results} == {
        ("negated", "removed sign"): "killed",
        ("negated", "returned None"): "killed",
        ("unseen", "removed not"): "survived",
        ("unseen", "returned None"): "survived",
        ("in_a_process", "removed raise"): "killed",
        ("in_a_fork", "removed raise"): "killed",
        ("unused", "returned None"): "uncovered",
    }
    assert len(results) == 7
    report = subprocess.run(
        [*run, "report", "--out", out], check=True, capture_output=True, text=True
    ).stdout
    assert "| core | 7 | 4 | 0 | 2 | 1 | 57% |" in report
    assert "unseen: removed not: not x -> (x)" in report and "negated" not in report
