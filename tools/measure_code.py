#!/usr/bin/env python
"""Print how large the package is: a column for each checkout, and the rooms of the first one.

python tools/measure_code.py . ../before

Lines of code have no docstring, no comment and no blank.
"""

from __future__ import annotations

import ast
import io
import sys
import tokenize
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from statistics import median, quantiles
from typing import Annotated

import tyro
from rich.console import Console
from rich.table import Table

PACKAGE = "mp_optim"
_LAYOUT = {
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.COMMENT,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENDMARKER,
}
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


@dataclass(frozen=True)
class Module:
    """The text of one module."""

    text: str

    @cached_property
    def nodes(self) -> list[ast.AST]:
        return [*ast.walk(ast.parse(self.text))]

    @cached_property
    def code(self) -> set[int]:
        strings: set[int] = set()
        for node in self.nodes:
            match node:
                case ast.Expr(value=ast.Constant(value=str())):
                    strings.update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
        tokens = tokenize.generate_tokens(io.StringIO(self.text).readline)
        return {token.start[0] for token in tokens if token.type not in _LAYOUT} - strings

    def count(self, *kinds: type[ast.AST]) -> int:
        """Return how many nodes are of these kinds."""
        return sum(isinstance(node, kinds) for node in self.nodes)

    def function_lengths(self) -> Iterator[int]:
        """Yield the lines of code of each function, with its signature."""
        for node in self.nodes:
            if isinstance(node, _FUNCTIONS):
                last = node.end_lineno or node.lineno
                yield sum(line in self.code for line in range(node.lineno, last + 1))


def rooms_of(root: Path) -> dict[str, list[Module]]:
    """Return the modules of a checkout by their folder in the package, or by their own name."""
    found: dict[str, list[Module]] = defaultdict(list)
    for path in sorted((root / PACKAGE).rglob("*.py")):
        room = path.relative_to(root / PACKAGE).with_suffix("").parts[0]
        found[room].append(Module(path.read_text(encoding="utf-8")))
    return found


def figures_of(modules: list[Module]) -> dict[str, str]:
    """Return the figures of some modules by name."""
    return {
        "lines of code": str(sum(len(module.code) for module in modules)),
        "lines": str(sum(module.text.count("\n") for module in modules)),
        "files": str(len(modules)),
        "classes": str(sum(module.count(ast.ClassDef) for module in modules)),
        "functions": str(sum(module.count(*_FUNCTIONS) for module in modules)),
    }


def measure(root: Path) -> dict[str, str]:
    """Return the figures of a checkout by name."""
    rooms = rooms_of(root)
    modules = [module for room in rooms.values() for module in room]
    lengths = sorted(length for module in modules for length in module.function_lengths())
    tail = quantiles(lengths, n=20)[-1]
    sources = [path for end in ("cpp", "inl", "h") for path in root.glob(f"{PACKAGE}/**/*.{end}")]
    outside = [module for name, room in rooms.items() if name != "apps" for module in room]
    return {
        **figures_of(modules),
        "lines of code outside apps": str(sum(len(module.code) for module in outside)),
        "function lines: median / p95 / max": f"{median(lengths):g} / {tail:g} / {lengths[-1]}",
        "lines of C++": str(sum(path.read_text().count("\n") for path in sources)),
        **{
            f"lines of {folder}": str(
                sum(path.read_text().count("\n") for path in (root / folder).rglob("*.py"))
            )
            for folder in ("tests", "tools")
        },
    }


def table_of_rooms(root: Path) -> Table:
    """Return the figures of each room of a checkout, the largest first."""
    rooms = {name: figures_of(modules) for name, modules in rooms_of(root).items()}
    table = Table("room", *rooms["core"])
    for name, figures in sorted(rooms.items(), key=lambda one: -int(one[1]["lines of code"])):
        table.add_row(name, *figures.values())
    return table


def main(roots: Annotated[tuple[Path, ...], tyro.conf.Positional] = (Path(),)) -> None:
    """Measure checkouts.

    Args:
        roots: the checkouts, the newest first.
    """
    columns = [measure(root) for root in roots]
    table = Table("", *map(str, roots))
    for name in columns[0]:
        table.add_row(name, *(column[name] for column in columns))
    console = Console(width=None if sys.stdout.isatty() else 160)
    console.print(table)
    console.print(table_of_rooms(roots[0]))


if __name__ == "__main__":
    tyro.cli(main)
