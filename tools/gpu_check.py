#!/usr/bin/env python
"""Show on a machine with a GPU what only a GPU can show, in parts of at most eight minutes.

python tools/gpu_check.py --output build/gpu          # every part that is not there yet
python tools/gpu_check.py --only kernels hybrid             # parts
python tools/gpu_check.py --output build/gpu --minutes 9    # what fits; goes on later
"""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass
from pathlib import Path

import torch
import tyro
from rich.console import Console
from rich.table import Table

from benchmarks.report import show
from benchmarks.section import Section

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

from lab.gpu import facts
from lab.gpu.parts import LIMIT, PARTS, Results, Sizes, run_apart


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
    output: Path | None = None
    """Folder for gpu/PART.json, gpu.json and gpu.md. Parts with a result for this machine and these
    versions there are left out."""
    again: bool = False
    """Run parts that have a result too."""
    minutes: float = 0.0
    """Begin no part that may end later than this; 0 for no limit."""


def main(options: Options) -> None:
    console = Console()
    if unknown := set(options.only) - PARTS.keys():
        raise SystemExit(f"--only {' '.join(sorted(unknown))}: choose from {', '.join(PARTS)}")
    device = torch.device("cpu" if options.device == "simulated" else options.device)
    if device.type == "cuda" and not torch.cuda.is_available():
        raise SystemExit("torch finds no GPU here; --device cpu tries the tool itself")
    machine, results = facts.machine(device), Results(options.output)
    names = [
        name
        for name in options.only or PARTS
        if options.again or not results.is_done(name, machine)
    ]
    if options.list:
        _show_parts(console, names)
        return
    sizes = Sizes(options.device, int(options.params), int(options.hybrid_params), options.rounds)
    end = time.monotonic() + 60.0 * options.minutes if options.minutes else None
    for number, name in enumerate(names):
        limit = LIMIT if end is None else min(float(LIMIT), end - time.monotonic())
        if end is not None and limit < 60:
            console.print(f"not begun: {', '.join(names[number:])}")
            break
        outcome = run_apart(name, sizes, machine, limit)
        results.add(name, outcome)
        if outcome.section is None:
            console.print(f"[red]{name}[/red] failed: {outcome.cause}")
        else:
            show(console, Section(**outcome.section))
            console.print(f"{name}: {outcome.seconds} s")


def _show_parts(console: Console, to_run: list[str]) -> None:
    table = Table("part", "what it shows", "result")
    for name, (about, _) in PARTS.items():
        table.add_row(name, about, "" if name in to_run else "there")
    console.print(table)


if __name__ == "__main__":
    main(tyro.cli(Options, description=__doc__))
