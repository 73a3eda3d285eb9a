"""Remove one wait, ``record_stream`` or device guard at a time from the package."""

import ast
import importlib
import inspect
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import CodeType, FrameType, FunctionType
from typing import Any

_WAITS = (
    "_wait",
    "collect",
    "drain",
    "join",
    "record_stream",
    "set_device",
    "synchronize",
    "wait",
    "wait_event",
    "wait_for",
    "wait_for_devices",
    "wait_stream",
    "wait_until_free",
)
"""Methods that are called for their effect only."""
_Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True)
class Site:
    """Call number ``number`` of a function, which a test removes."""

    module: str
    function: str
    number: int
    text: str

    def __str__(self) -> str:
        return f"{self.module.rpartition('.')[2]}.{self.function}: {self.text}"


class _Remover(ast.NodeTransformer):
    """A syntax-tree transformer that lists the sites of a function and removes the chosen site."""

    def __init__(self, chosen: int | None = None) -> None:
        self.texts: list[str] = []
        self._chosen = chosen

    def _takes(self, node: ast.AST) -> bool:
        self.texts.append(ast.unparse(node))
        return len(self.texts) - 1 == self._chosen

    def visit_Expr(self, node: ast.Expr) -> ast.AST:
        if _calls(node.value, _WAITS) and self._takes(node):
            return ast.copy_location(ast.Pass(), node)
        return self.generic_visit(node)

    def visit_With(self, node: ast.With) -> Any:
        kept = [
            item
            for item in node.items
            if not (_is_of_accelerator(item.context_expr) and self._takes(item.context_expr))
        ]
        self.generic_visit(node)
        if kept:
            node.items = kept
            return node
        return node.body


def _is_of_accelerator(node: ast.expr) -> bool:
    """True if a ``with`` block sets a device or a stream, as ``accelerator.on(...)`` does."""
    owner = node.func.value if _calls(node, ("on", "queue_on")) else None  # type: ignore[attr-defined]
    return owner is not None and ast.unparse(owner).lower().endswith("accelerator")


def _calls(node: ast.expr, names: tuple[str, ...]) -> bool:
    is_method = isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)
    return is_method and node.func.attr in names


def _tree(module: str) -> ast.Module:
    return ast.parse(inspect.getsource(importlib.import_module(module)))


def _functions(tree: ast.Module) -> Iterator[tuple[str, _Function]]:
    for node in tree.body:
        if isinstance(node, _Function):
            yield node.name, node
        elif isinstance(node, ast.ClassDef):
            for inner in node.body:
                if isinstance(inner, _Function):
                    yield f"{node.name}.{inner.name}", inner


def sites(module: str) -> list[Site]:
    found = []
    for name, node in _functions(_tree(module)):
        remover = _Remover()
        remover.visit(node)
        found += [Site(module, name, n, text) for n, text in enumerate(remover.texts)]
    return found


def _live(module: str, name: str) -> FunctionType:
    value: Any = importlib.import_module(module)
    for part in name.split("."):
        value = vars(value)[part]
    value = value.fget if isinstance(value, property) else value
    function = inspect.unwrap(getattr(value, "__func__", value))
    assert isinstance(function, FunctionType)
    return function


def _compiled(tree: ast.Module, module: str, name: str) -> CodeType:
    file = inspect.getsourcefile(importlib.import_module(module))
    code = compile(ast.fix_missing_locations(tree), str(file), "exec", dont_inherit=True)
    for part in name.split("."):
        inner = (c for c in code.co_consts if isinstance(c, CodeType) and c.co_name == part)
        code = next(inner)
    return code


@contextmanager
def called(sites: Sequence[Site]) -> Iterator[set[Site]]:
    sites_of: dict[CodeType, list[Site]] = {}
    for site in sites:
        sites_of.setdefault(_live(site.module, site.function).__code__, []).append(site)
    found: set[Site] = set()

    def look(frame: FrameType, event: str, _: object) -> None:
        if event == "call" and frame.f_code in sites_of:
            found.update(sites_of[frame.f_code])

    threading.setprofile(look)
    sys.setprofile(look)
    try:
        yield found
    finally:
        sys.setprofile(None)
        threading.setprofile(None)


@contextmanager
def without(site: Site) -> Iterator[None]:
    tree, remover = _tree(site.module), _Remover(site.number)
    remover.visit(dict(_functions(tree))[site.function])
    function = _live(site.module, site.function)
    before = function.__code__
    function.__code__ = _compiled(tree, site.module, site.function)
    try:
        yield
    finally:
        function.__code__ = before
