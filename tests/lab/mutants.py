"""Put small faults into a copy of the package, one at a time, and run the tests that cover each.

$ python tests/lab mutants --out ../mutants --rooms core offload --size 40 --seed 1
$ python tests/lab mutants --out ../after --again ../mutants/results.jsonl

The first call for a folder runs the unit tests once under coverage. A call continues where an
earlier one was interrupted. A fault survives if no test fails.
"""

from __future__ import annotations

import ast
import copy
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import xml.etree.ElementTree as ET
from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from coverage import CoverageData

from support.launch import ROOT

ROOMS = (
    *("mixed_precision", "offload", "core", "zero"),
    *("checkpoint", "rules", "muon", "kernels"),
)


@dataclass(frozen=True)
class Options:
    """Faults to try."""

    out: Path
    """Folder for coverage, the copy of the checkout and results.jsonl."""
    rooms: tuple[str, ...] = ROOMS
    """Folders of the package."""
    size: int = 40
    """Faults of each room, spread evenly over its functions."""
    seed: int = 0
    """Number of the sample."""
    again: Path | None = None
    """Results of another call: try the same faults instead of a sample."""
    budget: float = 60.0
    """Seconds of tests for a fault, without the start of pytest. At least one test runs."""


# -- faults ---------------------------------------------------------------------------------------

_BOUNDARY = {ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt}
_OPPOSITE = {
    **{ast.Lt: ast.GtE, ast.GtE: ast.Lt, ast.Gt: ast.LtE, ast.LtE: ast.Gt, ast.Eq: ast.NotEq},
    **{ast.NotEq: ast.Eq, ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn},
    ast.NotIn: ast.In,
}
_ARITHMETIC = {
    **{ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.FloorDiv, ast.Div: ast.Mult},
    **{ast.FloorDiv: ast.Mult, ast.Mod: ast.Add, ast.Pow: ast.Mult, ast.LShift: ast.RShift},
    **{ast.RShift: ast.LShift, ast.BitAnd: ast.BitOr, ast.BitOr: ast.BitAnd},
}
_CALLS = {"any": "all", "all": "any", "min": "max", "max": "min"}
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
_LEFT_ALONE = (ast.Assert, ast.Import, ast.ImportFrom, ast.JoinedStr)
_NOT_RUN = ("annotation", "returns", "decorator_list", "bases")


@dataclass(frozen=True)
class Fault:
    """One change of a file's text.

    Attributes:
        line: first line of the changed text.
            last: last line.
            start: first byte.
            end: byte after the last.
        nth: number among equal faults of the function.
    """

    path: str
    function: str
    kind: str
    old: str
    new: str
    nth: int
    line: int
    last: int
    start: int
    end: int

    @property
    def key(self) -> tuple[str, str, str, str, str, int]:
        return self.path, self.function, self.kind, self.old, self.new, self.nth


def faults_of(path: str, source: str) -> list[Fault]:
    """Return every fault for a file, in the order of its text."""
    raw, starts, seen, found = source.encode(), [0], Counter[Any](), list[Fault]()
    for text in raw.splitlines(keepends=True):
        starts.append(starts[-1] + len(text))

    def visit(node: Any, function: str) -> None:
        if isinstance(node, _LEFT_ALONE) or _is_left_alone(node):
            return
        if isinstance(node, (*_FUNCTIONS, ast.ClassDef)):
            function = f"{function}.{node.name}".lstrip(".")
        for kind, part, new in _changes(node):
            start = starts[part.lineno - 1] + part.col_offset
            end = starts[part.end_lineno - 1] + part.end_col_offset
            same = (function, kind, raw[start:end].decode(), new)
            found.append(Fault(path, *same, seen[same], part.lineno, part.end_lineno, start, end))
            seen[same] += 1
        for name, value in ast.iter_fields(node):
            is_run = name not in _NOT_RUN and not isinstance(node, ast.Raise)
            for child in (value if isinstance(value, list) else [value]) if is_run else ():
                if isinstance(child, ast.AST):
                    visit(child, function)

    visit(ast.parse(source), "")
    return found


def _is_left_alone(node: ast.AST) -> bool:
    if isinstance(node, ast.Expr):
        return isinstance(node.value, ast.Constant)  # a docstring, or the dots of a stub
    if isinstance(node, ast.If):
        return ast.unparse(node.test) == "TYPE_CHECKING"
    return isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__"


def _changes(node: Any) -> Iterator[tuple[str, Any, str]]:
    """Yield the kind, the node to replace and the new text of each fault of one node."""
    match node:
        case ast.Expr(value=ast.Call()):
            yield "removed call", node, "pass"
        case ast.AugAssign() | ast.Assign(targets=[ast.Attribute() | ast.Subscript()]):
            yield "removed assignment", node, "pass"
        case ast.Raise():
            yield "removed raise", node, "pass"
        case ast.Return(value=ast.expr()):
            yield "returned None", node, "return None"
        case ast.Continue() | ast.Break():
            yield "other jump", node, "break" if isinstance(node, ast.Continue) else "continue"
        case ast.If(test=test) | ast.While(test=test):
            yield "negated condition", test, f"(not ({ast.unparse(test)}))"
    if isinstance(node, ast.expr):
        for kind, changed in _expressions(copy.deepcopy(node)):
            yield kind, node, f"({ast.unparse(ast.fix_missing_locations(changed))})"


