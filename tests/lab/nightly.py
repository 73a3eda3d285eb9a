"""Let every machine work for a night, one after the other, and say what each found.

$ python tests/lab nightly
$ python tests/lab nightly --only programs layouts --seed 20261124

What a machine prints is in a file of its own. The exit status is 1 if one failed; a fault that
survives the tests is listed and fails nothing.
"""

from __future__ import annotations

import subprocess
import sys
import time
from dataclasses import dataclass
from datetime import date
from pathlib import Path

from support.launch import ROOT, environment

KILL_TESTS = ("tests/unit/checkpoint/test_kill.py", "tests/functional/test_kill_and_resume.py")
OLDEST_TRITON = ("tests/unit/kernels/test_triton.py", "-k", "oldest_supported")
ON_ACCELERATOR = [
    f"tests/unit/{name}" for name in ("offload", "checkpoint", "kernels", "rules", "muon")
]
COVERAGE = ("--cov=mp_optim", "--cov-report=term", "--cov-fail-under=90")
"""Of all tests that `tools/test.sh` runs: measured, they take half as long again."""


@dataclass
class Options:
    """Machines and sizes."""

    only: tuple[str, ...] = ()
    """Machines; all if empty."""
    programs: int = 1000
    """Random programs."""
    layouts: int = 400
    """Random layouts."""
    mutants: int = 10
    """Faults in each part of the package."""
    seed: int | None = None
    """Of programs, layouts and faults; by default the date, so that no night repeats another."""
    output: Path = ROOT / "runs" / "nightly"
    """Folder for what the machines print, and for coverage."""


def machines(options: Options) -> dict[str, list[list[str]]]:
    lab, pytest = [str(ROOT / "tests" / "lab")], ["-m", "pytest", "-q"]
    seed = options.seed if options.seed is not None else int(f"{date.today():%Y%m%d}")
    return {
        "programs": [[*lab, "programs", "--programs", str(options.programs), "--seed", str(seed)]],
        "layouts": [[*lab, "layouts", "--layouts", str(options.layouts), "--seed", str(seed)]],
        "tenants": [[*lab, "tenants", "--seed", str(seed)]],
        "levels": [[*lab, "levels"]],
        "coverage": [[*pytest, "-n", "auto", "-m", "not slow", *COVERAGE]],
        "slow": [[*pytest, "-m", "slow"]],
        "tritons": [["-m", "support.tritons", "--fetch"], [*pytest, *OLDEST_TRITON]],
        "accelerator": [[*pytest, "-n", "auto", "-p", "support.on_accelerator", *ON_ACCELERATOR]],
        "kill": [[*pytest, *KILL_TESTS]],
        "mutants": [
            [
                *(*lab, "mutants", "--out", str(options.output / f"mutants-{seed}")),
                *("--size", str(options.mutants), "--seed", str(seed)),
            ]
        ],
    }


def run(name: str, commands: list[list[str]], output: Path) -> bool:
    """Whether all commands of a machine succeeded."""
    log, began = output / f"{name}.log", time.monotonic()
    is_good = True
    with log.open("w") as file:
        for arguments in commands:
            if not is_good:
                break
            command = [sys.executable, *arguments]
            done = subprocess.run(command, cwd=ROOT, env=environment(), stdout=file, stderr=file)
            is_good = done.returncode == 0
    minutes = (time.monotonic() - began) / 60
    print(f"{name}: {'good' if is_good else 'FAILED'}, {minutes:.1f} minutes, {log}", flush=True)
    return is_good


def main(options: Options) -> int:
    """Returns the exit status: 1 if a machine failed."""
    chosen = machines(options)
    if unknown := set(options.only) - chosen.keys():
        print(f"--only {' '.join(sorted(unknown))}: choose from {', '.join(chosen)}")
        return 2
    options.output.mkdir(parents=True, exist_ok=True)
    results = [
        run(name, commands, options.output)
        for name, commands in chosen.items()
        if not options.only or name in options.only
    ]
    return int(not all(results))
