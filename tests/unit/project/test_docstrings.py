"""Docstrings name the arguments that functions have."""

import ast
import re
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[3] / "mp_optim"
FUNCTIONS = ast.FunctionDef | ast.AsyncFunctionDef


def arguments_of(node: ast.AST) -> set[str] | None:
    """Return the argument names of a function or of a class's constructor; None without one."""
    if isinstance(node, ast.ClassDef):
        named = (each for each in node.body if getattr(each, "name", "") == "__init__")
        node = next(named, node)
    if not isinstance(node, FUNCTIONS):
        return None
    given = node.args
    several = [each for each in (given.vararg, given.kwarg) if each is not None]
    return {each.arg for each in (*given.posonlyargs, *given.args, *given.kwonlyargs, *several)}


@pytest.mark.parametrize("path", sorted(PACKAGE.rglob("*.py")), ids=lambda path: path.stem)
def test_docstrings_describe_only_existing_arguments(path):
    unknown = []
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        doc = (
            ast.get_docstring(node) if isinstance(node, (*FUNCTIONS.__args__, ast.ClassDef)) else ""
        )
        if not doc or "Args:" not in doc or (names := arguments_of(node)) is None:
            continue
        section = doc.split("Args:", 1)[1].split("\n\n")[0]
        described = re.findall(r"^    \*{0,2}(\w+): ", section, re.MULTILINE)
        unknown += [f"{node.name}: {name}" for name in described if name not in names]  # type: ignore[union-attr]
    assert unknown == []
