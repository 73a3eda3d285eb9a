#!/usr/bin/env python
"""Measure the host kernels and the full step in turn with other libraries, in one process.

python tools/benchmark_host.py --params 50e6        # on an idle machine
"""

from __future__ import annotations

import gc
from dataclasses import dataclass
from pathlib import Path

import torch
import tyro
from measuring.kernels import require_kernels
from rich.console import Console

from benchmarks import allocator, probe, report, sections


@dataclass
class Options:
    """What to measure."""

    params: float = 100e6
    """Elements of the model."""
    rounds: int = 15
    only: tuple[str, ...] = ()
    """Of update, full, compact, eight_bit, many, threads; all if empty."""
    output: Path | None = None
    """Folder for host.json, host.md and host.png; none are written without it."""


def main(options: Options) -> None:
    require_kernels()
    console = Console()
    allocator.keep_freed()
    numel = int(options.params)
    most = torch.get_num_threads()
    memory, limit = probe.memory_limit(numel, options.rounds)
    report.show(console, memory)
    regime = f"{limit.rate / 1e9 / most:.0f} GB/s a thread"
    found = [memory]
    measures = {
        "update": lambda: sections.update_kernels(numel, options.rounds, limit),
        "full": lambda: sections.full_step(numel, options.rounds, limit),
        "compact": lambda: sections.compact_states(numel, options.rounds),
        "eight_bit": lambda: sections.eight_bit(numel, options.rounds),
        "many": lambda: sections.many_tensors(numel, options.rounds),
        "threads": lambda: sections.thread_scaling(numel, options.rounds, most),
    }
    for name, measure in measures.items():
        if not options.only or name in options.only:
            found.append(measure())
            report.show(console, found[-1])
            gc.collect()
            allocator.release()
    if options.output is not None:
        report.write(options.output, found, limit.rate, regime)
        console.print(f"written to {options.output}")


if __name__ == "__main__":
    main(tyro.cli(Options, description=__doc__))
