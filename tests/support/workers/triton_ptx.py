"""Launches the Triton kernels for a GPU that need not be there, up to and without the launch
itself, and prints the PTX they would have run as JSON.

A program of its own, because a process either interprets Triton or compiles it: ``python
-m support.workers.triton_ptx 90``.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

os.environ["TRITON_INTERPRET"] = "0"

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver

from mp_optim.update.backends.triton import backend, piece_sums
from support.triton_cases import GROUP, KEYS, Case, lists_of, step_with

PLAIN = Case(aligned=True)
SMALL = Case(
    rest=torch.int8, moments=(torch.int8, torch.uint8), output=None, aligned=True
)
VARIANTS: dict[str, tuple[str, Case, dict[str, Any]]] = {
    "adam": ("adam", PLAIN, {}),
    "adam, misaligned": ("adam", Case(), {}),
    "adam, fp32, l2, multiplier on the device": (
        "adam",
        Case(torch.float32, None, aligned=True),
        {"adam_w_mode": False},
    ),
    "adam, 8 bits": (
        "adam",
        Case(
            rest=torch.int8,
            moments=(torch.int8, torch.uint8),
            output=None,
            noisy=True,
            aligned=True,
        ),
        {},
    ),
    "adam, 16 bits": (
        "adam",
        Case(rest=torch.int16, moments=(torch.bfloat16, torch.float16), aligned=True),
        {},
    ),
    "sgd": (
        "sgd",
        Case(torch.float16, torch.float16, aligned=True),
        {"nesterov": True, "momentum": 1.0},
    ),
    "lion": ("lion", PLAIN, {}),
    "lamb": ("lamb", PLAIN, {}),
    "lamb, 8 bits": ("lamb", SMALL, {}),
}


class Driver:
    """What a launch asks the driver of a device."""

    def __init__(self, arch: int) -> None:
        self.arch = arch

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self.arch, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int | None = None) -> int:
        return 0


def backend_for(arch: int, compiled: list[tuple[str, str]]) -> backend.TritonBackend:
    """A backend whose launches end with the compiler, which adds name and PTX to ``compiled``."""
    driver.set_active(Driver(arch))
    run, available = triton.runtime.JITFunction.run, torch.cuda.is_available

    def compile_only(
        kernel: Any, *arguments: Any, grid: Any, warmup: bool, **named: Any
    ) -> Any:
        result = run(kernel, *arguments, grid=grid, warmup=True, **named)
        compiled.append((result.metadata.name, result.asm["ptx"]))
        return result

    triton.runtime.JITFunction.run = compile_only
    torch.cuda.is_available = lambda: True
    found = backend.TritonBackend()
    torch.cuda.is_available = available
    return found


def wide(kernel: str, case: Case, two_moments: bool) -> dict[str, int]:
    """How many accesses of 16 bytes a thread needs for its elements of an unmasked tile, or chunk
    of a sum."""
    elements = (
        piece_sums.SUM_CHUNK if kernel == "chunk_sums" else backend.ROWS * 256
    ) // (32 * 4)
    moments = list(case.moments if two_moments else case.moments[:1])
    main = [torch.bfloat16, case.rest] if case.rest else [torch.float32]
    read, written = [case.grad, *main, *moments], [*main, *moments, case.output]
    if kernel == "lamb_moments":
        written = moments
    elif kernel == "lamb_apply":
        read, written = [*main, *moments], [*main, case.output]
    elif kernel == "chunk_sums":
        read, written = [case.grad], []
    elif kernel == "run_sums":
        read, written = [], []

    def accesses(dtypes: list[torch.dtype | None]) -> int:
        return (
            sum(dtype.itemsize for dtype in dtypes if dtype is not None)
            * elements
            // 16
        )

    return (
        {"ld": accesses(read), "st": accesses(written)}
        if case.aligned
        else {"ld": 0, "st": 0}
    )


def main(arch: int) -> None:
    compiled: list[tuple[str, str]] = []
    kernels, result = backend_for(arch, compiled), {}
    for label, (rule, case, settings) in VARIANTS.items():
        compiled.clear()
        lists = lists_of(1, [300, 1, 5000], KEYS[rule], case)
        for step, multiplier, lr in ((2, 1.0, 1.0), (3, 0.37, 0.5)):
            given = (
                torch.tensor([multiplier, 0.0])
                if "on the device" in label
                else multiplier
            )
            step_with(
                kernels, rule, lists, {**GROUP, **settings, "lr": lr}, step, given
            )
        if label in ("adam", "adam, misaligned"):
            kernels.sum_of_squares(lists.grad)
        for kernel in dict.fromkeys(name for name, _ in compiled):
            texts = {ptx for name, ptx in compiled if name == kernel}
            result[f"{label}: {kernel}"] = {
                "ptx": sorted(texts),
                "kernel": kernel,
                "wide": wide(kernel, case, rule in ("adam", "lamb")),
            }
    json.dump(result, sys.stdout)


if __name__ == "__main__":
    main(int(sys.argv[1]))
