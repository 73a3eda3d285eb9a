"""Compiles the Triton kernels for a GPU that need not be there, and prints what came out as JSON.

A program of its own, because a process either interprets Triton or compiles it: ``python triton_ptx.py 90``.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

os.environ["TRITON_INTERPRET"] = "0"

import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from mp_optim.update.backends.triton import backend
from mp_optim.update.backends.triton.kernels import lamb, rules, sums

F, B, H, I8, U8, I16 = tl.float32, tl.bfloat16, tl.float16, tl.int8, tl.uint8, tl.int16
COLUMNS = {"grads": "GRAD", "mains": "MAIN", "rests": "REST", "moments1": "MOMENT1", "moments2": "MOMENT2",
           "outputs": "OUTPUT"}
INTEGERS = {"owners": "*i32", "firsts": "*i32", "sizes": "*i64", "streams": "*i32", "seed": "i32", "skip": "*fp32",
            "starts": "*i32", "counts": "*i32", "tensors": "*i64", "sums": "*fp64", "results": "*fp64",
            "ratios": "*fp32", **dict.fromkeys(["scales1", "scales2", *COLUMNS], "*i64")}
DEFAULTS = {"GRAD": F, "MAIN": F, "REST": None, "MOMENT1": None, "MOMENT2": None, "OUTPUT": None, "NOISY": False,
            "ON_DEVICE": False, "ALIGNED": True, "CHUNK": backend.CHUNK, "ROWS": backend.ROWS, "HAS_DECAY": True,
            "HAS_L2": False, "NESTEROV": False, "FIRST": False}
PLAIN = {"GRAD": B, "MOMENT1": F, "MOMENT2": F, "OUTPUT": B}
SMALL = {"GRAD": B, "MAIN": B, "REST": I8, "MOMENT1": I8, "MOMENT2": U8}
VARIANTS: dict[str, tuple[Any, dict[str, Any]]] = {
    "adam": (rules.adam, PLAIN),
    "adam, misaligned": (rules.adam, {**PLAIN, "ALIGNED": False}),
    "adam, fp32, l2, on device": (rules.adam, {"MOMENT1": F, "MOMENT2": F, "HAS_L2": True, "ON_DEVICE": True}),
    "adam, 8 bits": (rules.adam, {**SMALL, "NOISY": True}),
    "adam, 16 bits": (rules.adam, {**SMALL, "REST": I16, "MOMENT1": B, "MOMENT2": H, "OUTPUT": B}),
    "sgd": (rules.sgd, {"GRAD": H, "MOMENT1": F, "OUTPUT": H, "NESTEROV": True}),
    "lion": (rules.lion, {**PLAIN, "MOMENT2": None}),
    "lamb moments": (lamb.lamb_moments, {**PLAIN, "OUTPUT": None}),
    "lamb moments, 8 bits": (lamb.lamb_moments, SMALL),
    "lamb apply": (lamb.lamb_apply, PLAIN),
    "chunk sums": (sums.chunk_sums, {"TYPE": B, "CHUNK": backend.SUM_CHUNK}),
    "run sums": (sums.run_sums, {"COLUMNS": 2, "RUN": 1024}),
}


def source_of(kernel: Any, given: dict[str, Any]) -> ASTSource:
    """The kernel with the arguments that a launch would have, addresses of tables being multiples of 16."""
    constants = {**DEFAULTS, **given}
    signature, values, hints = {}, {}, {}
    for at, name in enumerate(kernel.arg_names):
        absent = {"scales1": constants["MOMENT1"] in (None, F, B), "scales2": constants["MOMENT2"] in (None, F, B),
                  "skip": not constants["ON_DEVICE"], "streams": not constants["NOISY"],
                  **{column: constants[dtype] is None for column, dtype in COLUMNS.items()}}.get(name, False)
        if name.isupper() or absent:
            signature[name], values[(at,)] = "constexpr", constants.get(name)
        else:
            signature[name] = INTEGERS.get(name, "*fp32" if constants["ON_DEVICE"] and name == "multiplier" else "fp32")
            if signature[name][0] == "*" and name != "skip":
                hints[(at,)] = [["tt.divisibility", 16]]
    return ASTSource(kernel, signature, values, hints)


def wide(kernel: Any, given: dict[str, Any]) -> dict[str, int]:
    """How many accesses of 16 bytes a thread needs for its elements of an unmasked tile, or chunk of a sum."""
    constants = {**DEFAULTS, **given}
    elements = (backend.SUM_CHUNK if "TYPE" in given else backend.ROWS * 256) // (32 * backend.OPTIONS["num_warps"])
    state = ["MAIN", "REST", "MOMENT1", "MOMENT2"]
    read, written = ["GRAD", *state], [*state, "OUTPUT"]
    if kernel is lamb.lamb_moments:
        written = ["MOMENT1", "MOMENT2"]
    elif kernel is lamb.lamb_apply:
        read, written = state, ["MAIN", "REST", "OUTPUT"]
    elif kernel in (sums.chunk_sums, sums.run_sums):
        read, written = ["TYPE"], []

    def accesses(names: list[str]) -> int:
        dtypes = [constants.get(name) for name in names]
        return sum(dtype.primitive_bitwidth // 8 for dtype in dtypes if dtype is not None) * elements // 16

    return {"ld": accesses(read), "st": accesses(written)} if constants["ALIGNED"] else {"ld": 0, "st": 0}


def main(arch: int) -> None:
    result = {}
    for label, (kernel, given) in VARIANTS.items():
        compiled = triton.compile(source_of(kernel, given), target=GPUTarget("cuda", arch, 32), options=backend.OPTIONS)
        result[label] = {"ptx": compiled.asm["ptx"], "wide": wide(kernel, given)}
    json.dump(result, sys.stdout)


if __name__ == "__main__":
    main(int(sys.argv[1]))
