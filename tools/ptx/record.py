"""What was found of the GPU kernels, by target, in one file: the tables of docs/gpu.md are made
from it, and ``tools/gpu_check.py --first-hour`` compares a GPU with its predictions."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

FILE = Path(__file__).resolve().parents[2] / "docs" / "gpu.json"
PAGE = FILE.with_suffix(".md")
TARGETS = {
    "sm_80": "A100",
    "sm_90": "H100",
    "sm_100": "B200",
    "sm_120": "RTX 50",
    "gfx942": "MI300X",
    "gfx950": "MI355X",
}
"""Targets, and a card that each is of."""
KNOWN = {
    "compiled": "compiled",
    "executed": "executed from PTX, the bits of `reference`",
    "proven": "proven by the library's self-test, on PTX",
    "read": "machine code or ISA read",
    "predicted": "time",
    "measured": "measured",
}
"""What may be known of a target."""
_MADE = re.compile(r"(<!-- made: (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)


def load() -> dict[str, Any]:
    """What is recorded: ``targets``, by target and what is known; ``tables``, heads and rows by
    name."""
    found: dict[str, Any] = json.loads(FILE.read_text())
    return found


def note(target: str, what: str, said: str) -> None:
    """Record what is known of a target."""
    assert target in TARGETS and what in KNOWN, (target, what)
    found = load()
    found["targets"].setdefault(target, {})[what] = said
    _write(found)


def note_table(name: str, heads: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    """Record a table."""
    found = load()
    found["tables"][name] = {"heads": list(heads), "rows": [list(map(str, row)) for row in rows]}
    _write(found)


def _write(found: dict[str, Any]) -> None:
    targets = {target: found["targets"][target] for target in TARGETS if target in found["targets"]}
    tables = [
        f'  {json.dumps(name)}: {{"heads": {json.dumps(one["heads"])}, "rows": [\n'
        + ",\n".join(f"   {json.dumps(row)}" for row in one["rows"])
        + "\n  ]}"
        for name, one in found["tables"].items()
    ]
    text = json.dumps(targets, indent=2).replace("\n", "\n ")
    FILE.write_text(f'{{\n "targets": {text},\n "tables": {{\n' + ",\n".join(tables) + "\n }\n}\n")


def page(text: str) -> str:
    """The page with every made part made anew."""
    found = load()

    def made(match: re.Match[str]) -> str:
        name = match[2]
        if name == "targets":
            lines = table(["", *_heads()], _by_target(found["targets"]))
        else:
            lines = table(found["tables"][name]["heads"], found["tables"][name]["rows"])
        return match[1] + "\n".join(lines) + "\n" + match[3]

    return _MADE.sub(made, text)


def table(heads: Sequence[str], rows: Iterable[Sequence[object]]) -> Iterator[str]:
    """Lines of Markdown."""
    yield from ("", f"| {' | '.join(heads)} |", "|---" * len(heads) + "|")
    for row in rows:
        yield f"| {' | '.join(map(str, row))} |"


def _heads() -> list[str]:
    return [f"{target} ({card})" for target, card in TARGETS.items()]


def _by_target(targets: dict[str, dict[str, str]]) -> Iterator[list[str]]:
    for what, words in KNOWN.items():
        yield [words, *(targets.get(target, {}).get(what, "never") for target in TARGETS)]
