"""The tests that need a device, and the conformance suite over every backend that is there."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from functools import partial

import torch

from benchmarks.section import Section
from lab.gpu.parts import LIMIT, Sizes
from support.accelerator.simulation import KIND
from support.launch import ROOT

TRITON = "tests/unit/kernels/test_triton.py"
THIRDS = 3
"""Parts of the Triton tests: on a GPU each variant of a kernel is compiled first."""


def marked(sizes: Sizes) -> Section:
    """All tests that need a GPU, but those of the Triton kernels."""
    return _run("marked gpu", ["-m", "gpu", "tests", f"--ignore={TRITON}"], sizes)


def conformance(sizes: Sizes) -> Section:
    """Every backend against the reference."""
    return _run("conformance", ["tests/unit/kernels/test_conformance.py"], sizes)


def _triton(third: int, sizes: Sizes) -> Section:
    tests = _collect(TRITON)
    mine = tests[third - 1 :: THIRDS]
    return _run(f"Triton kernels, {len(mine)} of {len(tests)}", mine, sizes)


triton_1, triton_2, triton_3 = (partial(_triton, third) for third in (1, 2, 3))


def _collect(file: str) -> list[str]:
    done = _pytest(["--collect-only", file], 120)
    return [line for line in done.stdout.splitlines() if line.startswith(file)]


def _pytest(arguments: Sequence[str], limit: float) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    return subprocess.run(
        [*command, *arguments], cwd=ROOT, capture_output=True, text=True, check=False, timeout=limit
    )


def _run(name: str, arguments: Sequence[str], sizes: Sizes) -> Section:
    """Numbers of tests by outcome; each that failed with the line that says why. Without a GPU they
    are collected."""
    section = Section(f"Tests: {name}")
    if torch.device(sizes.device).type == KIND:
        found = _pytest(["--collect-only", *arguments], LIMIT - 20).stdout.split("\n\n")[0]
        section.rows[name] = {"collected": float(len(found.splitlines()))}
        return section
    done = _pytest([*arguments, "-rfE", *_workers()], LIMIT - 20)
    summary = done.stdout.strip().splitlines()[-1:] or [done.stderr[-200:]]
    counted = re.findall(r"(\d+) (passed|failed|skipped|error)", summary[0])
    section.rows[name] = {outcome: float(count) for count, outcome in counted}
    if not counted:
        section.rows[name] = {"failed": 1.0}
        section.missing[name] = summary[0][:200]
    for line in done.stdout.splitlines():
        failed = re.match(r"(?:FAILED|ERROR) (\S+)(?: - (.*))?", line)
        if failed:
            section.missing[failed[1]] = (failed[2] or "failed")[:200]
    return section


def _workers() -> list[str]:
    """Arguments that spread tests over processes, if that plugin is installed."""
    if importlib.util.find_spec("xdist") is None:
        return []
    return ["-n", str(min(8, max(1, (os.cpu_count() or 1) // 2)))]
