"""Run a worker file in several gloo processes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent


def run_ranks(worker: str, size: int, *arguments: str, timeout: float = 240) -> None:
    """Run a worker with torchrun; fails with what it wrote to stderr if a rank fails."""
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        f"--nproc-per-node={size}",
        str(HERE / worker),
        *arguments,
    ]
    paths = [str(HERE), str(HERE.parent / "stack"), str(HERE.parents[2])]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": ":".join(paths)}
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=timeout, check=False
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-8000:]
