"""The API reference: signatures and docstrings of public names as Markdown.

``tools/write_docs.py`` writes them into the pages of docs/api. A page has
``<!-- api: PATH MEMBER ... -->`` before each generated part and ``<!-- end -->`` after it. PATH is
an import path. MEMBERs are the attributes and methods of a class that are shown with it. ``*``
shows the fields of a dataclass, and ``methods-only`` leaves out the constructor of a class that a
program does not construct.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import griffe

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = "mp_optim"
_PART = re.compile(r"(<!-- api: (\S+)((?: \S+)*) -->\n).*?(<!-- end -->)", re.DOTALL)
_ROLE = re.compile(r":(?:class|func|meth|attr|data|mod|exc):`~?([\w.]+)`")
_PAGE = re.compile(r"(?:``)?docs/([\w/-]+\.md)(?:``)?")
_WIDTH = 88
_KINDS = {"variadic positional": "*", "variadic keyword": "**"}
_LITERAL = re.compile(r"``([^`]+)``")


def page(text: str) -> str:
    """Return a page's text with its generated parts up to date."""
    return _PART.sub(lambda part: f"{part[1]}{entry(part[2], part[3].split())}\n{part[4]}", text)


def documented(text: str) -> list[str]:
    """Return the import paths that a page shows."""
    return [part[2] for part in _PART.finditer(text)]


def entry(path: str, members: Iterable[str]) -> str:
    """Return the Markdown of one object and of some of its members.

    Args:
        path: import path of a class or function.
        members: names of its methods and properties; ``*`` stands for the fields of a dataclass,
            and ``methods-only`` leaves out the constructor.
    """
    found, shown = _load(path), list(members)
    title = path.removeprefix(f"{PACKAGE}.").removeprefix("apps.")
    lines = ["", *_of_object(found, title, "###", shown)]
    for name in shown:
        if name == "*":
            lines += _fields(found)
        elif name != "methods-only":
            lines += _of_object(found.all_members[name], f"{found.name}.{name}", "####")
    return "\n".join(lines).replace("\n\n\n", "\n\n")


@cache
def _package() -> Any:
    return griffe.load(
        PACKAGE, search_paths=[ROOT], docstring_parser="google", resolve_aliases=True
    )


def _load(path: str) -> Any:
    found = _package()[path.removeprefix(f"{PACKAGE}.")]
    found = found.final_target if found.is_alias else found
    return found[found.name] if found.is_module else found  # a function named as its module


def _of_object(found: Any, title: str, mark: str, members: Iterable[str] = ()) -> Iterator[str]:
    yield f"{mark} {title}\n"
    is_constructed = "methods-only" not in members
    signature = "" if {"methods-only", "*"} & {*members} else _signature(found)
    if signature:
        yield f"```py\n{signature}\n```\n"
    for section in _sections(found):
        if is_constructed or section.kind.value == "text":
            yield from _of_section(section)


def _signature(found: Any) -> str:
    """Return the call as one writes it: with annotations, one argument a line if it is long."""
    if found.is_attribute:
        return f"{found.name}: {found.annotation}" if found.annotation else ""
    arguments = [_argument(each) for each in found.parameters if each.name not in ("self", "cls")]
    if found.is_class and not arguments:
        return ""
    returns = "" if found.is_class or found.returns is None else f" -> {found.returns}"
    line = f"{found.name}({', '.join(arguments)}){returns}"
    if len(line) <= _WIDTH or not arguments:
        return line
    return "\n".join([f"{found.name}(", *(f"    {each}," for each in arguments), f"){returns}"])


def _argument(parameter: Any) -> str:
    name = _KINDS.get(parameter.kind.value, "") + parameter.name
    has_default = parameter.default is not None and not name.startswith("*")
    if parameter.annotation is None:
        return f"{name}={parameter.default}" if has_default else name
    default = f" = {parameter.default}" if has_default else ""
    return f"{name}: {parameter.annotation}{default}"


def _sections(found: Any) -> list[Any]:
    docstring = found.docstring
    if docstring is None and found.is_class:
        docstring = found.members["__init__"].docstring
    if docstring is None:
        return []
    return list(docstring.parse("google", returns_multiple_items=False, warnings=False))


def _of_section(section: Any) -> Iterator[str]:
    kind, value = section.kind.value, section.value
    if kind == "text":
        yield f"{_prose(value)}\n"
    elif kind in ("parameters", "other parameters", "attributes"):
        heading = "attribute" if kind == "attributes" else "argument"
        yield f"| {heading} | |\n|---|---|"
        for each in value:
            yield f"| `{each.name}` | {_cell(each.description)} |"
        yield ""
    elif kind in ("returns", "yields"):
        for each in value:
            yield f"{kind.capitalize()}: {_prose(each.description)}\n"
    elif kind == "raises":
        for each in value:
            yield f"Raises `{each.annotation}`: {_prose(each.description)}\n"
    elif kind == "examples":
        yield from (f"```py\n{each}\n```\n" for _, each in value)
    else:
        raise ValueError(f"docstring section {kind!r}: no Markdown for it; add it to _of_section")


def _fields(found: Any) -> Iterator[str]:
    """Yield a table of a dataclass's fields, in order, with defaults."""
    yield "| field | default | |\n|---|---|---|"
    fields = dict(reversed([*found.inherited_members.items(), *found.members.items()]))
    for name, each in reversed(fields.items()):
        each = each.final_target if each.is_alias else each
        if each.is_attribute and not name.startswith("_") and each.docstring is not None:
            default = "" if each.value is None else f"`{_cell(str(each.value))}`"
            yield f"| `{name}` | {default} | {_cell(each.docstring.value)} |"
    yield ""


def _prose(text: str) -> str:
    """Return a docstring's text as Markdown; names and pages of the reference become links."""
    text = _ROLE.sub(lambda role: f"`{_short(role[1])}`", text)
    text = _PAGE.sub(lambda found: f"[{found[1]}](../{found[1]})", text)
    return _LITERAL.sub(r"`\1`", text)


def _short(path: str) -> str:
    """Return the class and member of an import path, or its last name."""
    names = path.split(".")
    first = next((i for i, name in enumerate(names) if name[0].isupper()), len(names) - 1)
    return ".".join(names[first:])


def _cell(text: str) -> str:
    """Return a docstring's text in one line of a table."""
    lines = _prose(text).replace("|", "\\|").split("\n\n")
    joined = [re.sub(r"\n(?=- )", "<br>", one) for one in lines]
    return "<br>".join(" ".join(one.split()) for one in joined)
