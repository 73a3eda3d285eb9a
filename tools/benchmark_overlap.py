#!/usr/bin/env python
"""Measure what the offload modes hide under backward: sync, overlap and speculative in one process,
in turn.

python tools/benchmark_overlap.py --params 30e6        # on an idle machine

Backward is simulated: autograd nodes that wait (``--backward sleep``: an accelerator is busy, the
host is not) or compute on one core (``--backward busy``), then hand out gradients that were made
before. The bus is simulated too.
"""

from __future__ import annotations

import gc
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
import tyro
from measuring.kernels import require_kernels
from rich.console import Console

from benchmarks import overlap, report
from mp_optim.kernels.native_library import set_host_threads


@dataclass
class Options:
    """What to measure."""

    params: float = 30e6
    """Elements of the model, all stepped on the host."""
    tensors: int = 24
    rounds: int = 9
    backward: Literal["sleep", "busy"] = "sleep"
    lengths: tuple[float, ...] = (1.0, 1.5, 2.0, 4.0)
    """Lengths of backward, in steps of ``sync``."""
    bus: tuple[float, ...] = (0.0, 25.0)
    """GB/s in each direction; 0 for copies that cost what they cost here."""
    threads: int = 0
    """Threads of torch; 0 leaves them as they are."""
    output: Path | None = None
    """Folder for overlap.json, overlap.md and overlap.png; none are written without it."""


def main(options: Options) -> None:
    require_kernels()
    console = Console()
    if options.threads:
        torch.set_num_threads(options.threads)
        set_host_threads(options.threads)
    found = []
    for rate in options.bus:
        for clip in ("off", "on, not firing", "always firing"):
            setting = overlap.Setting(
                int(options.params), options.tensors, options.backward, rate, clip
            )
            if clip == "off" or rate == options.bus[0]:
                found.append(overlap.measure(setting, options.lengths, options.rounds))
                report.show(console, found[-1])
                gc.collect()
    if options.output is not None:
        overlap.write(options.output, found)
        console.print(f"written to {options.output}")


if __name__ == "__main__":
    main(tyro.cli(Options, description=__doc__))
