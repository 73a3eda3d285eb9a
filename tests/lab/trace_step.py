"""Draw one step of an offloaded optimizer: what each thread does, during backward and in step().

$ python tests/lab trace --mode speculative --output runs/trace

Writes trace.png (the stages of backward and step, thread by thread) and trace.json (a Chrome trace
of all torch operations with the stages of every thread in it: open it in Perfetto or
chrome://tracing). The model is simulated: its backward waits.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch

from benchmarks.simulated_backward import Model, Setting, build, hybrid_of
from mp_optim.offload.timeline import Span

_COLORS = {
    "wait_copies": "#fdae6b",
    "host_measure": "#9ecae1",
    "host_step": "#08519c",
    "publish": "#74c476",
    "wait_worker": "#d9d9d9",
    "backward": "#eeeeee",
    "step": "#fee0d2",
}
_VISIBLE = 1e-4
"""Seconds; shorter stages are too narrow for the picture, and not in its legend."""


@dataclass
class Options:
    """What to trace."""

    mode: Literal["sync", "overlap", "speculative"] = "speculative"
    """offload_mode of the config."""
    params: float = 10e6
    """Elements of the model, all stepped on the host."""
    tensors: int = 16
    """Parameters that the elements are in."""
    backward_ms: float = 200.0
    """Milliseconds that the simulated backward takes."""
    bus: float = 25.0
    """GB/s in each direction; 0 for copies that cost what they cost here."""
    output: Path = Path("runs/trace")
    """Folder for trace.png and trace.json."""

    def __post_init__(self) -> None:
        if not 1 <= self.tensors <= self.params:
            raise ValueError(
                f"--tensors {self.tensors} --params {self.params:g}: there must be at least one "
                "tensor, and one element in each"
            )


@dataclass(frozen=True)
class Trace:
    """One backward pass and step.

    Attributes:
        spans: stages of all threads. zero, ended: when backward began and the step was done, in
            seconds of ``time.perf_counter``. step: seconds of ``step()``.
        clock: what to add to ``time.perf_counter`` for seconds since 1970.
        hidden: how much of the host's work was done during backward, from 0 to 1.
    """

    spans: Sequence[Span]
    zero: float
    ended: float
    step: float
    clock: float
    hidden: float


def main(options: Options) -> int:
    """Trace a step, write and print what it was; returns the exit status."""
    setting = Setting(int(options.params), options.tensors, "sleep", options.bus, "on, not firing")
    options.output.mkdir(parents=True, exist_ok=True)
    picture, events = options.output / "trace.png", options.output / "trace.json"
    trace = _traced(setting, options, events)
    draw(trace.spans, trace.zero, picture, f"{options.mode}: {setting.title}")
    merge(events, trace.spans, trace.clock)
    print(
        f"step() {1e3 * trace.step:.1f} ms of {1e3 * (trace.ended - trace.zero):.1f} ms, "
        f"{trace.hidden:.0%} of the host's work hidden under backward; {picture}, {events}"
    )
    if options.mode != "sync" and not trace.hidden:
        print("nothing is hidden: so few parameters travel together; try more --params")
    return 0


def _traced(setting: Setting, options: Options, events: Path) -> Trace:
    """The fifth step of a model; the torch operations in it are written as a Chrome trace."""
    model, optimizer = build(setting, options.mode)
    model.seconds = options.backward_ms / 1e3
    for _ in range(4):
        _backward(model, optimizer)
        optimizer.step()
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities) as profile:
        clock = time.time() - time.perf_counter()
        zero = _backward(model, optimizer)
        optimizer.step()
        ended = time.perf_counter()
    profile.export_chrome_trace(str(events))
    timeline, metrics = hybrid_of(optimizer).timeline, optimizer.metrics()
    began = timeline.began
    spans = [
        Span("backward", "MainThread", zero, began, ""),
        Span("step", "MainThread", began, ended, ""),
        *timeline.last,
    ]
    hidden = metrics["hidden_ms"] / max(metrics["host_ms"], 1e-9)
    return Trace(spans, zero, ended, ended - began, clock, hidden)


def _backward(model: Model, optimizer: torch.optim.Optimizer) -> float:
    """Forward and backward; returns when backward began, in seconds of ``time.perf_counter``."""
    optimizer.zero_grad()
    loss = model()
    began = time.perf_counter()
    loss.backward()
    return began


def draw(spans: Sequence[Span], zero: float, path: Path, title: str) -> None:
    """One lane for each thread; backward and step are wide bars behind what the main thread does in
    them."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    from matplotlib.patches import Patch

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
    shown = {span.stage for span in spans if span.end - span.start > _VISIBLE}
    stages = [stage for stage in _COLORS if stage in shown]
    axes.legend(
        handles=[Patch(color=_COLORS[stage], label=stage) for stage in stages],
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


def merge(path: Path, spans: Sequence[Span], clock: float) -> None:
    """Add the stages of all threads to a Chrome trace: torch's profiler shows those of the threads
    that it watches.

    Args:
        clock: what to add to ``time.perf_counter`` for seconds since 1970.
    """
    trace = json.loads(path.read_text(encoding="utf-8"))
    base = float(trace.get("baseTimeNanoseconds", 0)) / 1e9
    trace["traceEvents"] += [
        {
            "ph": "X",
            "cat": "mp_optim",
            "name": f"{span.stage} {span.label}".strip(),
            "pid": "mp_optim",
            "tid": span.thread,
            "ts": 1e6 * (span.start + clock - base),
            "dur": 1e6 * (span.end - span.start),
        }
        for span in spans
    ]
    path.write_text(json.dumps(trace), encoding="utf-8")
