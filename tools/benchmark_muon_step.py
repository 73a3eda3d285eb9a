#!/usr/bin/env python
"""Time a step of Muon over the matrices of a small dense model and of a mixture of experts, against
other implementations, in one process, in turn.

python tools/benchmark_muon_step.py --output docs/benchmarks        # on an idle machine
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

import torch
import tyro
from measuring.kernels import require_kernels
from torch import nn

from benchmarks import allocator
from benchmarks.timing import Timing, alternate, ratio
from mp_optim.kernels.native_library import NativeLibrary
from mp_optim.muon.muon import FusedMuon, seconds_of_products

KERNEL = "mp_newton_schulz"
PRODUCTS = {"aten::mm", "aten::bmm", "aten::addmm", "aten::baddbmm", KERNEL}
"""Operations of torch that multiply matrices, and the kernel that does."""


@dataclass
class Options:
    """What to measure."""

    layers: int = 2
    """Of the dense model; the mixture of experts has one."""
    experts: int = 32
    rounds: int = 9
    threads: int = torch.get_num_threads()
    output: Path | None = None
    """Folder for muon_step.json and muon_step.md; none are written without it."""


def dense(layers: int) -> list[tuple[int, int]]:
    """A Llama of 1 B parameters with every side halved: hidden size 1024, 4096 in the MLP."""
    attention = [(1024, 1024), (256, 1024), (256, 1024), (1024, 1024)]
    return layers * [*attention, (4096, 1024), (4096, 1024), (1024, 4096)]


def experts(count: int) -> list[tuple[int, int]]:
    """A layer of OLMoE with every side halved: hidden size 1024, 512 in each expert."""
    return [*4 * [(1024, 1024)], *count * [(512, 1024), (512, 1024), (1024, 512)]]


def with_gradients(shapes: list[tuple[int, int]]) -> list[nn.Parameter]:
    """FP32 parameters, the same at every call."""
    made, noise = [], torch.Generator().manual_seed(0)
    for shape in shapes:
        param = nn.Parameter(torch.randn(shape, generator=noise) * 0.02)
        param.grad = torch.randn(shape, generator=noise)
        made.append(param)
    return made


def of_torch(params: list[nn.Parameter]) -> Callable[[], object]:
    return torch.optim.Muon(params, lr=1e-3, weight_decay=0.1).step


def of_pytorch_optimizer(params: list[nn.Parameter]) -> Callable[[], object]:
    module = importlib.import_module("pytorch_optimizer")
    groups = [{"params": params, "use_muon": True}]
    step: Callable[[], object] = module.Muon(groups, lr=1e-3, weight_decay=0.1).step
    return step


def of_mp_optim(backend: str, **settings: str) -> Callable[[list[nn.Parameter]], Callable]:
    def build(params: list[nn.Parameter]) -> Callable[[], object]:
        return FusedMuon(
            params,
            lr=1e-3,
            weight_decay=0.1,
            nesterov=True,
            coefficient_type="simple",
            scale_mode="shape_scaling",
            backend=backend,
            **settings,
        ).step

    return build


def contenders() -> dict[str, Callable[[list[nn.Parameter]], Callable[[], object]]]:
    """All take five steps of the same polynomial in bfloat16."""
    found = {
        "mp_optim": of_mp_optim("native"),
        "mp_optim, passes in torch": of_mp_optim("reference"),
        "torch.optim.Muon": of_torch,
    }
    try:
        importlib.import_module("pytorch_optimizer")
        found["pytorch_optimizer.Muon"] = of_pytorch_optimizer
    except ImportError:
        print("pytorch_optimizer is not installed, and left out")
    return found


@contextmanager
def kernels_recorded() -> Iterator[None]:
    """The profiler sees the kernels' products, too."""
    call = NativeLibrary.call

    def recorded(library: NativeLibrary, name: str, *arguments: object) -> None:
        if name != KERNEL:
            return call(library, name, *arguments)
        with torch.profiler.record_function(KERNEL):
            return call(library, name, *arguments)

    with mock.patch.object(NativeLibrary, "call", recorded):
        yield


def share_of_products(step: Callable[[], object]) -> float:
    """The part of a step's time that is spent in products of matrices. Kernels that take all of a
    step measure it themselves."""
    within = seconds_of_products()
    with (
        kernels_recorded(),
        torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as seen,
        torch.profiler.record_function("step"),
    ):
        step()
    within = seconds_of_products() - within
    times = {event.key: event.cpu_time_total for event in seen.key_averages()}
    beside = sum(times.get(name, 0.0) for name in PRODUCTS)
    return (beside + within * 1e6) / times["step"]


@dataclass
class Measured:
    """One list of matrices: seconds by contender, and the shares of products."""

    name: str
    elements: int
    timings: dict[str, Timing]
    shares: dict[str, float]

    def rows(self) -> list[str]:
        """Of a table."""
        ours = self.timings["mp_optim"]
        return [
            f"| {self.name} | {name} | {timing.median * 1e3:.0f} | {ratio(timing, ours):.2f} | "
            f"{1 - self.shares[name]:.0%} |"
            for name, timing in self.timings.items()
        ]


def measure(name: str, shapes: list[tuple[int, int]], rounds: int) -> Measured:
    """All contenders over one list of matrices."""
    steps = {}
    for contender, build in contenders().items():
        steps[contender] = build(with_gradients(shapes))
    timings = alternate(steps, rounds, name)
    shares = {contender: share_of_products(step) for contender, step in steps.items()}
    elements = sum(rows * columns for rows, columns in shapes)
    return Measured(
        f"{name}, {len(shapes)} matrices, {elements / 1e6:.0f} M", elements, timings, shares
    )


def main(options: Options) -> None:
    require_kernels()
    allocator.keep_freed()
    torch.set_num_threads(options.threads)
    found = [
        measure("dense", dense(options.layers), options.rounds),
        measure("experts", experts(options.experts), options.rounds),
    ]
    lines = [
        f"{options.threads} threads, medians of {options.rounds} rounds:",
        "",
        "| matrices | | ms | times mp_optim's | not products |",
        "|---|---|---|---|---|",
        *[row for each in found for row in each.rows()],
    ]
    text = "\n".join(lines) + "\n"
    print(text)
    if options.output is not None:
        (options.output / "muon_step.md").write_text(text)
        seconds = {
            each.name: {name: timing.seconds for name, timing in each.timings.items()}
            for each in found
        }
        (options.output / "muon_step.json").write_text(json.dumps(seconds))


if __name__ == "__main__":
    main(tyro.cli(Options, description=__doc__))
