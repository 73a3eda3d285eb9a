"""The machine code of optimizers that others ship, read as ours is: kernels in the shared libraries
of bitsandbytes' and Transformer Engine's wheels. Nothing of it is carried out."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from ptx.sass import Assembled, code_of, said_by

HEADS = ["kernel", "registers, warps", "instructions an element", "bytes an element"]
HEADS += ["16 bytes at a time", "barriers", "stack", "fused"]
_USED = re.compile(r"Function (\S+):\s+(.*)")
_NUMBER = re.compile(r"(\w+):(\d+)")


@dataclass(frozen=True)
class Shipped:
    """A kernel that steps parameters.

    Attributes:
        name: for people. symbol: a regular expression of its mangled name.
        num_bytes: of an element that it reads and writes. elements: of a thread, in one turn of
            its loop. warps: of a block.
    """

    name: str
    symbol: str
    num_bytes: int
    elements: int
    warps: int


KERNELS = (
    Shipped(
        "bitsandbytes Adam, bfloat16 parameters, FP32 moments",
        r"kOptimizer32bit2StateI13__nv_bfloat16Li0E",
        22,
        4,
        32,
    ),
    Shipped("bitsandbytes Adam, all FP32", r"kOptimizer32bit2StateIfLi0E", 28, 4, 32),
    Shipped(
        "bitsandbytes Adam, bfloat16 parameters, moments in 8 bits",
        r"kOptimizerStatic8bit2StateBlockwiseI13__nv_bfloat16Li0E",
        10,
        1,
        8,
    ),
    Shipped(
        "bitsandbytes Lion, bfloat16 parameters, momentum in 8 bits",
        r"kOptimizerStatic8bit1StateBlockwiseI13__nv_bfloat16Li5E",
        8,
        1,
        8,
    ),
    Shipped(
        "Transformer Engine Adam, bfloat16 beside FP32 main params and moments",
        r"17AdamFunctorMasterI13__nv_bfloat16S\d*_ffiE",
        28,
        4,
        16,
    ),
    Shipped("Transformer Engine Adam, all FP32", r"11AdamFunctorIffffiE", 28, 4, 16),
    Shipped(
        "Transformer Engine Adam, remainders of 16 bits",
        r"31AdamFunctorMasterParamRemainderI13__nv_bfloat16fflE",
        26,
        4,
        16,
    ),
)
"""Bytes: gradients are in the parameters' dtype, and each state is read and written."""


def shipped(library: Path, arch: int) -> Iterator[tuple[Shipped, Assembled]]:
    """Those of :data:`KERNELS` that a library holds for a target."""
    with tempfile.TemporaryDirectory() as folder:
        said_by("cuobjdump", "-xelf", f"sm_{arch}.", str(library.resolve()), folder=folder)
        for cubin in sorted(Path(folder).iterdir()):
            yield from _kernels_in(cubin, arch)


def _kernels_in(cubin: Path, arch: int) -> Iterator[tuple[Shipped, Assembled]]:
    if not re.search(rb"kOptimizer|AdamFunctor", cubin.read_bytes()):
        return
    used = dict(_USED.findall(said_by("cuobjdump", "-res-usage", str(cubin))))
    sections = said_by("nvdisasm", "-c", str(cubin)).split("\t.section\t.text.")
    texts = {section.partition(",")[0]: section for section in sections}
    for kernel in KERNELS:
        for symbol in filter(re.compile(kernel.symbol).search, used):
            numbers = {name: int(number) for name, number in _NUMBER.findall(used[symbol])}
            yield kernel, code_of(texts[symbol], numbers, arch, kernel.warps)


def rows(libraries: Sequence[Path], arch: int) -> Iterator[list[object]]:
    """A row of a table for each kernel. Instructions are those of the loop that moves most
    bytes, all of its branches counted."""
    for library in libraries:
        for kernel, code in shipped(library, arch):
            yield [
                kernel.name,
                f"{code.registers}, {code.warps}",
                round(code.loop / kernel.elements),
                f"{kernel.num_bytes}.0",
                f"{code.wide:.0%}",
                code.barriers,
                code.stack,
                code.fused,
            ]
