#!/usr/bin/env python
"""How hard the package is to read, in numbers. Prints a table, a column for each checkout, and how
large the rooms of the first one are.

python tools/measure_code.py . ../before
"""

from __future__ import annotations

import ast
import io
import os
import shutil
import subprocess
import sys
import tempfile
import tokenize
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median, quantiles
from typing import Annotated

import tyro
from rich.console import Console
from rich.table import Table

PACKAGE = "mp_optim"
COLUMNS = 100
RULE = "lion"
"""The rule whose name is looked for: the files that have it are those that adding a rule edits."""
STEPS = {"Optimizer", "HostPart"}
"""What everything that steps is below of: torch's class, and the package's own."""
_LAYOUT = {
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.COMMENT,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENDMARKER,
}
_KERNELS = ("native", "triton", "multi_tensor")
"""Backends that have kernels for a rule because they want to, in names of their files."""
_FOREIGN = {
    "__create_chunk_list__",
    "__get_tensor_shard__",
    "config",
    "dim",
    "dtype",
    "grad_dtype",
    "host",
    "lr",
    "main_param",
    "name",
    "port",
    "shape",
    "size",
    "use_distributed_optimizer",
    "wait",
}
"""Attributes that objects of torch, Megatron and Hugging Face are asked for, and that classes of
the package happen to have too."""
_COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


@dataclass(frozen=True)
class Module:
    """A module of the package: its text, as lines and as a tree."""

    path: Path
    text: str
    tree: ast.Module

    @classmethod
    def read(cls, path: Path) -> Module:
        text = path.read_text(encoding="utf-8")
        return cls(path, text, ast.parse(text))

    def docstrings(self) -> set[int]:
        """The lines of strings that are statements."""
        lines: set[int] = set()
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Expr) and _is_text(node.value):
                lines.update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
        return lines

    def tokens(self) -> dict[int, int]:
        """How many tokens of code start in each line that has any."""
        skipped = self.docstrings()
        count: dict[int, int] = defaultdict(int)
        for token in tokenize.generate_tokens(io.StringIO(self.text).readline):
            if token.type not in _LAYOUT and token.start[0] not in skipped:
                count[token.start[0]] += 1
        return count


@dataclass
class Figures:
    """What is measured of one checkout."""

    values: dict[str, str] = field(default_factory=dict)

    def __setitem__(self, name: str, value: float | str) -> None:
        self.values[name] = f"{value:.1f}" if isinstance(value, float) else str(value)


def measure(root: Path) -> Figures:
    """The figures of the checkout at ``root``."""
    modules = [Module.read(path) for path in sorted((root / PACKAGE).rglob("*.py"))]
    figures = Figures()
    count_classes(modules, figures)
    alike = formatted_alike(root)
    figures["lines, formatted alike"] = sum(m.text.count("\n") for m in alike)
    figures["of code: no docstrings, no comments"] = sum(len(m.tokens()) for m in alike)
    _size(modules, figures)
    _density(modules, figures)
    figures["getattr and hasattr for attributes of our own"] = len(list(probes(modules)))
    figures[f"files that name {RULE}"] = len(list(files_naming(modules, RULE)))
    forms = forms_of_an_update(root)
    figures["forms of an update"] = len(forms)
    figures["which"] = ", ".join(forms)
    return figures


def rooms(root: Path) -> dict[str, list[Module]]:
    """The modules of the checkout by their folder in the package; what lies in none comes by its
    own name."""
    found: dict[str, list[Module]] = defaultdict(list)
    for path in sorted((root / PACKAGE).rglob("*.py")):
        found[path.relative_to(root / PACKAGE).with_suffix("").parts[0]].append(Module.read(path))
    return found


def table_of_rooms(root: Path) -> Table:
    """What each room of the checkout has, the largest first."""
    rows = []
    for name, modules in rooms(root).items():
        nodes = [node for module in modules for node in ast.walk(module.tree)]
        rows.append(
            (
                sum(len(module.tokens()) for module in modules),
                sum(module.text.count("\n") for module in modules),
                len(modules),
                sum(isinstance(node, ast.ClassDef) for node in nodes),
                sum(isinstance(node, _FUNCTIONS) for node in nodes),
                name,
            )
        )
    table = Table("room", "lines of code", "lines", "files", "classes", "functions")
    for *figures, name in sorted(rows, reverse=True):
        table.add_row(name, *map(str, figures))
    return table


