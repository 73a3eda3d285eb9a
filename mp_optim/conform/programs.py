"""The smallest program that shows a finding: the text of a check, and of what it uses."""

from __future__ import annotations

import ast
import inspect
from functools import lru_cache
from types import ModuleType

from mp_optim.conform import kit
from mp_optim.conform.kit import Check
from mp_optim.conform.subject import Subject, has_modes, located

# the same as Subject.maker, for a program that stands alone
_ALONE = """\
def make(params, **settings):
    optimizer = {factory}(params, **{settings})
{train}    return optimizer
"""


def program_of(check: Check, subject: Subject) -> str:
    """A file that needs torch and the optimizer's package, and ends with an error where the
    optimizer does not conform."""
    module = inspect.getmodule(check.function)
    assert module is not None
    texts = _needed(check.name, module)
    imports = _imports("\n".join(texts.values()), module)
    package, _, factory = subject.path.rpartition(".")
    train = "    optimizer.train()\n" if has_modes(located(subject.path)) else ""
    given = dict(subject.settings)
    settings = f"{{**{given!r}, **settings}}" if given else "settings"
    make = _ALONE.format(factory=factory, settings=settings, train=train)
    start = "python" if check.ranks == 1 else f"torchrun --nproc-per-node {check.ranks}"
    title = f"{subject.path}, {check.name} ({check.level}): {check.statement}"
    head = f'"""{title}\n\n$ {start} THIS_FILE\n"""'
    begin = "" if check.ranks == 1 else 'torch.distributed.init_process_group("gloo")\n'
    own = [f"from {package} import {factory}", "", ""]
    call = f"{begin}{check.name}(make)\nprint('conforms')\n"
    return "\n".join([head, "", *imports, *own, *texts.values(), make, "", call])


def _needed(name: str, module: ModuleType) -> dict[str, str]:
    """Texts of a function and of all that it calls of its module and of the kit, callees first."""
    texts: dict[str, str] = {}

    def add(name: str) -> None:
        owner = next((each for each in (module, kit) if _defined(name, each)), None)
        if owner is None or name in texts:
            return
        text = _definitions(owner)[name]
        texts[name] = ""  # it may name itself
        for used in _names(text):
            add(used)
        texts[name] = texts.pop(name) or f"{text}\n\n"

    add(name)
    return texts


def _defined(name: str, module: ModuleType) -> bool:
    return name in _definitions(module)


@lru_cache
def _definitions(module: ModuleType) -> dict[str, str]:
    """Texts of a module's functions, classes and constants, without decorators."""
    source = inspect.getsource(module)
    lines, found = source.splitlines(), {}
    for node in ast.parse(source).body:
        text = "\n".join(lines[node.lineno - 1 : node.end_lineno])
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            found[node.name] = text
        elif isinstance(node, ast.Assign):
            targets = [each.id for each in node.targets if isinstance(each, ast.Name)]
            found.update(dict.fromkeys(targets, text))
    return found


def _names(text: str) -> list[str]:
    """Names that a text uses, in order."""
    named = [node.id for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Name)]
    return list(dict.fromkeys(named))


def _imports(text: str, module: ModuleType) -> list[str]:
    """The imports that a text needs, of those that its module and the kit have."""
    used, plain, named = set(_names(text)), set[str](), dict[str, set[str]]()
    for each in (kit, module):
        for node in ast.parse(inspect.getsource(each)).body:
            if not isinstance(node, (ast.Import, ast.ImportFrom)):
                continue
            for alias in node.names:
                if (alias.asname or alias.name.partition(".")[0]) not in used:
                    continue
                if isinstance(node, ast.Import):
                    plain.add(ast.unparse(ast.Import([alias])))
                elif node.module != kit.__name__:
                    named.setdefault(node.module or "", set()).add(ast.unparse(alias))
    lines = [*plain]
    for source, names in named.items():
        lines.append(f"from {source} import {', '.join(sorted(names))}")
    return ["from __future__ import annotations", "", *sorted(lines, key=_order)]


def _order(line: str) -> tuple[bool, bool, str]:
    """Standard library first, ``import`` before ``from``."""
    return "torch" in line, line.startswith("from"), line
