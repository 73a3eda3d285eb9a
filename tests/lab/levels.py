"""Run the tests that step something, and choose neither level nor backend themselves, by each level
of the native kernels that this CPU has, and without them.

$ python tests/lab levels
$ python tests/lab levels off avx2
"""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass
from typing import Annotated

import tyro

from support.launch import ROOT, environment

TESTS = (
    "tests/functional/test_functional.py",
    "tests/unit/kernels",
    "tests/unit/rules",
    "tests/unit/muon",
    "tests/unit/mixed_precision/test_step.py",
    "tests/unit/stack/test_compact_states.py",
    "tests/unit/stack/test_contract.py",
    "tests/unit/stack/test_placement_invariance.py",
    "tests/unit/stack/test_upstream_defects.py",
)
BRANCHES = (
    "tests/unit/kernels/test_selection.py",
    "tests/unit/rules/test_audit.py",
    *("tests/unit/mixed_precision/test_step.py", "tests/unit/stack/test_contract.py"),
    "tests/unit/stack/test_placement_invariance.py",
)
"""Tests of code that branches where there is no native library. In all others ``reference``, which
the suite compares with the native kernels bit for bit, takes the same steps."""
CHOOSE_THEMSELVES = (*("native", "sanitizers", "triton", "conformance", "guards"), "muon_passes")
"""Tests of kernels and rules that a level of the process changes nothing for."""
NAME_BACKENDS = (
    *("cautious", "exact_sums", "kernel_fit", "large_gradients"),
    *("missing_kernels", "normuon", "self_test"),
)
"""Those that a missing level changes nothing for: what is not native's in them names another
backend, or none."""


@dataclass
class Options:
    """Which levels."""

    levels: Annotated[tuple[str, ...], tyro.conf.Positional] = ()
    """Those of `off`, `avx2`, `avx512` and `neon` that are to be run; one that this CPU
    does not have is left out. All if none is given."""
    branches: bool = False
    """Only the tests of code that branches where there is no native library."""
    processes: str = "auto"
    """Processes of pytest."""


def levels_here() -> tuple[str, ...]:
    from mp_optim.kernels.native_library import native_library

    return ("off", *native_library().levels)


def main(options: Options) -> int:
    """Returns the exit status: not 0 if a level failed."""
    failed = []
    for level in levels_here():
        if options.levels and level not in options.levels:
            continue
        print(f"== pytest, MP_OPTIM_NATIVE={level}", flush=True)
        command = [sys.executable, "-m", "pytest", "-q", "-n", options.processes, "-m", "not slow"]
        unchanged = CHOOSE_THEMSELVES + (NAME_BACKENDS if level == "off" else ())
        ignored = [f"--ignore-glob=tests/unit/*/test_{name}.py" for name in unchanged]
        variables = environment(MP_OPTIM_NATIVE=level)
        tests = BRANCHES if options.branches else TESTS
        if subprocess.run([*command, *tests, *ignored], cwd=ROOT, env=variables).returncode:
            failed.append(level)
    if failed:
        print(f"failed: {', '.join(failed)}")
    return int(bool(failed))