def _expressions(node: Any) -> Iterator[tuple[str, Any]]:
    """Yield each fault of an expression, which is changed in place between two of them."""
    match node:
        case ast.Compare(ops=[operator, *_]):
            for kind, table in (("boundary", _BOUNDARY), ("opposite", _OPPOSITE)):
                if type(operator) in table:
                    node.ops[0] = table[type(operator)]()
                    yield kind, node
        case ast.BoolOp():
            node.op = ast.Or() if isinstance(node.op, ast.And) else ast.And()
            yield "and/or", node
        case ast.UnaryOp():
            yield "removed sign or not", node.operand
        case ast.BinOp() if type(node.op) in _ARITHMETIC:
            node.op = _ARITHMETIC[type(node.op)]()
            yield "arithmetic", node
        case ast.Constant(value=bool()):
            yield "boolean", ast.Constant(not node.value)
        case ast.Constant(value=int() | float()):
            yield "constant", ast.Constant(node.value + 1)
        case ast.Constant(value=str()):
            yield "string", ast.Constant(f"{node.value}_")
        case ast.IfExp():
            node.body, node.orelse = node.orelse, node.body
            yield "swapped branches", node
        case ast.Call():
            yield from _calls(node)
        case ast.ListComp() | ast.SetComp() | ast.DictComp() | ast.GeneratorExp():
            if node.generators[0].ifs:
                node.generators[0].ifs = []
                yield "dropped filter", node


def _calls(node: Any) -> Iterator[tuple[str, Any]]:
    if (name := getattr(node.func, "id", "")) in _CALLS:
        other = copy.deepcopy(node)
        other.func = ast.Name(_CALLS[name])
        yield "other call", other
    if len(node.args) > 1 and not any(isinstance(each, ast.Starred) for each in node.args[:2]):
        other = copy.deepcopy(node)
        other.args[:2] = other.args[1::-1]
        yield "swapped arguments", other
    for index, keyword in enumerate(node.keywords):
        if keyword.arg is not None:
            other = copy.deepcopy(node)
            del other.keywords[index]
            yield "dropped argument", other


def sample(faults: list[Fault], size: int, seed: int) -> list[Fault]:
    """Return some faults, one of each function in turn, in an order made of the seed."""
    generator, functions = random.Random(seed), defaultdict(list)
    for fault in faults:
        functions[fault.path, fault.function].append(fault)
    queues = list(functions.values())
    for queue in (queues, *queues):
        generator.shuffle(queue)  # type: ignore[arg-type]
    turns = range(max(map(len, queues), default=0))
    return [queue[turn] for turn in turns for queue in queues if turn < len(queue)][:size]


# -- tests ----------------------------------------------------------------------------------------

_CONFIG = """\
[run]
source = {root}/mp_optim
parallel = true
data_file = {folder}/data
context = ${{PYTEST_CURRENT_TEST}}
sigterm = true
patch = _exit
"""
"""Processes that a test starts take its name from pytest's variable; ranks end by ``os._exit``."""


def _run_pytest(root: Path, *arguments: str, limit: float | None = None, **more: str) -> int:
    """Run pytest in a checkout, and return its exit status.

    Raises:
        subprocess.TimeoutExpired: it took longer than ``limit`` seconds; it and its processes were
            killed.
    """
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *arguments]
    variables = {**os.environ, "PYTHONPATH": str(root), "OMP_NUM_THREADS": "1", **more}
    quiet = subprocess.DEVNULL if limit else None
    process = subprocess.Popen(
        command, cwd=root, env=variables, stdout=quiet, start_new_session=True
    )
    try:
        return process.wait(limit)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


