"""What the assembler makes of our kernels, read from their machine code: registers, memory that
they are spilled to, widths of accesses, instructions and bytes of an element; and from that the
time of a step as a card's data sheet has it, which no card was asked for."""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import triton

from ptx.triton_driver import Function

_TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
_REGISTERS = 65536
"""Of a multiprocessor; a warp is given them in steps of 8 a thread."""
_MOST_WARPS = {80: 64, 86: 48, 89: 48, 90: 64, 100: 64, 120: 48}
_ACCESS = re.compile(r"\b(LDG|STG)\.E((?:\.\w+)*)")
_WIDTHS = {"128": 16, "64": 8, "U16": 2, "S16": 2, "U8": 1, "S8": 1}
_LINE = re.compile(r"^\s*/\*([0-9a-f]{4,})\*/\s+(.*?);", re.MULTILINE)
_LABEL = re.compile(r"^\.(L_x_\d+):", re.MULTILINE)
_BRANCH = re.compile(r"\bBRA\b.*\(\.(L_x_\d+)\)")
_FUSED = re.compile(r"\b(?:FFMA|DFMA)\b|\bHFMA2\b(?!.*-RZ, RZ,)")  # which makes constants so


@dataclass(frozen=True)
class Card:
    """What a data sheet says.

    Attributes:
        arch: its target. processors: multiprocessors, each of which issues four instructions of a
            warp in a clock. clock: GHz. bandwidth: of its memory, in TB/s.
    """

    name: str
    arch: int
    processors: int
    clock: float
    bandwidth: float

    def picoseconds(self, num_bytes: float, instructions: float) -> float:
        """For an element: the longer of moving its bytes and issuing its instructions."""
        issued = self.processors * 4 * 32 * self.clock * 1e9
        return 1e12 * max(num_bytes / (self.bandwidth * 1e12), instructions / issued)


CARDS = (
    Card("A100 80 GB SXM", 80, 108, 1.41, 2.039),
    Card("RTX 3090", 86, 82, 1.695, 0.936),
    Card("A10G", 86, 72, 1.71, 0.6),
    Card("RTX 4090", 89, 128, 2.52, 1.008),
    Card("L4", 89, 58, 2.04, 0.3),
    Card("L40S", 89, 142, 2.52, 0.864),
    Card("H100 SXM", 90, 132, 1.83, 3.35),
    Card("H200 SXM", 90, 132, 1.83, 4.8),
    Card("B200", 100, 148, 1.85, 8.0),
)


@dataclass(frozen=True)
class Assembled:
    """A kernel's machine code.

    Attributes:
        registers: of a thread. stack: bytes of a thread, spilled ones among them. shared: bytes of
            a block.
        warps: that a multiprocessor holds, by registers.
        instructions: all. loop: those of the loop that moves most bytes; 0 if there is none.
        loop_bytes: what a thread reads and writes in it.
        wide: share of that in accesses of 16 bytes. barriers: in the loop.
        fused: multiplications and additions in one; those of divisions and roots.
    """

    registers: int
    stack: int
    warps: int
    instructions: int
    loop: int
    loop_bytes: int
    wide: float
    barriers: int
    fused: int


def assembled(function: Function, arch: int, warps: int) -> Assembled:
    """What a kernel's machine code says; ``warps`` are a block's."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(function.cubin)
        file.flush()
        text = said_by("nvdisasm", "-c", file.name)
    return code_of(text, usage(function.cubin), arch, warps)


def code_of(text: str, used: dict[str, int], arch: int, warps: int) -> Assembled:
    """What the disassembled text of one kernel says, and what it takes of a multiprocessor."""
    registers = used["REG"]
    blocks = _REGISTERS // (-(-registers // 8) * 8 * 32 * warps)
    lines = [match[2] for match in _LINE.finditer(text)]
    loop = max(_loops(text), key=lambda body: sum(_bytes_of(body).values()), default=[])
    moved = _bytes_of(loop)
    return Assembled(
        registers,
        used.get("STACK", 0) + used.get("LOCAL", 0),
        min(blocks * warps, _MOST_WARPS[arch]),
        len(lines),
        len(loop),
        sum(moved.values()),
        moved[16] / max(1, sum(moved.values())),
        sum("BAR.SYNC" in line for line in loop),
        sum(bool(_FUSED.search(line)) for line in lines),
    )


def usage(cubin: bytes) -> dict[str, int]:
    """``REG`` per thread, ``STACK`` and ``LOCAL`` in bytes."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        found = re.findall(
            r"\b(REG|STACK|LOCAL):(\d+)", said_by("cuobjdump", "-res-usage", file.name)
        )
    return {name: int(number) for name, number in found}


def said_by(program: str, *arguments: str, folder: str | None = None) -> str:
    """What a program of Triton's wheel prints, run in a folder."""
    command = [str(_TOOLS / program), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True, cwd=folder).stdout


def _loops(text: str) -> Iterator[list[str]]:
    """The instructions from each label to a branch back to it."""
    labels = {match[1]: match.start() for match in _LABEL.finditer(text)}
    for line in _LINE.finditer(text):
        branch = _BRANCH.search(line[2])
        start = labels.get(branch[1], line.end()) if branch else line.end()
        if start < line.start():
            yield [match[2] for match in _LINE.finditer(text, start, line.end())]


def _bytes_of(lines: Sequence[str]) -> Counter[int]:
    """Bytes of tensors that some instructions move, by the width of the access."""
    found: Counter[int] = Counter()
    for line in lines:
        for _, said in _ACCESS.findall(line):
            parts = said.split(".")
            width = next((_WIDTHS[part] for part in parts if part in _WIDTHS), 4)
            found[width] += width
    return found
