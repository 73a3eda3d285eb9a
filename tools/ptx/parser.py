"""PTX text as instructions with operands, labels resolved to places."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import lru_cache

_COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/", re.DOTALL)
_ENTRY = re.compile(r"\.entry\s+(\w+)\s*\((.*?)\)(.*?)\{(.*?)\n\}", re.DOTALL)
_PARAM = re.compile(r"\.param\s+\.(?:align\s+\d+\s+\.)?(\w+)[^,]*?(\w+)\s*(?:,|$)", re.DOTALL)
_REGISTERS = re.compile(r"\.reg\s+\.(\w+)\s+%(\w+)(?:<\d+>)?\s*;")
_LOCAL = re.compile(r"\.local\s+\.align\s+\d+\s+\.b8\s+(\w+)\[(\d+)\]\s*;")
_LABEL = re.compile(r"([$\w]+):")
_STATEMENT = re.compile(r"(?:@(!?)%(\w+)\s+)?([a-z][\w.:]*)\s*(.*)", re.DOTALL)
_OPERAND = re.compile(r"\{[^}]*\}|\[[^\]]*\]|[^,\s]+")
_FLOAT = re.compile(r"0[fd]([0-9a-fA-F]+)$")
_INTEGER = re.compile(r"-?(?:0x[0-9a-fA-F]+|\d+)U?$")


class PtxError(RuntimeError):
    """What the machine does not know, or a kernel must not do."""


@dataclass(frozen=True)
class Register:
    name: str


@dataclass(frozen=True)
class Immediate:
    """A constant's bits, or a negative whole number."""

    bits: int


@dataclass(frozen=True)
class Symbol:
    """A special register, a label, a parameter, or the name of some memory."""

    name: str


@dataclass(frozen=True)
class Pack:
    """Several operands in braces; None is a place that nothing is written to."""

    parts: tuple[Operand | None, ...]


@dataclass(frozen=True)
class Address:
    base: Operand
    offset: int


Operand = Register | Immediate | Symbol | Pack | Address


@dataclass(frozen=True)
class Instruction:
    """Attributes:
    guard: predicate without which a thread passes it by. negated: it is the other way round.
    target: the place that a branch goes to.
    """

    opcode: str
    operands: tuple[Operand, ...]
    guard: str | None
    negated: bool
    text: str
    target: int = -1


@dataclass(frozen=True, eq=False)
class Program:
    """A kernel; two are never the same.

    Attributes:
        params: kinds by name, in their order.
        kinds: the kind of registers by the letters that their names begin with.
        depot: its name and bytes of a thread's own memory; ("", 0) without any.
        leaders: places that branches go to.
    """

    name: str
    params: dict[str, str]
    kinds: dict[str, str]
    depot: tuple[str, int]
    instructions: tuple[Instruction, ...]
    leaders: frozenset[int]


def operand(text: str) -> Operand:
    """One operand as it is written.

    Raises:
        PtxError: it is none.
    """
    text = text.strip()
    if text.startswith("{"):
        parts = [part.strip() for part in text[1:-1].split(",")]
        return Pack(tuple(None if part == "_" else operand(part) for part in parts))
    if text.startswith("["):
        base, _, offset = text[1:-1].replace(" ", "").replace("+-", "-").partition("+")
        if not offset and "-" in base[1:]:
            base, offset = base.split("-")
            offset = f"-{offset}"
        return Address(operand(base), int(offset or "0", 0))
    if match := _FLOAT.match(text):
        return Immediate(int(match[1], 16))
    if _INTEGER.match(text):
        return Immediate(int(text.rstrip("U"), 0))
    if text.startswith("%") and "." not in text and text not in ("%laneid", "%warpid"):
        return Register(text[1:])
    return Symbol(text)


def _statements(body: str) -> tuple[list[Instruction], dict[str, int]]:
    instructions: list[Instruction] = []
    labels: dict[str, int] = {}
    for line in body.split("\n"):
        line = line.strip()
        while match := _LABEL.match(line):
            labels[match[1]] = len(instructions)
            line = line[match.end() :].strip()
        if not line or line.startswith("."):
            continue
        for statement in filter(None, map(str.strip, line.split(";"))):
            match = _STATEMENT.fullmatch(statement)
            if match is None:
                raise PtxError(f"not an instruction: {statement}")
            negation, guard, opcode, rest = match.groups()
            operands = tuple(operand(part) for part in _OPERAND.findall(rest))
            instructions.append(Instruction(opcode, operands, guard, negation == "!", statement))
    return instructions, labels


def _resolved(one: Instruction, labels: dict[str, int]) -> Instruction:
    if not one.opcode.startswith("bra"):
        return one
    label = one.operands[0]
    assert isinstance(label, Symbol)
    return Instruction(
        one.opcode, one.operands, one.guard, one.negated, one.text, labels[label.name]
    )


@lru_cache(maxsize=512)
def parse(ptx: str) -> Program:
    """The one kernel of a text.

    Raises:
        PtxError: there is none, or a line is no instruction.
    """
    text = _COMMENT.sub("", ptx)
    match = _ENTRY.search(text)
    if match is None:
        raise PtxError("no kernel in this text")
    name, params, _, body = match.groups()
    local = _LOCAL.search(body)
    instructions, labels = _statements(body)
    found = tuple(_resolved(one, labels) for one in instructions)
    return Program(
        name,
        {name: kind for kind, name in _PARAM.findall(params)},
        {letters: kind for kind, letters in _REGISTERS.findall(body)},
        (local[1], int(local[2])) if local else ("", 0),
        found,
        frozenset(one.target for one in found if one.target >= 0),
    )
