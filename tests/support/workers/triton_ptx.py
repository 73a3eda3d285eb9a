"""Compile the Triton kernels for a GPU target, and print their PTX and register counts as JSON.

``python -m support.workers.triton_ptx 90`` runs in a process of its own, because a process either
interprets or compiles Triton. If PYTHONPATH starts with a folder of another Triton version, that
version compiles (``support.tritons``).
"""

import json
import sys

import torch

from ptx.kernels import MachineBackend  # isort: skip  (before modules that interpret kernels)

from mp_optim.kernels.kernel_args import LaunchDtypes
from mp_optim.kernels.triton import launches
from mp_optim.kernels.triton.launches import shape_of
from ptx import forms
from ptx.sass import usage
from ptx.trials import launches_of, trials_of
from ptx.triton_driver import Launch, StaticDriver
from support.kernel_cases import PASSES, Case

TRIALS = (
    "adam: bfloat16 bfloat16 - float32 float32 -, aligned, host",
    "adam: bfloat16 bfloat16 - float32 float32 -, anywhere, host",
    "adam: float32 - - float32 float32 -, aligned, flag, weight_decay=0.0",
    "adam: bfloat16 bfloat16 int16 bfloat16 bfloat16 -, aligned, host",
    "adam: bfloat16 - int16 int8 uint8 -, aligned, flag",
    "adam: bfloat16 - int8 uint8 uint8 bfloat16, noisy, anywhere, host",
    "sgd: float16 float16 - float32 float32 -, aligned, host",
    "lion: bfloat16 bfloat16 - float32 float32 -, aligned, host",
    "lamb: bfloat16 - int16 float32 float32 -, noisy, aligned, host",
    "muon_momentum: bfloat16 bfloat16 - float32 float32 -, aligned, host, momentum=0.95, "
    "nesterov=True",
    "muon_apply: bfloat16 bfloat16 - float32 float32 -, aligned, host",
)
"""Each kernel in one or two forms, as names of trials that launch forms of launches.json."""


def wide(kernel: str, case: Case, keys: tuple[str, ...]) -> dict[str, int]:
    if not case.aligned:
        return {"ld": 0, "st": 0, "ld half": 0, "st half": 0}
    kept = dict(zip(keys, case.moments, strict=False))
    moments = [dtype for key, dtype in kept.items() if key]
    main = [torch.bfloat16, case.rest] if case.rest else [torch.float32]
    average = [] if case.average is None else [case.average]
    read = [case.grad, *main, *moments, *average]
    written = [*main, *moments, case.output, *average]
    is_packed = bool(moments) and moments[0] == torch.uint8
    if is_packed:
        written.remove(torch.uint8)  # Four bytes per thread, for 4-bit codes.
    if kernel == "lamb_moments":
        written = [*moments[1:]] if is_packed else [*moments]
    elif kernel == "lamb_apply":
        read, written = [*main, *moments], [*main, case.output]
    elif kernel == "muon_momentum":
        read, written = [case.grad, *moments], [*moments, case.output]
    elif kernel == "chunk_sums":
        read, written = [case.grad], []
    elif kernel == "run_sums":
        read, written = [], []
    elements, run = elements_of(kernel, case, [*moments, None, None][:2])
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
        counts["ld half"] += 1  # One more load of codes, in the masked tile.
    return counts


def elements_of(kernel: str, case: Case, moments: list[torch.dtype | None]) -> tuple[int, int]:
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


def main(arch: int) -> None:
    launched: list[Launch] = []
    kernels, result = MachineBackend(), {}
    trials = {str(trial): trial for trial in trials_of(forms.read())}

    def note(launch: Launch) -> None:
        kernels.pass_by(launch)
        launched.append(launch)

    with StaticDriver(arch, note):
        for trial in map(trials.__getitem__, TRIALS):
            launched.clear()
            launches_of(kernels, trial)
            named = dict.fromkeys(launch.function.name for launch in launched)
            # LAMB's sum is another form than the sum of gradients.
            sums = {"chunk_sums", "run_sums"} if trial.rule != "adam" else set()
            for kernel in (name for name in named if name not in sums):
                same = [launch for launch in launched if launch.function.name == kernel]
                result[f"{kernel}: {trial}"] = {
                    "ptx": sorted({launch.function.ptx for launch in same}),
                    "warps": same[0].warps,
                    "used": usage(same[0].function.cubin),
                    "kernel": kernel,
                    "wide": wide(kernel, trial.case, PASSES[trial.rule]),
                }
    json.dump(result, sys.stdout)


if __name__ == "__main__":
    main(int(sys.argv[1]))
