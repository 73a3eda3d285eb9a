"""Attributes of parameters and models, and keys of param groups, that Megatron's optimizer reads in
addition to its config. ``megatron_attributes.json`` lists the treatment of each here.

``MEGATRON_SRC=CHECKOUT pytest tests/unit/apps/megatron/test_attributes.py`` names unlisted ones.
"""

from __future__ import annotations

import ast
import json
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

LIST = Path(__file__).with_suffix(".json")
ANSWERS = ("read", "refused", "not needed")
"""What may become of a name: it means the same; where it is set, an error names it; what it is for
is done otherwise, or is no matter of the optimizer."""
Names = dict[str, set[str]]
"""By what has them: ``parameter``, ``group``, ``model``."""

_OWNERS = {
    "parameter": re.compile(
        r"(^|[._])(p|param|parameter|weight|tensor|source|destination|source_tensor|"
        r"destination_tensor|(params|parameters|param_list|params_list)\[0\])$"
    ),
    "group": re.compile(r"(^|_)(g|group|groups\[0\]|param_groups?(\[\w+\])?|override)$"),
    "model": re.compile(r"(^|_)(model|module|model_chunk|chunk|(model_)?chunks\[0\]|model_cfg)$"),
}
"""What expressions of Megatron's are called that stand for each."""
_KNOWN = {
    "parameter": {*dir(nn.Parameter(torch.empty(0))), *dir(dict)},
    "group": {"params"},
    "model": {*dir(nn.Module())},
}
"""What torch's own have, and the dictionaries that go by the same names."""
_ASKS = ("getattr", "hasattr", "setattr", "delattr")
_FOLDERS = ("optimizer",)
_FILES = ("optimizer_param_scheduler.py",)
_FUNCTIONS = {
    "tensor_parallel/layers.py": re.compile(r"^(param_is_|copy_)"),
    "transformer/module.py": re.compile(r"^param_is_"),
}
"""Functions elsewhere that the optimizer asks about a parameter."""


def read_in(source: Path) -> Names:
    """What an optimizer of Megatron's asks for.

    Args:
        source: a checkout of Megatron-LM, or what holds an installed ``megatron`` package.

    Raises:
        FileNotFoundError: it is neither.
    """
    names: Names = defaultdict(set)
    for tree, constants in _trees(source / "megatron" / "core"):
        for node in ast.walk(tree):
            for owner, name in _asked(node, constants):
                if name not in _KNOWN[owner]:
                    names[owner].add(name)
    return names


def _trees(core: Path) -> Iterator[tuple[ast.AST, Mapping[str, list[str]]]]:
    files = [path for folder in _FOLDERS for path in (core / folder).rglob("*.py")]
    for path in [*files, *(core / name for name in _FILES)]:
        tree = ast.parse(path.read_text())
        yield tree, _constants(tree)
    for name, wanted in _FUNCTIONS.items():
        tree = ast.parse((core / name).read_text())
        for node in tree.body:
            if isinstance(node, ast.FunctionDef) and wanted.match(node.name):
                yield node, _constants(tree)


def _constants(tree: ast.AST) -> dict[str, list[str]]:
    constants: dict[str, list[str]] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            constants[node.targets[0].id] = _strings(node.value, {})
    for node in ast.walk(tree):
        if isinstance(node, (ast.For, ast.comprehension)):
            values = _strings(node.iter, constants)
            if isinstance(node.target, ast.Name) and values:
                constants[node.target.id] = values
    return constants


def _strings(node: ast.AST | None, constants: Mapping[str, list[str]]) -> list[str]:
    if isinstance(node, ast.Constant):
        return [node.value] if isinstance(node.value, str) else []
    if isinstance(node, ast.Name):
        return constants.get(node.id, [])
    if isinstance(node, (ast.Tuple, ast.List, ast.Set)):
        return [text for item in node.elts for text in _strings(item, constants)]
    if isinstance(node, ast.Dict):
        return [text for key in node.keys for text in _strings(key, constants)]
    return []


def _asked(node: ast.AST, constants: Mapping[str, list[str]]) -> Iterator[tuple[str, str]]:
    if isinstance(node, ast.Attribute):
        owner = _owner(node.value, "parameter", "model")
        if owner:
            yield owner, node.attr
    elif isinstance(node, ast.Subscript) and _owner(node.value, "group"):
        for name in _strings(node.slice, constants):
            yield "group", name
    elif isinstance(node, ast.Compare) and _owner(node.comparators[0], "group"):
        for name in _strings(node.left, constants):
            yield "group", name
    elif isinstance(node, ast.Call) and node.args:
        yield from _asked_by_call(node, constants)


def _asked_by_call(node: ast.Call, constants: Mapping[str, list[str]]) -> Iterator[tuple[str, str]]:
    called = node.func
    if isinstance(called, ast.Name) and called.id in _ASKS and len(node.args) > 1:
        owner = _owner(node.args[0], "parameter", "model")
        for name in _strings(node.args[1], constants) if owner else []:
            yield str(owner), name
    elif isinstance(called, ast.Attribute) and called.attr in ("get", "setdefault"):
        for name in _strings(node.args[0], constants):
            if _owner(called.value, "group"):
                yield "group", name


def _owner(node: ast.AST, *kinds: str) -> str | None:
    text = ast.unparse(node)
    return next((kind for kind in kinds if _OWNERS[kind].search(text)), None)


@dataclass(frozen=True)
class Answer:
    kind: str
    note: str


def answers(path: Path = LIST) -> dict[str, dict[str, Answer]]:
    """The list that is kept here: by what has a name, and by name.

    Raises:
        ValueError: an answer is none of :data:`ANSWERS`.
    """
    listed: dict[str, dict[str, Answer]] = {}
    for owner, rows in json.loads(path.read_text()).items():
        listed[owner] = {}
        for name, text in rows.items():
            kind, _, note = text.partition(": ")
            if kind not in ANSWERS:
                raise ValueError(f"{name}: {kind!r} is none of {ANSWERS}")
            listed[owner][name] = Answer(kind, note)
    return listed


def unlisted(names: Names) -> list[str]:
    listed = answers()
    return [
        f"{owner}.{name}"
        for owner in sorted(names)
        for name in sorted(names[owner] - listed[owner].keys())
    ]
