#!/usr/bin/env python
"""Draw one step of an offloaded optimizer: what each thread does, during backward and in step().

python tools/trace_step.py --mode speculative --output runs/trace

Writes trace.png (the stages of backward and step, thread by thread) and trace.json (a Chrome trace
of all torch operations with the stages of every thread in it: open it in Perfetto or
chrome://tracing).
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import torch
import tyro
from rich.console import Console

from benchmarks import overlap
from mp_optim import HybridDeviceOptimizer
from mp_optim.placement.timeline import Span

_COLORS = {
    "wait_copies": "#fdae6b",
    "host_measure": "#9ecae1",
    "host_step": "#08519c",
    "publish": "#74c476",
    "wait_worker": "#d9d9d9",
    "backward": "#eeeeee",
    "step": "#fee0d2",
}


@dataclass
class Options:
    """What to trace."""

    mode: Literal["sync", "overlap", "speculative"] = "speculative"
    params: float = 10e6
    """Elements of the model, all stepped on the host."""
    tensors: int = 16
    backward_ms: float = 200.0
    """How long the simulated backward takes."""
    bus: float = 25.0
    """GB/s in each direction; 0 for copies that cost what they cost here."""
    output: Path = Path("runs/trace")


def main(options: Options) -> None:
    console = Console()
    setting = overlap.Setting(
        int(options.params), options.tensors, "sleep", options.bus, "on, not firing"
    )
    run = overlap.build(setting, options.mode)
    for _ in range(4):
        run.once(options.backward_ms / 1e3)
    options.output.mkdir(parents=True, exist_ok=True)
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU]
    ) as profile:
        zero, now = time.time(), time.perf_counter()
        run.once(options.backward_ms / 1e3)
        ended = time.perf_counter()
    hybrid = run.optimizer.chained_optimizers[0].inner
    assert isinstance(hybrid, HybridDeviceOptimizer)
    began = hybrid.timeline.began
    spans = [
        Span("backward", "MainThread", now, began, ""),
        Span("step", "MainThread", began, ended, ""),
        *hybrid.timeline.last,
    ]
    draw(spans, now, options.output / "trace.png", f"{options.mode}: {setting.title}")
    profile.export_chrome_trace(str(options.output / "trace.json"))
    merge(options.output / "trace.json", spans, zero - now)
    console.print(
        f"step() {1e3 * (ended - began):.1f} ms of {1e3 * (ended - now):.1f} ms; "
        f"{options.output}/trace.png, "
        "trace.json"
    )


def draw(spans: Sequence[Span], zero: float, path: Path, title: str) -> None:
    """One lane for each thread; backward and step are wide bars behind what the main thread does in
    them."""
    lanes = list(dict.fromkeys(span.thread for span in spans))
    figure, axes = plt.subplots(figsize=(11, 1.2 + 0.9 * len(lanes)), dpi=150)
    for span in spans:
        is_phase = span.stage in ("backward", "step")
        axes.barh(
            lanes.index(span.thread),
            1e3 * (span.end - span.start),
            left=1e3 * (span.start - zero),
            height=0.85 if is_phase else 0.5,
            color=_COLORS.get(span.stage, "#969696"),
            edgecolor="white",
            linewidth=0.3,
            zorder=1 if is_phase else 2,
        )
    axes.set_yticks(range(len(lanes)), lanes)
    axes.invert_yaxis()
    stages = [stage for stage in _COLORS if any(span.stage == stage for span in spans)]
    axes.legend(
        [plt.Rectangle((0, 0), 1, 1, color=_COLORS[stage]) for stage in stages],
        stages,
        ncols=len(stages),
        fontsize=7,
        loc="upper center",
        bbox_to_anchor=(0.5, -0.25),
        frameon=False,
    )
    axes.set_title(title, loc="left", fontsize=9)
    axes.set_xlabel("milliseconds since backward began")
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, bbox_inches="tight")
    plt.close(figure)


def merge(path: Path, spans: Sequence[Span], offset: float) -> None:
    """Add the stages of all threads to a trace: torch's profiler shows those of the threads it
    watches."""
    trace = json.loads(path.read_text(encoding="utf-8"))
    base = float(trace.get("baseTimeNanoseconds", 0)) / 1e9
    trace["traceEvents"] += [
        {
            "ph": "X",
            "cat": "mp_optim",
            "name": f"{span.stage} {span.label}".strip(),
            "pid": "mp_optim",
            "tid": span.thread,
            "ts": 1e6 * (span.start + offset - base),
            "dur": 1e6 * (span.end - span.start),
        }
        for span in spans
    ]
    path.write_text(json.dumps(trace), encoding="utf-8")


if __name__ == "__main__":
    main(tyro.cli(Options, description=__doc__))