class Cover:
    def __init__(self, root: Path, folder: Path) -> None:
        if not (folder / "times.xml").exists():
            folder.mkdir(parents=True, exist_ok=True)
            config = folder / "config"
            config.write_text(_CONFIG.format(root=root, folder=folder))
            how = ("--cov", f"--cov-config={config}", "--cov-context=test", "--cov-report=")
            times = (f"--junitxml={folder / 'times.xml'}", "-o", "junit_family=xunit1")
            tests = ("tests/unit", "-m", "not slow and not gpu")
            _run_pytest(root, *tests, *how, *times, COVERAGE_PROCESS_START=str(config))
        self.seconds: dict[str, float] = defaultdict(float)
        for case in ET.parse(folder / "times.xml").iter("testcase"):
            if not any(child.tag in ("failure", "error", "skipped") for child in case):
                for name in (case.get("file"), f"{case.get('file')}::{case.get('name')}"):
                    self.seconds[str(name)] += float(case.get("time", 0.0))
        self._tests: dict[tuple[str, int], set[str]] = defaultdict(set)
        for part in folder.glob("data*"):
            self._read(CoverageData(str(part)))

    def _read(self, data: CoverageData) -> None:
        data.read()
        for path in data.measured_files():
            relative = "mp_optim/" + path.rpartition("/mp_optim/")[2]
            for line, contexts in data.contexts_by_lineno(path).items():
                for context in filter(None, contexts):
                    test = context.rpartition("|" if "|" in context else " ")[0]
                    if context.endswith("(setup)"):
                        test = test.partition("::")[0]
                    self._tests[relative, line].add(test)

    def tests_of(self, fault: Fault, budget: float) -> list[str]:
        """Return the tests that run a fault's lines, the fastest first, within a budget."""
        lines = range(fault.line, fault.last + 1)
        tests = set[str]().union(*(self._tests[fault.path, line] for line in lines))
        chosen: list[str] = []
        for test in sorted(tests & self.seconds.keys(), key=self.seconds.__getitem__):
            budget -= self.seconds[test]
            if budget >= 0 or not chosen:
                chosen.append(test)
        return chosen


# -- trying ---------------------------------------------------------------------------------------


def _copy_checkout(to: Path) -> None:
    shutil.rmtree(to, ignore_errors=True)
    git = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(git, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    native = [str(path.relative_to(ROOT)) for path in (ROOT / "mp_optim").rglob("*.so")]
    for name in filter(lambda name: (ROOT / name).is_file(), [*names.splitlines(), *native]):
        (to / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, to / name)


def attempt(tree: Path, fault: Fault, tests: list[str], seconds: float) -> str:
    """Return ``killed``, ``survived``, ``timeout`` or ``uncovered`` for a fault."""
    if not tests:
        return "uncovered"
    path, limit = tree / fault.path, 60.0 + 6.0 * seconds
    source = path.read_bytes()
    path.write_bytes(source[: fault.start] + fault.new.encode() + source[fault.end :])
    try:
        how = ("-x", "-o", "timeout=0")
        is_noticed = _run_pytest(tree, *how, *tests, limit=limit, PYTHONDONTWRITEBYTECODE="1")
        return "killed" if is_noticed else "survived"
    except subprocess.TimeoutExpired:
        return "timeout"
    finally:
        path.write_bytes(source)


def _results(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def _key(result: dict[str, Any]) -> tuple[Any, ...]:
    return tuple(result[name] for name in ("path", "function", "kind", "old", "new", "nth"))


def chosen_faults(options: Options) -> Iterator[tuple[str, Fault]]:
    """Yield each fault to try, with its room."""
    wanted = {_key(result) for result in _results(options.again)} if options.again else set()
    for room in options.rooms:
        paths = sorted((ROOT / "mp_optim" / room).rglob("*.py"))
        # What runs in Triton's kernels is not Python.
        texts = [path for path in paths if "triton/kernels" not in str(path)]
        every = [f for p in texts for f in faults_of(str(p.relative_to(ROOT)), p.read_text())]
        if options.again:
            yield from ((room, fault) for fault in every if fault.key in wanted)
        else:
            yield from ((room, fault) for fault in sample(every, options.size, options.seed))


def main(options: Options) -> int:
    """Try the faults that have no result, and print the table of all results. Return 0."""
    results, tree = options.out / "results.jsonl", options.out / "tree"
    cover = Cover(ROOT, options.out.resolve() / "coverage")
    known = {_key(result) for result in _results(results)}
    _copy_checkout(tree)
    for room, fault in chosen_faults(options):
        if fault.key not in known:
            tests = cover.tests_of(fault, options.budget)
            status = attempt(tree.resolve(), fault, tests, sum(map(cover.seconds.get, tests)))
            result = {"room": room, "status": status, **asdict(fault), "ran": len(tests)}
            with results.open("a") as file:
                file.write(json.dumps(result) + "\n")
            old, new = (" ".join(text.split()) for text in (fault.old, fault.new))
            place = f"{fault.path}:{fault.line} {fault.function}"
            print(f"{status}: {place}: {fault.kind}: {old} -> {new}", flush=True)
    report(_results(results))
    return 0


def report(results: list[dict[str, Any]]) -> None:
    """Print the share of faults that tests noticed, by room."""
    print("| room | faults | killed | timed out | survived | not covered | noticed |")
    print("|---" * 7 + "|")
    for room in (*ROOMS, "all"):
        count = Counter(each["status"] for each in results if room in (each["room"], "all"))
        kinds = [count[kind] for kind in ("killed", "timeout", "survived", "uncovered")]
        share = (kinds[0] + kinds[1]) / max(sum(kinds), 1)
        print(f"| {room} | {' | '.join(map(str, [sum(kinds), *kinds]))} | {share:.0%} |")
