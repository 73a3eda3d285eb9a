"""The faults: what can be changed in a source file, one small change each.

Found on the syntax tree, made in the text, so that everything else stays as it is. Left alone is
what no test could see or what every test would: annotations, docstrings, ``assert``, f-strings, the
words of errors, ``__all__``, stubs.
"""

from __future__ import annotations

import ast
import copy
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

__all__ = ["Mutant", "mutants_of"]

_OPPOSITE: dict[type[ast.AST], type[ast.AST]] = {
    ast.Lt: ast.GtE,
    ast.GtE: ast.Lt,
    ast.Gt: ast.LtE,
    ast.LtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
}
_BOUNDARY: dict[type[ast.AST], type[ast.AST]] = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
}
_ARITHMETIC: dict[type[ast.AST], type[ast.AST]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.FloorDiv,
    ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mult,
    ast.Mod: ast.Add,
    ast.Pow: ast.Mult,
    ast.LShift: ast.RShift,
    ast.RShift: ast.LShift,
    ast.BitAnd: ast.BitOr,
    ast.BitOr: ast.BitAnd,
    ast.BitXor: ast.BitAnd,
}
_CALLS = {"any": "all", "all": "any", "min": "max", "max": "min"}
_KEPT_DECORATORS = {
    "abstractmethod",
    "overload",
    "property",
    "staticmethod",
    "classmethod",
    "setter",
    "dataclass",
}
_CHANGED = (
    ast.Compare,
    ast.BoolOp,
    ast.UnaryOp,
    ast.BinOp,
    ast.Constant,
    ast.IfExp,
    ast.Call,
    ast.ListComp,
    ast.SetComp,
    ast.DictComp,
    ast.GeneratorExp,
)
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


@dataclass(frozen=True)
class Mutant:
    """One fault.

    Attributes:
        path: of the file, from the root. function: qualified name of where it is; empty at a
            module's top.
        operator: what kind of fault. old, new: the text.
        nth: which of the equal faults of that function it is, so that it is found again in another
            version.
        first, last: lines of the changed text. statement: first line of the statement around it.
        start, end: where the text lies in the file, in bytes.
        names: what the statement defines, if it runs when the module is imported; else nothing.
    """

    path: str
    function: str
    operator: str
    old: str
    new: str
    nth: int
    first: int
    last: int
    statement: int
    start: int
    end: int
    names: tuple[str, ...]

    @property
    def key(self) -> tuple[str, str, str, str, str, int]:
        """What it is called in every version of the file that has it."""
        return self.path, self.function, self.operator, self.old, self.new, self.nth

    def applied(self, source: str) -> str:
        """The file with the fault."""
        raw = source.encode()
        return (raw[: self.start] + self.new.encode() + raw[self.end :]).decode()


def mutants_of(path: str, source: str) -> list[Mutant]:
    """Every fault for a file, in the order of its text."""
    found = _Finder(path, source)
    found.body(ast.parse(source).body, None)
    return found.mutants


