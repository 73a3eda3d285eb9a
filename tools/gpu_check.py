#!/usr/bin/env python
"""Show on a machine with a GPU what only a GPU can show, in parts of at most eight minutes.

python tools/gpu_check.py                          # every part without a result in build/gpu
python tools/gpu_check.py --only kernels places    # parts
python tools/gpu_check.py --minutes 9              # parts that fit; the same command continues
"""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path

import tyro
from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

from benchmarks.report import show
from benchmarks.section import Section
from end_to_end import runner
from lab.gpu.parts import LIMIT, PARTS, is_done, rows, write


@dataclass
class Options:
    """What to check, on what, and how large."""

    only: tuple[str, ...] = ()
    """Parts; all if empty. --list shows them."""
    list: bool = False
    """Show the parts, and which have a result."""
    device: str = "cuda"
    """`cpu` tries the tool itself, `simulated` with an accelerator; their times say nothing."""
    params: float = 1e9
    """Elements of the model that kernels and steps are timed on."""
    hybrid_params: float = 2e8
    """Elements of the model whose state is in host memory or saved."""
    rounds: int = 11
    output: Path = Path("build/gpu")
    """Folder for gpu/PART.json, gpu.json and gpu.md. Parts with a result for this machine, these
    versions and these sizes there are left out."""
    again: bool = False
    """Run parts that have a result too."""
    minutes: float = 0.0
    """Begin no part that may end later than this; 0 for no limit."""


def main(options: Options) -> None:
    console = Console()
    if unknown := set(options.only) - PARTS.keys():
        raise SystemExit(f"--only {' '.join(sorted(unknown))}: choose from {', '.join(PARTS)}")
    try:
        machine = runner.machine(options.device)
    except (AssertionError, RuntimeError) as error:
        raise SystemExit(
            f"--device {options.device}: {error}; --device cpu tries the tool itself"
        ) from error
    results = runner.Results(options.output, "gpu")
    sizes = {"params": int(options.params), "hybrid_params": int(options.hybrid_params)}
    every = rows({**sizes, "rounds": options.rounds})
    left = [
        row
        for row in every
        if row.name in (options.only or PARTS)
        and (options.again or not is_done(results, row, machine))
    ]
    if options.list:
        table = Table("part", "what it shows", "result")
        for name, (about, _) in PARTS.items():
            is_left = any(row.name == name for row in left)
            table.add_row(name, about, "" if is_left else "there")
        console.print(table)
        return
    end = time.monotonic() + 60.0 * options.minutes if options.minutes else float("inf")
    for number, row in enumerate(left):
        limit = min(float(LIMIT), end - time.monotonic())
        if limit < 60:
            console.print(f"not begun: {', '.join(each.name for each in left[number:])}")
            break
        record = runner.run(results, "", replace(row, seconds=limit), options.device)
        write(results, every)
        if record["columns"] is None:
            console.print(f"[red]{row.name}[/red] failed: {record['cause']}")
        else:
            show(console, Section(**record["columns"]))
            console.print(f"{row.name}: {record['took']} s")


if __name__ == "__main__":
    main(tyro.cli(Options, description=__doc__))
