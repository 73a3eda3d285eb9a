#!/usr/bin/env python
"""Show on a machine with a GPU what only a GPU can show, in less than nine minutes.

python tools/gpu_check.py --output docs/benchmarks          # everything, on an idle GPU
python tools/gpu_check.py --only kernels hybrid             # parts
"""

from __future__ import annotations

import gc
import json
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import tyro
from benchmarks.report import show
from gpu import agreement, facts, hybrid, speed, suite, waiting
from gpu.report import markdown
from rich.console import Console


@dataclass
class Options:
    """What to check, on what, and how large."""

    only: tuple[str, ...] = ()
    """Of tests, rates, kernels, steps, many, verdict, hybrid, syncs, bits; all if empty."""
    device: str = "cuda"
    """`cpu` tries the tool itself; its times say nothing."""
    params: float = 1e9
    """Elements of the model that kernels and steps are timed on."""
    hybrid_params: float = 2e8
    """Elements of the model that is stepped partly on the host."""
    rounds: int = 11
    output: Path | None = None
    """Folder for gpu.json and gpu.md."""


def main(options: Options) -> None:
    console = Console()
    device = torch.device(options.device)
    if device.type == "cuda" and not torch.cuda.is_available():
        raise SystemExit("torch finds no GPU here; --device cpu tries the tool itself")
    numel, rate = int(options.params), speed.Rate(device)
    parts = {
        "tests": lambda: suite.run(device),
        "rates": lambda: speed.rates(rate, options.rounds),
        "kernels": lambda: speed.kernels(rate, numel, options.rounds),
        "steps": lambda: speed.steps(rate, numel, options.rounds),
        "many": lambda: speed.many(rate, numel // 10, options.rounds),
        "verdict": lambda: waiting.verdicts(rate, numel // 10, options.rounds),
        "hybrid": lambda: hybrid.fractions(
            device, int(options.hybrid_params), options.rounds
        ),
        "syncs": lambda: waiting.synchronisations(device),
        "bits": lambda: agreement.bits(device),
    }
    if unknown := set(options.only) - parts.keys():
        raise SystemExit(
            f"--only {' '.join(sorted(unknown))}: choose from {', '.join(parts)}"
        )
    found: dict[str, Any] = {"machine": facts.machine(device)}
    for name, run in parts.items():
        if options.only and name not in options.only:
            continue
        started = time.perf_counter()
        section = run()
        show(console, section)
        found[name] = {
            **asdict(section),
            "seconds": round(time.perf_counter() - started, 1),
        }
        gc.collect()
        if (
            options.output is not None
        ):  # after every part, so that an interrupted run leaves what it has
            options.output.mkdir(parents=True, exist_ok=True)
            (options.output / "gpu.json").write_text(json.dumps(found, indent=1) + "\n")
            (options.output / "gpu.md").write_text(markdown(found))


if __name__ == "__main__":
    main(tyro.cli(Options, description=__doc__))
