"""Fields of Megatron's ``OptimizerConfig`` and of the config of its DDP.

``write_docs.py`` writes the table of the fields that differ here; a test finds fields without a
meaning. Sources of Megatron are parsed, not imported.
"""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from mp_optim.apps.megatron.config import DDP_FIELDS, OPTIMIZER_FIELDS, Kind, Meaning


@dataclass(frozen=True)
class ConfigClass:
    """A config class of Megatron's: its file, and the meaning of its fields here."""

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


def fields_in(source: Path, owner: ConfigClass) -> set[str]:
    """Return the names of the fields of a class and of the classes derived from it.

    Args:
        source: a checkout of Megatron-LM, or a directory that holds an installed ``megatron``.

    Raises:
        FileNotFoundError: ``source`` is neither.
    """
    path = source / "megatron" / "core" / owner.path
    names: set[str] = set()
    family = {owner.name}
    for node in ast.parse(path.read_text()).body:
        if not isinstance(node, ast.ClassDef):
            continue
        bases = {base.id for base in node.bases if isinstance(base, ast.Name)}
        if node.name in family or bases & family:
            family.add(node.name)
            names |= {
                line.target.id
                for line in node.body
                if isinstance(line, ast.AnnAssign) and isinstance(line.target, ast.Name)
            }
    return names


def table() -> Iterator[str]:
    """Yield the rows of the fields that differ here, in Markdown."""
    yield from ("| field | here | |", "|---|---|---|")
    for owner in CLASSES:
        rows: dict[tuple[str, str], list[str]] = defaultdict(list)
        for name, meaning in sorted(owner.meanings.items()):
            if differs(meaning):
                here = f"`{meaning.name}`" if meaning.name else meaning.kind.value
                rows[here, meaning.note].append(f"`{name}`")
        for (here, note), names in rows.items():
            yield f"| {', '.join(names)} | {here} | {note} |".replace("|  |", "| |")


def differs(meaning: Meaning) -> bool:
    """Whether a user has to know the field's meaning here."""
    kinds = (Kind.RENAMED, Kind.STREAMED, Kind.REFUSED)
    return meaning.kind in kinds or (meaning.kind is Kind.SAME and bool(meaning.note))
