#!/usr/bin/env python
"""Parts of ``megatron.core.optimizer`` that programs and plug-ins replace. Finds them in checkouts
without importing those; ``megatron_patches.json`` says what becomes of each with mp_optim.

python tools/megatron_patches.py CHECKOUT...           replaced parts that the list does not have
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterator
from pathlib import Path

import tyro

LIST = Path(__file__).with_suffix(".json")
ANSWERS = ("called", "read", "refused", "not needed")
"""What becomes of a replaced part: its result is used; its value or its object is read as it is; an
error names it; nothing that mp_optim does depends on it."""
_HOME = "megatron.core.optimizer"
_PATH = re.compile(rf"{re.escape(_HOME)}(\.\w+)+")
_CALLS = re.compile(r"(setattr|patch|patch\.object|\w*register\w*|\w*patch\w*)$")


def listed() -> dict[str, str]:
    parts: dict[str, str] = json.loads(LIST.read_text())
    return parts


def replaced_in(source: Path) -> set[str]:
    """Full names of the parts that the Python files below a folder assign to or patch.

    Raises:
        FileNotFoundError: there is no such folder.
    """
    if not source.is_dir():
        raise FileNotFoundError(f"{source}: no such folder")
    found: set[str] = set()
    for path in source.rglob("*.py"):
        text = path.read_text(errors="replace")
        is_test = {"tests", "test", "unit_tests"} & set(path.relative_to(source).parts)
        if "megatron" in text and not is_test:
            try:
                found.update(replaced_by(ast.parse(text)))
            except SyntaxError:
                continue  # templates and Python 2
    return found


def replaced_by(tree: ast.AST) -> Iterator[str]:
    names = dict(_imported(tree))
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign):
            for target in node.targets:
                if isinstance(target, ast.Attribute):
                    yield from _part(names, target)
        elif isinstance(node, ast.Call) and node.args and _CALLS.search(ast.unparse(node.func)):
            yield from _patched(names, node)


def _imported(tree: ast.AST) -> Iterator[tuple[str, str]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.asname and alias.name.startswith(_HOME):
                    yield alias.asname, alias.name
        elif isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                full = f"{node.module}.{alias.name}"
                if full.startswith(_HOME):
                    yield alias.asname or alias.name, full


def _part(names: dict[str, str], node: ast.expr) -> Iterator[str]:
    base, *rest = ast.unparse(node).split(".")
    full = ".".join([names.get(base, base), *rest])
    if rest and _PATH.fullmatch(full):
        yield full


def _patched(names: dict[str, str], node: ast.Call) -> Iterator[str]:
    first = node.args[0]
    if isinstance(first, ast.Constant) and isinstance(first.value, str):
        if _PATH.fullmatch(first.value):
            yield first.value
    elif len(node.args) > 1 and isinstance(node.args[1], ast.Constant):
        base, *rest = ast.unparse(first).split(".")
        full = ".".join([names.get(base, base), *rest, str(node.args[1].value)])
        if base in names and _PATH.fullmatch(full):
            yield full


def main(sources: tyro.conf.Positional[tuple[Path, ...]]) -> None:
    """Print the parts that checkouts replace and the list does not have."""
    known = listed()
    for source in sources:
        for part in sorted(replaced_in(source)):
            print(f"{source.name}: {part}: {known.get(part, 'NOT LISTED')}")


if __name__ == "__main__":
    tyro.cli(main)
