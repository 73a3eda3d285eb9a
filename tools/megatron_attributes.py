"""Attributes of parameters and models, and keys of param groups, that Megatron's optimizer reads in
addition to its config. ``megatron_attributes.json`` lists the treatment of each here.

``MEGATRON_SRC=CHECKOUT pytest tests/unit/apps/megatron/test_attributes.py`` names unlisted ones.
"""

from __future__ import annotations

import ast
import json
import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import nn

LIST = Path(__file__).with_suffix(".json")
ANSWERS = ("read", "refused", "not needed")
"""Treatment of a name: it has the same meaning; an error names it if it is set; its purpose is
served in another way, or is no matter of the optimizer."""
Names = dict[str, set[str]]
"""Names by their owner: ``parameter``, ``group``, ``model``."""

_OWNERS = {
    "parameter": r"(?:p|param|parameter|weight|tensor|source|destination|source_tensor|"
    r"destination_tensor|(?:params|parameters|param_list|params_list)\[0\])",
    "group": r"(?:g|group|groups\[0\]|param_groups?(?:\[\w+\])?|override)",
    "model": r"(?:model|module|model_chunk|chunk|(?:model_)?chunks\[0\]|model_cfg)",
}
"""Megatron's expressions for each owner."""
_KNOWN = {
    "parameter": {*dir(nn.Parameter(torch.empty(0))), *dir(dict)},
    "group": {"params"},
    "model": {*dir(nn.Module())},
}
"""Names that torch's own objects have, and dictionaries of the same name."""
_FOLDERS = ("optimizer",)
_FILES = ("optimizer_param_scheduler.py",)
_FUNCTIONS = {
    "tensor_parallel/layers.py": re.compile(r"^(param_is_|copy_)"),
    "transformer/module.py": re.compile(r"^param_is_"),
}
"""Functions elsewhere that the optimizer asks about a parameter."""
_KEY = r"(?:'(\w+)'|(\w+))"


def read_in(source: Path) -> Names:
    """Return the names that Megatron's optimizers read.

    Args:
        source: a checkout of Megatron-LM, or a folder with an installed ``megatron`` package.

    Raises:
        FileNotFoundError: it is neither.
    """
    names: Names = defaultdict(set)
    for tree, constants in _trees(source / "megatron" / "core"):
        text = ast.unparse(tree)
        for owner, expression in _OWNERS.items():
            before = (
                r"(?<!\w)(?:[\w.]*[._])?" if owner == "parameter" else r"(?<![\w.])(?:[\w.]*_)?"
            )
            of = rf"{before}{expression}"
            patterns = [rf"(?:get|has|set|del)attr\({of}, {_KEY}[,)]", rf"{of}\.(\w+)"]
            if owner == "group":
                patterns = [rf"{of}\[{_KEY}\]", rf"{_KEY} (?:not )?in {of}(?![\w.\[])"]
                patterns.append(rf"{of}\.(?:get|setdefault)\({_KEY}[,)]")
            for match in (each for pattern in patterns for each in re.finditer(pattern, text)):
                *literal, name = match.groups()
                is_name = bool(literal) and literal[0] is None
                found = constants.get(name, set()) if is_name else {(literal or [name])[0]}
                names[owner] |= found - _KNOWN[owner]
    return names


def _trees(core: Path) -> Iterator[tuple[ast.AST, dict[str, set[str]]]]:
    """Yield the code to search, and the texts that each of its variables may have."""
    files = [path for folder in _FOLDERS for path in (core / folder).rglob("*.py")]
    for path in [*files, *(core / name for name in (*_FILES, *_FUNCTIONS))]:
        tree, constants = ast.parse(path.read_text()), defaultdict[str, set[str]](set)
        for kinds in (ast.Assign, (ast.For, ast.comprehension)):
            for node in ast.walk(tree):
                if isinstance(node, kinds):
                    target = node.targets[0] if isinstance(node, ast.Assign) else node.target
                    value = node.value if isinstance(node, ast.Assign) else node.iter
                    constants[ast.unparse(target)] |= _strings(value, constants)
        wanted = _FUNCTIONS.get(str(path.relative_to(core)))
        for node in tree.body if wanted else [tree]:
            if not wanted or (isinstance(node, ast.FunctionDef) and wanted.match(node.name)):
                yield node, constants


def _strings(value: ast.expr, constants: dict[str, set[str]]) -> set[str]:
    parts = getattr(value, "elts", None) or getattr(value, "keys", None) or [value]
    found = {part.value for part in parts if isinstance(part, ast.Constant)}
    names = [constants[part.id] for part in parts if isinstance(part, ast.Name)]
    return {text for text in found.union(*names) if isinstance(text, str)}


def answers(path: Path = LIST) -> dict[str, dict[str, str]]:
    """Return the listed treatment of each name, by its owner.

    Raises:
        ValueError: a treatment is none of :data:`ANSWERS`.
    """
    listed: dict[str, dict[str, str]] = json.loads(path.read_text())
    for rows in listed.values():
        rows.update({name: text.partition(": ")[0] for name, text in rows.items()})
        if wrong := {name: kind for name, kind in rows.items() if kind not in ANSWERS}:
            raise ValueError(f"{LIST}: {wrong}: write one of {ANSWERS} before the colon")
    return listed


def unlisted(names: Names) -> list[str]:
    listed = answers()
    missing = [(owner, name) for owner in names for name in names[owner] - listed[owner].keys()]
    return [f"{owner}.{name}" for owner, name in sorted(missing)]
