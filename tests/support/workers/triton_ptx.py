"""Launches the Triton kernels for a GPU that need not be there, up to and without the launch
itself, and prints the PTX they would have run as JSON, with the registers that the assembler gave
it.

A program of its own, because a process either interprets Triton or compiles it: ``python
-m support.workers.triton_ptx 90 all``. With a folder that holds another Triton first on PYTHONPATH
it compiles by that one (``support.tritons``).
"""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from typing import Any

import torch

from ptx.kernels import MachineBackend  # isort: skip  (before what interprets kernels)

from mp_optim.update.backends.triton import launches
from mp_optim.update.backends.triton.launches import shape_of
from mp_optim.update.kernel_args import LaunchDtypes
from ptx.sass import usage
from ptx.triton_driver import Launch, StaticDriver
from support import tritons
from support.triton_cases import GROUP, PASSES, Case, lists_of, step_with

PLAIN = Case(aligned=True)
SMALL = Case(rest=torch.int8, moments=(torch.int8, torch.uint8), output=None, aligned=True)
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
    "adam, 8-bit moments, noisy": (
        "adam",
        Case(
            rest=torch.int16,
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
    "plain adam": ("plain adam", PLAIN, {"betas": (0.0, 0.999)}),
    "stable_adamw": ("stable_adamw", PLAIN, {}),
    "stable_adamw, 8 bits": ("stable_adamw", SMALL, {}),
    "adam, 4-bit first moments": (
        "adam",
        Case(
            rest=torch.int16,
            moments=(torch.uint8, torch.uint8),
            output=None,
            noisy=True,
            aligned=True,
        ),
        {},
    ),
    "adam, averages": ("adam", replace(PLAIN, average=torch.float32), {}),
    "adam, 8 bits, averages in 16": (
        "adam",
        replace(SMALL, noisy=True, average=torch.bfloat16),
        {},
    ),
    "sgd": (
        "sgd",
        Case(torch.float16, torch.float16, aligned=True),
        {"nesterov": True, "momentum": 1.0},
    ),
    "plain sgd": ("plain sgd", PLAIN, {"momentum": 0.0}),
    "lion": ("lion", PLAIN, {}),
    "ademamix": ("ademamix", PLAIN, {}),
    "ademamix, 8 bits": ("ademamix", SMALL, {}),
    "lamb": ("lamb", PLAIN, {}),
    "lamb, 8 bits": ("lamb", SMALL, {}),
    "stable_adamw, fp16": ("stable_adamw", Case(torch.float16, torch.float16, aligned=True), {}),
    "stable_adamw, fp32": ("stable_adamw", Case(torch.float32, None, aligned=True), {}),
    "adam, 8 bits, misaligned": ("adam", replace(SMALL, noisy=True, aligned=False), {}),
    "adam, 4 bits, misaligned": ("adam", Case(moments=(torch.uint8, torch.uint8), noisy=True), {}),
    "muon, momenta": ("muon_momentum", PLAIN, {"nesterov": True}),
    "muon, bfloat16 momenta, noisy": (
        "muon_momentum",
        replace(PLAIN, moments=(torch.bfloat16, torch.float32), noisy=True),
        {},
    ),
    "muon, main params": ("muon_apply", PLAIN, {}),
    "muon, remainders": ("muon_apply", Case(torch.float32, None, torch.int16, aligned=True), {}),
}
SOME = (
    *("adam", "adam, misaligned", "adam, fp32, l2, multiplier on the device", "adam, 8 bits"),
    *("adam, 4 bits, misaligned", "sgd", "lion", "ademamix, 8 bits", "lamb, 8 bits"),
    *("stable_adamw", "muon, bfloat16 momenta, noisy", "muon, remainders"),
)
"""Each kernel in one form or two."""


def wide(kernel: str, case: Case, keys: tuple[str, ...]) -> dict[str, int]:
    """How many accesses of 16 bytes, and of 8 where it takes no more of a tensor at once, a thread
    needs for its elements of a tile, or chunk of a sum: an unmasked one, and but for LAMB's first
    kernel one whose mask is alike in runs of 16."""
    if not case.aligned:
        return {"ld": 0, "st": 0, "ld half": 0, "st half": 0}
    kept = dict(zip(keys, (*case.moments, case.moments[0]), strict=False))
    moments = [dtype for key, dtype in kept.items() if key]
    main = [torch.bfloat16, case.rest] if case.rest else [torch.float32]
    average = [] if case.average is None else [case.average]
    read = [case.grad, *main, *moments, *average]
    written = [*main, *moments, case.output, *average]
    is_packed = bool(moments) and moments[0] == torch.uint8
    if is_packed:
        written.remove(torch.uint8)  # 4-bit codes: a thread writes four bytes
    if kernel == "lamb_moments":
        written = moments
    elif kernel == "lamb_apply":
        read, written = [*main, *moments], [*main, case.output]
    elif kernel == "muon_momentum":
        read, written = [case.grad, *moments], [*moments, case.output]
    elif kernel == "clip_sums":
        read, written = [case.grad, moments[1]], []
    elif kernel == "chunk_sums":
        read, written = [case.grad], []
    elif kernel == "run_sums":
        read, written = [], []
    elements, run = elements_of(kernel, case, [*moments, None, None, None][:3])
    tiles = 1 if kernel == "lamb_moments" else 2

    def accesses(dtypes: list[torch.dtype | None], verb: str) -> dict[str, int]:
        found = {16: 0, 8: 0}
        for dtype in filter(None, dtypes):
            width = min(16, dtype.itemsize * run)
            if width >= 8:
                found[width] += tiles * dtype.itemsize * elements // width
        return {verb: found[16], f"{verb} half": found[8]}

    counts = accesses(read, "ld") | accesses(written, "st")
    if is_packed and "muon" not in kernel:
        counts["ld half"] += 1  # of codes, in the tile with any mask
    return counts


def elements_of(kernel: str, case: Case, moments: list[torch.dtype | None]) -> tuple[int, int]:
    """Elements of a thread, and how many of them are side by side."""
    if kernel == "chunk_sums":
        return launches.SUM_CHUNK // (32 * launches.SUM_WARPS), 16 // case.grad.itemsize
    main = torch.float32 if case.rest is None else torch.bfloat16
    whole = None if kernel == "muon_momentum" else main
    kind = LaunchDtypes(
        case.grad, whole, case.rest, *moments, output=case.output, average=case.average
    )
    shape = shape_of(kernel, kind)
    rows = launches.CHUNK // 1024 if kernel == "lamb_moments" else shape["ROWS"]
    elements = int(rows * 256 // (32 * shape["num_warps"]))
    return elements, min(shape["RUN"], elements)


def main(arch: int, which: str) -> None:
    launched: list[Launch] = []
    kernels, result = MachineBackend(), {}

    def note(launch: Launch) -> None:
        kernels.pass_by(launch)
        launched.append(launch)

    with StaticDriver(arch, note):
        for label in SOME if which == tritons.SOME else VARIANTS:
            rule, case, settings = VARIANTS[label]
            launched.clear()
            lists = lists_of(1, [300, 1, 5000], PASSES[rule], case)
            short = rule.split()[-1]
            for step, multiplier, lr in ((2, 1.0, 1.0), (3, 0.37, 0.5)):
                given = torch.tensor([multiplier, 0.0]) if "on the device" in label else multiplier
                step_with(kernels, short, lists, {**GROUP, **settings, "lr": lr}, step, given)
            if label in ("adam", "adam, misaligned"):
                odd = [grad for grad in lists.grad if grad.data_ptr() % 16]
                kernels.sum_of_squares(lists.grad if case.aligned else odd)
            for kernel in dict.fromkeys(launch.function.name for launch in launched):
                same = [launch for launch in launched if launch.function.name == kernel]
                result[f"{label}: {kernel}"] = {
                    "ptx": sorted({launch.function.ptx for launch in same}),
                    "warps": same[0].warps,
                    "used": usage(same[0].function.cubin),
                    "kernel": kernel,
                    "wide": wide(kernel, case, PASSES[rule]),
                }
    json.dump(result, sys.stdout)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