class _Finder:
    """A walk over a syntax tree that knows in which function and statement it is."""

    def __init__(self, path: str, source: str) -> None:
        self.mutants: list[Mutant] = []
        self._path, self._raw = path, source.encode()
        self._starts = [0]
        for line in self._raw.splitlines(keepends=True):
            self._starts.append(self._starts[-1] + len(line))
        self._scope: list[str] = []
        self._depth = 0
        self._statement: ast.stmt | None = None
        self._seen: Counter[tuple[str, str, str, str]] = Counter()

    # -- walking --------------------------------------------------------------------------------

    def body(self, statements: list[ast.stmt], owner: ast.AST | None) -> None:
        for statement in statements:
            self._statement = statement
            if isinstance(statement, (*_FUNCTIONS, ast.ClassDef)):
                self._definition(statement)
            elif not _is_left_alone(statement):
                self._change_statement(statement)
                self._parts(statement)

    def _definition(self, node: ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) -> None:
        decorators = [_name_of(decorator) for decorator in node.decorator_list]
        if "overload" in decorators or "abstractmethod" in decorators:
            return
        self._scope.append(node.name)
        for name, decorator in zip(decorators, node.decorator_list, strict=True):
            if name not in _KEPT_DECORATORS:
                at = self._raw.rindex(b"@", 0, self._offset(decorator.lineno, decorator.col_offset))
                self._add("dropped decorator", decorator, "", at)
        if isinstance(node, _FUNCTIONS):
            for default in [*node.args.defaults, *node.args.kw_defaults]:
                if default is not None:
                    self._expression(default)
            self._depth += 1
        self.body(node.body, node)
        self._depth -= isinstance(node, _FUNCTIONS)
        self._scope.pop()

    def _parts(self, statement: ast.stmt) -> None:
        for name, value in ast.iter_fields(statement):
            if name == "annotation" or isinstance(statement, ast.Raise):
                continue
            for part in value if isinstance(value, list) else [value]:
                if isinstance(part, ast.expr):
                    self._expression(part)
                elif isinstance(part, ast.excepthandler):
                    self.body(part.body, part)
                elif isinstance(part, ast.withitem):
                    self._expression(part.context_expr)
            if value and isinstance(value, list) and isinstance(value[0], ast.stmt):
                self.body(value, statement)
                self._statement = statement

    def _expression(self, node: ast.expr) -> None:
        if isinstance(node, ast.JoinedStr):
            return
        for kind, changed in _changes(node):
            self._add(kind, node, f"({ast.unparse(ast.fix_missing_locations(changed))})")
        for child in ast.iter_child_nodes(node):
            inner = (
                ast.iter_child_nodes(child)
                if isinstance(child, ast.comprehension | ast.keyword)
                else [child]
            )
            for part in inner:
                if isinstance(part, ast.expr):
                    self._expression(part)

    # -- faults -----------------------------------------------------------------------------------

    def _change_statement(self, node: ast.stmt) -> None:
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
            self._add("removed call", node, "pass")
        elif isinstance(node, ast.AugAssign) or (
            isinstance(node, ast.Assign)
            and isinstance(node.targets[0], ast.Attribute | ast.Subscript)
        ):
            self._add("removed assignment", node, "pass")
        elif isinstance(node, ast.Raise):
            self._add("removed raise", node, "pass")
        elif isinstance(node, ast.Return) and not _is_none(node.value):
            self._add("returned None", node, "return None")
        elif isinstance(node, ast.Continue | ast.Break):
            self._add("other jump", node, "break" if isinstance(node, ast.Continue) else "continue")
        elif isinstance(node, ast.If | ast.While) and not isinstance(
            node.test, ast.Compare | ast.BoolOp | ast.UnaryOp
        ):
            self._add("negated condition", node.test, f"(not ({ast.unparse(node.test)}))")

    def _add(
        self, operator: str, node: ast.expr | ast.stmt, new: str, start: int | None = None
    ) -> None:
        assert (
            node.end_lineno is not None
            and node.end_col_offset is not None
            and self._statement is not None
        )
        start = self._offset(node.lineno, node.col_offset) if start is None else start
        end = self._offset(node.end_lineno, node.end_col_offset)
        old, function = self._raw[start:end].decode(), ".".join(self._scope)
        kind = (function, operator, old, new)
        names = (
            ()
            if self._depth and not isinstance(self._statement, _FUNCTIONS)
            else _defined(self._statement)
        )
        self.mutants.append(
            Mutant(
                self._path,
                function,
                operator,
                old,
                new,
                self._seen[kind],
                node.lineno,
                node.end_lineno,
                self._statement.lineno,
                start,
                end,
                names,
            )
        )
        self._seen[kind] += 1

    def _offset(self, line: int, column: int) -> int:
        return self._starts[line - 1] + column


