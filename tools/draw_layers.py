#!/usr/bin/env python
"""The picture of docs/decisions.md: which module imports which, as a Mermaid diagram. Prints it.

python tools/draw_layers.py
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import grimp

try:
    import tomllib
except ImportError:  # Python 3.10
    import tomli as tomllib

PACKAGE = "mp_optim"
ROOT = Path(__file__).parents[1]
OLD_NAMES = {"doctor", "float8"}
"""Modules that only lead to others."""


def main() -> None:
    print("\n".join(diagram()))


def layers() -> list[list[str]]:
    """Modules by layer, the uppermost first, as the import linter is told."""
    with (ROOT / "pyproject.toml").open("rb") as file:
        contract, *_ = tomllib.load(file)["tool"]["importlinter"]["contracts"]
    return [
        [name.strip().removeprefix(f"{PACKAGE}.") for name in line.split(":")]
        for line in contract["layers"]
    ]


def imports() -> dict[str, set[str]]:
    """What each of these modules imports of the others, directly or in one of its own modules."""
    graph = grimp.build_graph(PACKAGE)
    names = [name for layer in layers() for name in layer if name not in OLD_NAMES]
    for name in names:
        if graph.find_children(f"{PACKAGE}.{name}"):
            graph.squash_module(f"{PACKAGE}.{name}")
    direct = {name: graph.find_modules_directly_imported_by(f"{PACKAGE}.{name}") for name in names}
    return {
        name: {
            short
            for other in others
            if (short := other.removeprefix(f"{PACKAGE}.")) in names and short != name
        }
        for name, others in direct.items()
    }


def _needed(name: str, found: dict[str, set[str]]) -> list[str]:
    """Imports of a module that do not follow from those of what it imports."""

    def beyond(start: str) -> set[str]:
        return found[start].union(*map(beyond, found[start]))

    return sorted(
        other for other in found[name] if not any(other in beyond(third) for third in found[name])
    )


def diagram() -> Iterator[str]:
    """The lines; an arrow that follows from others is left out."""
    found = imports()
    yield "flowchart TD"
    for name in found:
        yield f'    {name}["{name}"]'
    for name in found:
        yield from (f"    {name} --> {other}" for other in _needed(name, found))


if __name__ == "__main__":
    main()
