#!/usr/bin/env python
"""What a step, a build and a state dict pass of the package, for each checkout: files, functions,
calls, and how deep its functions are nested. And what a step of tiny parameters takes.

python tools/profile_step.py . ../before
python tools/measuring/passes.py step --list     # the calls themselves, in their order

Each walk is in a process of its own, on the CPU. Times are of steps in turn with torch's fused
AdamW: believe the ratio, and that only on an idle machine.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Annotated, Any

import tyro
from rich.console import Console
from rich.table import Table

WALKS = ("step", "overlap", "build", "state")
SCRIPT = Path(__file__).with_name("measuring") / "passes.py"


def walked(root: Path, name: str) -> dict[str, Any]:
    environment = {**os.environ, "PYTHONPATH": str(root.resolve()), "OMP_NUM_THREADS": "1"}
    run = [sys.executable, str(SCRIPT), name]
    done = subprocess.run(run, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def rows_of(root: Path) -> dict[str, str]:
    rows = {}
    for name in WALKS:
        for title, figures in walked(root, name).items():
            rows[title] = " / ".join(str(count) for count in figures.values())
    found = walked(root, "times")
    rows["step of 8 tiny parameters"] = (
        f"{found['ours']:.2f} ms, {found['ratio']:.1f} times torch's fused AdamW"
    )
    return rows


def main(roots: Annotated[tuple[Path, ...], tyro.conf.Positional] = (Path(),)) -> None:
    """Walk through checkouts.

    Args:
        roots: the checkouts, the newest first; by default the present folder.
    """
    columns = [rows_of(root) for root in roots]
    table = Table("files / functions / calls / deepest", *map(str, roots))
    for name in columns[0]:
        table.add_row(name, *(column.get(name, "") for column in columns))
    Console(width=None if sys.stdout.isatty() else 160).print(table)


if __name__ == "__main__":
    tyro.cli(main)
