"""Start the processes of tests with their import paths."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

from support.forked_ranks import end_forked, run_forked

ROOT = Path(__file__).resolve().parents[2]
"""Root folder of the checkout."""
TOOLS = ROOT / "tools"
PATH = os.pathsep.join(map(str, (ROOT, ROOT / "tests", TOOLS)))


def environment(**variables: str) -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": PATH, **variables}


def start(*command: str, **options: Any) -> subprocess.Popen[str]:
    command = (sys.executable, *command)
    return subprocess.Popen(command, env=environment(), cwd=ROOT, text=True, **options)


def run(*command: str, timeout: float = 240, **variables: str) -> str:
    done = subprocess.run(
        [sys.executable, *command],
        env=environment(**variables),
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-20000:]
    return done.stdout


def run_forked_program(*command: str, timeout: float = 240, **variables: str) -> str:
    return run_forked(environment(**variables), ROOT, command, None, timeout)


def end_forked_program(*command: str, timeout: float = 240) -> subprocess.CompletedProcess[str]:
    return end_forked(environment(), ROOT, command, timeout)


def torchrun(size: int, *command: str, timeout: float = 240) -> str:
    launcher = ("-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={size}")
    return run_forked_program(*launcher, *command, timeout=timeout)


def run_ranks(worker: str, size: int, *arguments: str, timeout: float = 240) -> None:
    """Run a module of ``support.workers`` in several gloo processes, as ``torchrun`` would."""
    run_program_of_ranks(size, "-m", f"support.workers.{worker}", *arguments, timeout=timeout)


def run_program_of_ranks(size: int, *command: str, timeout: float = 240) -> str:
    return run_forked(environment(), ROOT, command, size, timeout)


def results_of_ranks(
    worker: str, size: int, folder: Path, *arguments: str, timeout: float = 240
) -> list[Any]:
    """Run a worker that saves ``rank0.pt``, ``rank1.pt``, ... in a folder; return their values."""
    run_ranks(worker, size, str(folder), *arguments, timeout=timeout)
    return [torch.load(folder / f"rank{rank}.pt", weights_only=True) for rank in range(size)]
