#!/usr/bin/env python
"""Train one job with every optimizer: tokens a second, peak memory, and the loss.

python tools/benchmark_training.py --output runs                           # everything, D first
python tools/benchmark_training.py --part D A --output runs --minutes 9    # resumes when repeated
python tools/benchmark_training.py --miniature --output try                # every row on a CPU

Each row is a process of its own with a time limit. Its record and its log are in
OUTPUT/training/PART, all of them in OUTPUT/training.json, training.md and training.png. A row that
has a record is not run again; one whose package was not installed is.

To add a part: write ``end_to_end/part_x.py`` with a ``PART`` (``end_to_end.rows.Part``: title,
rows, columns, minutes) and name it in ``end_to_end.report.PARTS``. A row names a function,
``module:function`` below ``end_to_end``, that takes ``device`` and the row's arguments (JSON) by
keyword and returns its columns (JSON); ``job:train`` is the training job. The function raises
``NotInstalledError`` for a missing package; any other exception, running out of memory, a signal or
the time limit make a row with that reason. Return few small rows for ``sizes.miniature``: all parts
together must take less than a minute on a CPU.
"""

from __future__ import annotations

import sys
import time
import warnings
from contextlib import suppress
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path

import tyro
from measuring.kernels import require_kernels
from rich.console import Console

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

from end_to_end import report, runner
from end_to_end.report import PARTS
from end_to_end.rows import Sizes


@dataclass
class Options:
    """What to run, and where."""

    part: tuple[str, ...] = ()
    """Parts, in this order; all of them if empty, in the order of their worth."""
    output: Path = Path("benchmark")
    """Folder of the records."""
    device: str = "cuda"
    """`cpu`, or `simulated` for a simulated accelerator; their times say nothing."""
    miniature: bool = False
    """Try every row with 2 M parameters and 20 steps on a CPU (fewer on a simulated
    accelerator), and measure nothing."""
    only: str = ""
    """Rows whose name contains this."""
    retry: bool = False
    """Also run rows again that ended without a result."""
    patience: float = 1.0
    """Factor of every row's time limit, for what compiles at its first use."""
    minutes: float = 0.0
    """Begin no row that may end later than this; 0 for no limit."""
    report: bool = False
    """Run nothing: write the report of the records that are there."""


def main(options: Options) -> None:
    if unknown := set(options.part) - PARTS.keys():
        raise SystemExit(f"--part {' '.join(sorted(unknown))}: choose from {', '.join(PARTS)}")
    if not (options.miniature or options.report):
        require_kernels()
    size = ("atom", 2) if options.device == "simulated" else ("tiny", 19)
    sizes, results = Sizes(options.miniature, *size), runner.Results(options.output)
    if not options.report:
        _run(options, sizes, results)
    report.write(results, sizes)


def _run(options: Options, sizes: Sizes, results: runner.Results) -> None:
    console, begun = Console(), time.monotonic()
    device = "cpu" if options.miniature and options.device == "cuda" else options.device
    left = [
        (name, row)
        for name in dict.fromkeys(("card", *(options.part or PARTS)))
        for row in PARTS[name].rows(sizes)
        if options.only in row.name and not results.is_finished(name, row, options.retry)
    ]
    if left and options.miniature:  # imported once, not in the process of each row
        with suppress(ImportError), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            import_module("megatron.core.optimizer")
    for number, (name, row) in enumerate(left):
        seconds = 60 * options.minutes - (time.monotonic() - begun)
        if options.minutes and seconds < options.patience * row.seconds:
            names = ", ".join(f"{part}: {each.name}" for part, each in left[number:])
            console.print(f"not begun: {names}")
            return
        record = runner.run(results, name, row, device, options.patience)
        said = record["cause"] or ", ".join(
            f"{key} {value:.4g}"
            for key, value in record["columns"].items()
            if isinstance(value, float | int)
        )
        console.print(f"{name}: {row.name}: {said} ({record['took']} s)", soft_wrap=True)


if __name__ == "__main__":
    main(tyro.cli(Options, description=__doc__))
