#!/usr/bin/env python
"""The table of docs/migrate.md: every field of Megatron's ``OptimizerConfig`` and of the config of
its DDP, and what it is here. Reads sources of Megatron without importing them.

python tools/megatron_fields.py --source CHECKOUT --write
"""

from __future__ import annotations

import ast
import re
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import tyro

from mp_optim.apps.megatron.config import DDP_FIELDS, OPTIMIZER_FIELDS, Meaning

DOCUMENT = Path(__file__).parents[1] / "docs" / "migrate.md"
BEGIN, END = "<!-- tools/megatron_fields.py -->", "<!-- end of these tables -->"
ABSENT = "-"


@dataclass(frozen=True)
class ConfigClass:
    """A config class of Megatron's: where it is, and what its fields are here."""

    name: str
    path: str
    meanings: Mapping[str, Meaning]


CLASSES = (
    ConfigClass("OptimizerConfig", "optimizer/optimizer_config.py", OPTIMIZER_FIELDS),
    ConfigClass(
        "DistributedDataParallelConfig",
        "distributed/distributed_data_parallel_config.py",
        DDP_FIELDS,
    ),
)


@dataclass
class Table:
    """Defaults by field and by version of Megatron, the newest first."""

    versions: list[str] = field(default_factory=list)
    defaults: dict[str, dict[str, str]] = field(default_factory=dict)

    def put(self, version: str, defaults: Mapping[str, str]) -> None:
        """Enter what a version has, in place of what was there of it."""
        if version not in self.versions:
            self.versions.insert(0, version)
        for row in self.defaults.values():
            row.pop(version, None)
        for name, default in defaults.items():
            self.defaults.setdefault(name, {})[version] = default

    def lines(self, owner: ConfigClass) -> Iterator[str]:
        """As markdown.

        Raises:
            KeyError: a field is not known to ``mp_optim.megatron.config``.
        """
        yield f"| `{owner.name}` | " + " | ".join(self.versions) + " | here | |"
        yield "|---" * (len(self.versions) + 3) + "|"
        for name in sorted(self.defaults):
            meaning = owner.meanings[name]
            cells = [self.defaults[name].get(v, ABSENT) for v in self.versions]
            here = f"`{meaning.name}`" if meaning.name else meaning.kind.value
            yield f"| `{name}` | {' | '.join(cells)} | {here} | {meaning.note} |".replace(
                "|  |", "| |"
            )


def fields_in(source: Path, owner: ConfigClass) -> dict[str, str]:
    """The default of each field of a class and of those derived from it, as it is written there.

    Args:
        source: a checkout of Megatron-LM, or what holds an installed ``megatron`` package.

    Raises:
        FileNotFoundError: it is neither.
    """
    path = source / "megatron" / "core" / owner.path
    defaults: dict[str, str] = {}
    family = {owner.name}
    for node in ast.parse(path.read_text()).body:
        if not isinstance(node, ast.ClassDef):
            continue
        bases = {base.id for base in node.bases if isinstance(base, ast.Name)}
        if node.name in family or bases & family:
            family.add(node.name)
            for name, default in _fields(node):
                defaults.setdefault(name, default)
    return defaults


def _fields(node: ast.ClassDef) -> Iterator[tuple[str, str]]:
    for line in node.body:
        if isinstance(line, ast.AnnAssign) and isinstance(line.target, ast.Name):
            value = "required" if line.value is None else ast.unparse(line.value)
            yield line.target.id, value.replace("torch.", "").replace("'", '"')


def tables_in(document: str) -> list[Table]:
    """The tables that a document has between its marks; empty ones if there are none."""
    tables: list[Table] = []
    _, _, rest = document.partition(BEGIN)
    for line in rest.partition(END)[0].splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if line.startswith("| `") and cells[-2] == "here":
            tables.append(Table(cells[1:-2]))
        elif line.startswith("| `"):
            present = zip(tables[-1].versions, cells[1:-2], strict=True)
            row = {version: cell for version, cell in present if cell != ABSENT}
            tables[-1].defaults[cells[0].strip("`")] = row
    return tables or [Table() for _ in CLASSES]


def rendered(tables: Sequence[Table]) -> str:
    """All tables, with the marks around them."""
    parts = ["\n".join(table.lines(owner)) for table, owner in zip(tables, CLASSES, strict=True)]
    return "\n\n".join([BEGIN, *parts, END])


def with_tables(document: str, tables: Sequence[Table]) -> str:
    """A document with these tables between its marks."""
    pattern = re.compile(re.escape(BEGIN) + ".*?" + re.escape(END), re.DOTALL)
    return pattern.sub(lambda _: rendered(tables), document)


def version_of(source: Path) -> str:
    """The commit of a clone, or the version that the package says."""
    if (source / ".git").exists():
        command = ["git", "-C", str(source), "rev-parse", "--short=8", "HEAD"]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()
    text = (source / "megatron" / "core" / "package_info.py").read_text()
    numbers = re.findall(r"^(?:MAJOR|MINOR|PATCH) = (\d+)", text, re.MULTILINE)
    suffix = re.search(r"^PRE_RELEASE = ['\"](.*)['\"]", text, re.MULTILINE)
    return "core " + ".".join(numbers) + (suffix.group(1) if suffix else "")


@dataclass(frozen=True)
class Options:
    """The fields of Megatron's configs, and what they are here."""

    source: tuple[Path, ...]
    """Checkouts of Megatron-LM, or directories that hold an installed megatron package."""
    write: bool = False
    """Write into docs/migrate.md instead of printing."""


def main(options: Options) -> None:
    document = DOCUMENT.read_text()
    tables = tables_in(document)
    for source in options.source:
        for table, owner in zip(tables, CLASSES, strict=True):
            table.put(version_of(source), fields_in(source, owner))
    if options.write:
        DOCUMENT.write_text(with_tables(document, tables))
    else:
        print(rendered(tables))


if __name__ == "__main__":
    main(tyro.cli(Options))
