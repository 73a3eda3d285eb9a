"""Kernels that are not ours, compiled for a target and carried out from their PTX beside torch.
Prints what differs, by kernel, as JSON; ``python -m support.workers.ptx_tutorials 90``.

A program of its own, because a process either interprets Triton or compiles it.
"""

from __future__ import annotations

import json
import os
import sys

os.environ["TRITON_INTERPRET"] = "0"

import torch
import triton
import triton.language as tl

from ptx.memory import OutOfBoundsError, RaceError
from ptx.triton_driver import Launch, StaticDriver, carry_out


@triton.jit
def vector_add(a, b, out, count, SIZE: tl.constexpr, GUARDED: tl.constexpr):
    at = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    if GUARDED:
        inside = at < count
        tl.store(out + at, tl.load(a + at, mask=inside) + tl.load(b + at, mask=inside), mask=inside)
    else:
        tl.store(out + at, tl.load(a + at) + tl.load(b + at))


@triton.jit
def softmax(rows, out, width, SIZE: tl.constexpr):
    row, at = tl.program_id(0), tl.arange(0, SIZE)
    value = tl.load(rows + row * width + at, mask=at < width, other=-float("inf"))
    power = tl.exp(value - tl.max(value, axis=0))
    tl.store(out + row * width + at, power / tl.sum(power, axis=0), mask=at < width)


@triton.jit
def largest(rows, out, width, SIZE: tl.constexpr):
    row, at = tl.program_id(0), tl.arange(0, SIZE)
    value = tl.load(rows + row * width + at, mask=at < width, other=-(2**31))
    tl.store(out + row, tl.max(value, axis=0))


@triton.jit
def transposed(matrix, out, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    row, column = tl.arange(0, ROWS), tl.arange(0, COLUMNS)
    tile = tl.load(matrix + row[:, None] * COLUMNS + column[None, :])
    tl.store(out + column[:, None] * ROWS + row[None, :], tl.trans(tile))


@triton.jit
def all_write_one(out, SIZE: tl.constexpr):
    at = tl.arange(0, SIZE)
    tl.store(out + at // 2, at)


def carry(launch: Launch) -> None:
    carry_out(launch, exact=launch.function.name != "softmax")


def main(arch: int) -> None:
    found: dict[str, float | str] = {}
    torch.manual_seed(1)
    a, b, out = torch.randn(1001), torch.randn(1001), torch.zeros(1001)
    exact = {"enable_fp_fusion": False}
    with StaticDriver(arch, carry):
        vector_add[(2,)](a, b, out, 1001, SIZE=512, GUARDED=True, **exact)
        found["vector_add"] = float((out - (a + b)).abs().max())
        rows, out = torch.randn(5, 333) * 10.0, torch.zeros(5, 333)
        softmax[(5,)](rows, out, 333, SIZE=512, **exact)
        found["softmax"] = float((out - rows.softmax(1)).abs().max())
        whole = torch.randint(-(2**31), 2**31 - 1, (7, 1000), dtype=torch.int32)
        most = torch.zeros(7, dtype=torch.int32)
        largest[(7,)](whole, most, 1000, SIZE=1024, **exact)
        found["largest"] = float((most != whole.amax(1)).sum())
        matrix, other = torch.randn(64, 32), torch.zeros(32, 64)
        transposed[(1,)](matrix, other, ROWS=64, COLUMNS=32, **exact)
        found["transposed"] = float((other != matrix.t()).sum())
        try:
            vector_add[(2,)](a, b, a.clone(), 1001, SIZE=512, GUARDED=False, **exact)
        except OutOfBoundsError:
            found["vector_add without a guard"] = "out of bounds"
        try:
            all_write_one[(1,)](torch.zeros(64, dtype=torch.int32), SIZE=128, **exact)
        except RaceError:
            found["all_write_one"] = "race"
    json.dump(found, sys.stdout)


if __name__ == "__main__":
    main(int(sys.argv[1]))