def _size(modules: list[Module], figures: Figures) -> None:
    figures["lines of Python"] = sum(module.text.count("\n") for module in modules)
    figures["lines of code"] = sum(len(module.tokens()) for module in modules)
    figures["statements"] = sum(_statements(module.tree) for module in modules)
    lengths = sorted(_function_lengths(modules))
    tail = quantiles(lengths, n=20)[-1]
    figures["function lines: median / p95 / max"] = (
        f"{median(lengths):g} / {tail:g} / {lengths[-1]}"
    )


def count_classes(modules: list[Module], figures: Figures) -> None:
    """How much there is, and how it is divided."""
    hierarchy = Hierarchy(modules)
    functions = [n for m in modules for n in ast.walk(m.tree) if isinstance(n, _FUNCTIONS)]
    figures["lines of Python"] = sum(module.text.count("\n") for module in modules)
    figures["lines of code"] = sum(len(module.tokens()) for module in modules)
    figures["files"] = len(modules)
    figures["classes"] = len(hierarchy.bases)
    figures["functions"] = len(functions)
    protocols = [name for name in hierarchy.bases if "Protocol" in hierarchy.outer_bases(name)]
    figures["Protocols"] = len(protocols)
    stepping = [name for name in hierarchy.bases if STEPS & hierarchy.all_names(name)]
    chain = max((hierarchy.chain(name) for name in stepping), key=len, default=[])
    figures["deepest inheritance of what steps"] = f"{len(chain)} ({' < '.join(chain)})"
    rules = [
        name
        for name in hierarchy.bases
        if name[0].split(".")[1:2] in (["rules"], ["muon"]) and "apply" in hierarchy.visible(name)
    ]
    for title, names in (("widest rule", rules), ("widest class", list(hierarchy.bases))):
        widest = max(names, key=lambda name: len(hierarchy.visible(name)))
        figures[f"methods on the {title}"] = f"{len(hierarchy.visible(widest))} ({widest[1]})"


def formatted_alike(root: Path) -> list[Module]:
    """Return the package without its commands, formatted at the formatter's own width, so that the
    widths of checkouts do not count."""
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / PACKAGE
        shutil.copytree(root / PACKAGE, copy, ignore=shutil.ignore_patterns("cli", "doctor.py"))
        subprocess.run(["ruff", "format", "--isolated", "--quiet", folder], check=True)
        paths = sorted(copy.rglob("*.py"))
        return [Module.read(path) for path in paths]


def _statements(tree: ast.Module) -> int:
    return sum(isinstance(node, ast.stmt) for node in ast.walk(tree))


def _function_lengths(modules: list[Module]) -> Iterator[int]:
    """Lines with code of each function, signature included, docstring not."""
    for module in modules:
        code = module.tokens()
        for node in ast.walk(module.tree):
            if isinstance(node, _FUNCTIONS):
                last = node.end_lineno or node.lineno
                yield sum(line in code for line in range(node.lineno, last + 1))


def _density(modules: list[Module], figures: Figures) -> None:
    counts = [count for module in modules for count in module.tokens().values()]
    figures["tokens a line"] = sum(counts) / len(counts)
    lines = [line for module in modules for line in module.text.splitlines()]
    share = sum(len(line) > COLUMNS for line in lines) / len(lines)
    figures[f"lines over {COLUMNS} columns"] = f"{share:.1%}"
    figures["statements with several comprehensions"] = len(list(crowded(modules)))


def crowded(modules: list[Module]) -> Iterator[str]:
    """Where a statement has more than one comprehension."""
    for module in modules:
        for node in ast.walk(module.tree):
            if isinstance(node, ast.stmt) and not hasattr(node, "body"):
                inside = sum(isinstance(part, _COMPREHENSIONS) for part in ast.walk(node))
                if inside > 1:
                    yield f"{module.path}:{node.lineno}"


def probes(modules: list[Module]) -> Iterator[str]:
    """Where ``hasattr``, or ``getattr`` with a default, asks for an attribute that a class of the
    package has: what could be declared is probed instead."""
    declared = set().union(*(_attributes(module.tree) for module in modules)) - _FOREIGN
    for module in modules:
        for node in ast.walk(module.tree):
            name = _probed(node)
            if name in declared:
                yield f"{module.path}:{getattr(node, 'lineno', 0)}: {name}"


def _is_text(node: ast.AST) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, str)


def _is_set_on_self(node: ast.AST) -> bool:
    stored = isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)
    return stored and isinstance(node.value, ast.Name) and node.value.id == "self"


def _probed(node: ast.AST) -> str | None:
    """The attribute that a call asks an object for, if the object may be without it."""
    if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Name)):
        return None
    if (node.func.id, len(node.args)) not in (("hasattr", 2), ("getattr", 3)):
        return None
    name = node.args[1]
    return name.value if isinstance(name, ast.Constant) else None


