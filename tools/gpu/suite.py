"""The tests that need a device, and the conformance suite over every backend that is there."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import torch
from benchmarks.sections import Section

ROOT = Path(__file__).parents[2]
LIMIT = 150
"""Seconds for one of the suites below on a GPU. What takes long there is compiling, which several
processes share."""
SUITES = {
    "marked gpu": ["-m", "gpu", "tests"],
    "conformance": ["tests/unit/update/test_conformance.py"],
    "Triton kernels": ["tests/unit/update/test_triton.py"],
}


def run(device: torch.device) -> Section:
    """Numbers of tests by outcome."""
    section = Section(f"Tests on {device}")
    for name, arguments in SUITES.items():
        command = [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "-p",
            "no:cacheprovider",
            *arguments,
        ]
        try:
            done = subprocess.run(
                [*command, *_workers()],
                cwd=ROOT,
                capture_output=True,
                text=True,
                check=False,
                timeout=LIMIT if device.type == "cuda" else None,
            )
        except subprocess.TimeoutExpired:
            section.rows[name] = {"failed": 1.0}
            section.missing[name] = f"took more than {LIMIT} s"
            continue
        summary = done.stdout.strip().splitlines()[-1:] or [done.stderr[-200:]]
        counted = re.findall(r"(\d+) (passed|failed|skipped|error)", summary[0])
        counts = {outcome: float(count) for count, outcome in counted}
        section.rows[name] = counts or {"failed": 1.0}
        for line in done.stdout.splitlines():
            if line.startswith(("FAILED", "ERROR")):
                section.missing[line[:150]] = "failed"
    return section


def _workers() -> list[str]:
    """Arguments that spread tests over processes, if that plugin is installed."""
    if importlib.util.find_spec("xdist") is None:
        return []
    return ["-n", str(min(8, max(1, (os.cpu_count() or 1) // 2)))]
