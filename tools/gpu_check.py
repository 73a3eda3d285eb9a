#!/usr/bin/env python
"""Show on a machine with a GPU what only a GPU can show, in parts of at most eight minutes.

python tools/gpu_check.py --output docs/benchmarks          # every part that is not there yet
python tools/gpu_check.py --first-hour --output hour        # what an hour shows, and predictions
python tools/gpu_check.py --only kernels hybrid             # parts
python tools/gpu_check.py --output docs/benchmarks --minutes 9    # what fits; goes on later
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

from lab.gpu import facts, hour
from lab.gpu.parts import LIMIT, PARTS, Results, Sizes, run_apart


@dataclass
class Options:
    """What to check, on what, and how large."""

    only: tuple[str, ...] = ()
    """Parts; all if empty. --list shows them."""
    first_hour: bool = False
    """The parts that are worth most, in that order, each with its share of an hour; and at the end
    what became of each prediction."""
    list: bool = False
    """Show the parts, and which have a result."""
    device: str = "cuda"
    """`cpu` tries the tool itself, `simulated` with an accelerator; their times say nothing."""
    params: float = 1e9
    """Elements of the model that kernels and steps are timed on."""
    hybrid_params: float = 2e8
    """Elements of the model that is stepped partly on the host."""
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
        for name in options.only or (hour.ORDER if options.first_hour else PARTS)
        if options.again or not results.is_done(name, machine)
    ]
    if options.list:
        _show_parts(console, names)
        return
    sizes = Sizes(options.device, int(options.params), int(options.hybrid_params), options.rounds)
    end = time.monotonic() + 60.0 * options.minutes if options.minutes else None
    for number, name in enumerate(names):
        limit = float(hour.ORDER[name] if options.first_hour and name in hour.ORDER else LIMIT)
        if end is not None:
            limit = min(limit, end - time.monotonic())
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
    if options.first_hour:
        _show_verdicts(console, hour.verdicts(results.outcomes, machine["device"], sizes.params))


def _show_verdicts(console: Console, found: list[hour.Verdict]) -> None:
    table = Table("part", "what", "predicted", "refuted by", "measured", "")
    for each in found:
        one, measured = each.prediction, "" if each.measured is None else f"{each.measured:.4g}"
        limit = "any other" if one.relation == "equal" else f"{one.refuted_by:.4g}"
        what = f"{one.row}: {one.column}"
        table.add_row(one.part, what, f"{one.value:.4g}", limit, measured, each.said)
    console.print(table)


def _show_parts(console: Console, to_run: list[str]) -> None:
    table = Table("part", "what it shows", "result")
    for name, part in PARTS.items():
        table.add_row(name, part.about, "" if name in to_run else "there")
    console.print(table)


if __name__ == "__main__":
    main(tyro.cli(Options, description=__doc__))