def _attributes(tree: ast.Module) -> set[str]:
    """Names of what classes define, and of what methods set on ``self``."""
    names: set[str] = set()
    for owner in ast.walk(tree):
        if isinstance(owner, ast.ClassDef):
            for node in ast.walk(owner):
                if isinstance(node, _FUNCTIONS):
                    names.add(node.name)
                elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                    names.add(node.target.id)
                elif _is_set_on_self(node):
                    names.add(node.attr)
    return names


Class = tuple[str, str]
"""A class: the name of its module, and its own."""


class Hierarchy:
    """The classes of the package, and what they inherit from.

    Attributes:
        bases: of each class, as written. methods: of each class, its own functions.
    """

    def __init__(self, modules: list[Module]) -> None:
        self.bases: dict[Class, list[str]] = {}
        self.methods: dict[Class, set[str]] = {}
        self._imported: dict[Class, Class] = {}
        for module in modules:
            name = _dotted(module.path)
            for node in ast.walk(module.tree):
                if isinstance(node, ast.ClassDef):
                    self.bases[name, node.name] = [_base(base) for base in node.bases]
                    functions = [part for part in node.body if isinstance(part, _FUNCTIONS)]
                    self.methods[name, node.name] = {function.name for function in functions}
                elif isinstance(node, ast.ImportFrom) and node.module:
                    for part in node.names:
                        self._imported[name, part.asname or part.name] = node.module, part.name

    def _resolved(self, module: str, base: str) -> Class | None:
        """The class of the package that a name stands for in a module; None for another's."""
        found = module, base
        while found not in self.bases:
            if found not in self._imported:
                return None
            found = self._imported[found]
        return found

    def parents(self, name: Class) -> list[Class]:
        """The bases that are classes of the package."""
        found = [self._resolved(name[0], base) for base in self.bases[name]]
        return [parent for parent in found if parent is not None]

    def outer_bases(self, name: Class) -> set[str]:
        """Last parts of the names of the other bases."""
        bases = self.bases[name]
        return {base.split(".")[-1] for base in bases if self._resolved(name[0], base) is None}

    def all_names(self, name: Class) -> set[str]:
        """Names of everything that a class inherits from, and its own."""
        above = (self.all_names(parent) for parent in self.parents(name))
        return {name[1], *self.outer_bases(name)}.union(*above)

    def chain(self, name: Class) -> list[str]:
        """The longest way up from a class within the package."""
        above = (self.chain(parent) for parent in self.parents(name))
        return [name[1], *max(above, key=len, default=[])]

    def visible(self, name: Class) -> set[str]:
        """Methods and properties of a class, those of its bases in the package counted."""
        return self.methods[name].union(*map(self.visible, self.parents(name)))


def _dotted(path: Path) -> str:
    parts = path.with_suffix("").parts
    inside = parts[len(parts) - parts[::-1].index(PACKAGE) - 1 :]
    return ".".join(inside).removesuffix(".__init__")


def _base(node: ast.expr) -> str:
    return ast.unparse(node).split("[")[0]


def files_naming(modules: list[Module], rule: str) -> Iterator[Path]:
    """The modules whose code, comments and docstrings left out, names a rule; those that bring its
    kernels apart."""
    for module in modules:
        if any(backend in str(module.path) for backend in _KERNELS):
            continue
        skipped = module.docstrings()
        for token in tokenize.generate_tokens(io.StringIO(module.text).readline):
            named = rule in token.string.lower() and token.type != tokenize.COMMENT
            if named and token.start[0] not in skipped:
                yield module.path
                break


def forms_of_an_update(root: Path) -> list[str]:
    """The classes whose objects hold a gradient in a step on the host, in the order in which it
    gets there; see :mod:`measuring.forms`."""
    environment = {**os.environ, "PYTHONPATH": str(root.resolve())}
    script = Path(__file__).with_name("measuring") / "forms.py"
    run = [sys.executable, str(script)]
    done = subprocess.run(run, env=environment, capture_output=True, text=True, check=True)
    return done.stdout.split()


HERE = Path(__file__).resolve().parents[1]


def main(roots: Annotated[tuple[Path, ...], tyro.conf.Positional] = (HERE,)) -> None:
    """Measure checkouts.

    Args:
        roots: the checkouts, the newest first; by default this one.
    """
    columns = [measure(root).values for root in roots]
    table = Table(*["", *map(str, roots)])
    for name in columns[0]:
        table.add_row(name, *(column.get(name, "") for column in columns))
    console = Console(width=None if sys.stdout.isatty() else 160)
    console.print(table)
    console.print(table_of_rooms(roots[0]))


if __name__ == "__main__":
    tyro.cli(main)
