"""Small faults in a kernel's text, to see that a trial notices them."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

LIST = Path(__file__).with_name("mutants.json")
"""Faults that were drawn once, to be the same ones whenever they are tried."""

_ROUNDED = re.compile(r"\b(add|sub|mul|div|sqrt)\.rn\.(f32|f64)\b")
_TWO = re.compile(r"\b(sub\.\S+|div\.\S+|setp\.[lg][te]\S*)(\s+%\w+), (%\w+), (%\w+);")
_SOURCE = re.compile(r"\b((?:add|mul|sub)\.rn\.\w+\s+%\w+, %\w+, )%(rd?\d+);")
_IMMEDIATE = re.compile(r"\b((?:add|and|or|shl|shr|setp)\.\S+\s+%\w+, %\w+, )(-?\d+);")
_GUARD = re.compile(r"@(!?)(%p\d+) (?=ld|st|bra|\s*bra)")


@dataclass(frozen=True)
class Mutant:
    """Attributes:
    what: which fault, and where.
    text, original: the kernel with it, and without.
    """

    what: str
    text: str
    original: str


def _rounding(match: re.Match[str]) -> str:
    return f"{match[1]}.rz.{match[2]}"


def _swapped(match: re.Match[str]) -> str:
    return f"{match[1]}{match[2]}, {match[4]}, {match[3]};"


def _other_operand(match: re.Match[str]) -> str:
    first = match[1].rstrip(", ").rsplit(", ", 1)[1]
    return f"{match[1]}{first};"


def _other_number(match: re.Match[str]) -> str:
    """Without its lowest bit."""
    number = int(match[2])
    return f"{match[1]}{number & (number - 1) if number else 1};"


def _negated(match: re.Match[str]) -> str:
    return f"@{'' if match[1] else '!'}{match[2]} "


def _dropped(match: re.Match[str]) -> str:
    return ""


FAULTS: dict[str, tuple[re.Pattern[str], Callable[[re.Match[str]], str]]] = {
    "rounding": (_ROUNDED, _rounding),
    "operands swapped": (_TWO, _swapped),
    "another operand": (_SOURCE, _other_operand),
    "immediate": (_IMMEDIATE, _other_number),
    "predicate negated": (_GUARD, _negated),
    "guard dropped": (_GUARD, _dropped),
}


@dataclass(frozen=True)
class Drawn:
    """A fault of the list.

    Attributes:
        kernel: in whose text it is, when ``trial`` launches it.
        place: which of the text's places for it, as a share of them: texts change.
    """

    trial: str
    kernel: str
    fault: str
    place: float

    def mutant(self, ptx: str) -> Mutant | None:
        """The text with the fault; None if it has no place for it. Where the text would stay as it
        is (the square of a number has no other operand), there is none."""
        pattern, change = FAULTS[self.fault]
        places = [match for match in pattern.finditer(ptx) if change(match) != match[0]]
        if not places:
            return None
        match = places[int(self.place * len(places))]
        changed = ptx[: match.start()] + change(match) + ptx[match.end() :]
        line = ptx.count("\n", 0, match.start()) + 1
        return Mutant(f"{self.fault}, line {line}: {match[0].strip()}", changed, ptx)


def read(file: Path = LIST) -> list[Drawn]:
    """The faults that trials have to notice."""
    return [Drawn(**row) for row in json.loads(file.read_text())]