def _changes(node: ast.expr) -> Iterator[tuple[str, ast.expr]]:
    """Each fault of one expression, its parts apart."""
    if not isinstance(node, _CHANGED):
        return
    made = copy.deepcopy(node)
    if isinstance(made, ast.Compare):
        yield from _comparisons(made)
    elif isinstance(made, ast.BoolOp):
        made.op = ast.Or() if isinstance(made.op, ast.And) else ast.And()
        yield "and/or", made
    elif isinstance(made, ast.UnaryOp):
        yield (("removed not" if isinstance(made.op, ast.Not) else "removed sign"), made.operand)
    elif isinstance(made, ast.BinOp) and type(made.op) in _ARITHMETIC:
        made.op = _ARITHMETIC[type(made.op)]()  # type: ignore[assignment]
        yield "arithmetic", made
    elif isinstance(made, ast.Constant):
        yield from _constants(made)
    elif isinstance(made, ast.IfExp):
        made.body, made.orelse = made.orelse, made.body
        yield "swapped branches", made
    elif isinstance(made, ast.Call):
        yield from _calls(made)
    elif isinstance(made, ast.ListComp | ast.SetComp | ast.DictComp | ast.GeneratorExp):
        for index, part in enumerate(made.generators):
            if part.ifs:
                other = copy.deepcopy(made)
                other.generators[index].ifs = []
                yield "dropped filter", other


def _comparisons(node: ast.Compare) -> Iterator[tuple[str, ast.expr]]:
    for index, operator in enumerate(node.ops):
        for kind, table in (("comparison boundary", _BOUNDARY), ("opposite comparison", _OPPOSITE)):
            if type(operator) in table:
                made = copy.deepcopy(node)
                made.ops[index] = table[type(operator)]()  # type: ignore[call-overload]
                yield kind, made


def _constants(node: ast.Constant) -> Iterator[tuple[str, ast.expr]]:
    if isinstance(node.value, bool):
        yield "boolean", ast.Constant(not node.value)
    elif isinstance(node.value, int | float):
        yield "constant", ast.Constant(node.value + 1)
        if node.value:
            yield "constant", ast.Constant(node.value - 1)
    elif isinstance(node.value, str):
        yield "string", ast.Constant(f"{node.value}_")


def _calls(node: ast.Call) -> Iterator[tuple[str, ast.expr]]:
    if isinstance(node.func, ast.Name) and node.func.id in _CALLS:
        made = copy.deepcopy(node)
        made.func = ast.Name(_CALLS[node.func.id], ast.Load())
        yield "other call", made
    two = node.args[:2]
    starred = any(isinstance(part, ast.Starred) for part in two)
    if len(two) == 2 and not starred and ast.dump(two[0]) != ast.dump(two[1]):
        made = copy.deepcopy(node)
        made.args[:2] = made.args[1], made.args[0]
        yield "swapped arguments", made
    for index, part in enumerate(node.keywords):
        if part.arg is not None:
            made = copy.deepcopy(node)
            del made.keywords[index]
            yield "dropped argument", made


def _is_left_alone(statement: ast.stmt) -> bool:
    if isinstance(
        statement, ast.Assert | ast.Import | ast.ImportFrom | ast.Pass | ast.Global | ast.Nonlocal
    ):
        return True
    if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant):
        return True  # a docstring, or the dots of a stub
    if isinstance(statement, ast.Raise):
        return "NotImplementedError" in ast.unparse(statement)
    if isinstance(statement, ast.If):
        return ast.unparse(statement.test) == "TYPE_CHECKING"
    return "__all__" in _defined(statement)


def _defined(statement: ast.stmt) -> tuple[str, ...]:
    """Names that a statement gives a value to."""
    if isinstance(statement, (*_FUNCTIONS, ast.ClassDef)):
        return (statement.name,)
    targets = getattr(statement, "targets", None) or [getattr(statement, "target", None)]
    names = [node for target in targets if target is not None for node in ast.walk(target)]
    return tuple(node.id for node in names if isinstance(node, ast.Name))


def _name_of(decorator: ast.expr) -> str:
    node = decorator.func if isinstance(decorator, ast.Call) else decorator
    return node.attr if isinstance(node, ast.Attribute) else ast.unparse(node)


def _is_none(node: ast.expr | None) -> bool:
    return node is None or (isinstance(node, ast.Constant) and node.value is None)
