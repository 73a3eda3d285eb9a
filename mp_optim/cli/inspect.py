"""Look into checkpoints: list entries, verify checksums, compare two.

$ mp-optim inspect list runs/quickstart/checkpoints
$ mp-optim inspect verify PATH
$ mp-optim inspect diff PATH OTHER_PATH
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import tyro

from mp_optim import checkpoint
from mp_optim.checkpoint.reading import compare, open_checkpoint
from mp_optim.cli.command import console

if TYPE_CHECKING:
    from rich.table import Table


@dataclass(frozen=True)
class List:
    """What is in a checkpoint: every tensor with its dtype, shape, bytes and the boxes it was saved
    in."""

    path: tyro.conf.Positional[Path]
    """A checkpoint directory (its newest version), or one version."""
    match: str = ""
    """Only names that contain this."""


@dataclass(frozen=True)
class Verify:
    """Compare every file with the checksum taken while it was written. Exit status 1 if one
    differs."""

    path: tyro.conf.Positional[Path]
    """A checkpoint directory (its newest version), or one version."""


@dataclass(frozen=True)
class Diff:
    """Compare two checkpoints entry by entry. Exit status 1 if they differ."""

    a: tyro.conf.Positional[Path]
    """A checkpoint directory, or one version."""
    b: tyro.conf.Positional[Path]
    """Another."""
    all: bool = False
    """Show equal entries, too."""


Command = (
    Annotated[List, tyro.conf.subcommand("list")]
    | Annotated[Verify, tyro.conf.subcommand("verify")]
    | Annotated[Diff, tyro.conf.subcommand("diff")]
)


def list_entries(command: List) -> int:
    """Print what is in a checkpoint; returns the exit status."""
    contents, out = open_checkpoint(command.path), console()
    shown = {name: each for name, each in contents.entries.items() if command.match in name}
    table = _table(str(contents.version), "entry", "dtype", "shape", "bytes", "boxes")
    for name, entry in shown.items():
        dtype, boxes = str(entry.dtype).removeprefix("torch."), str(len(entry.boxes))
        table.add_row(name, dtype, str(entry.shape), f"{entry.bytes:,}", boxes)
    out.print(table)
    total = sum(entry.bytes for entry in shown.values())
    versions = ", ".join(path.name for path in checkpoint.versions(contents.version.parent))
    summary = f"{len(shown)} entries, {total:,} bytes; complete versions: {versions}"
    out.print(summary, highlight=False)
    return 0


def _table(title: str, first: str, *heads: str) -> Table:
    """A table in which the names of the first column are never cut short."""
    from rich.table import Table

    table = Table(title=title)
    table.add_column(first, overflow="fold")
    for head in heads:
        table.add_column(head)
    return table


def verify(command: Verify) -> int:
    """Compare files with their checksums; returns the exit status."""
    version = checkpoint.verify(command.path)
    print(f"{version}: every file is as it was written")
    return 0


def diff(command: Diff) -> int:
    """Print how two checkpoints differ; returns the exit status."""
    heads = "entry", "what", "differing", "largest difference", "ulps"
    table = _table(f"{command.a} against {command.b}", *heads)
    counts = Counter[bool]()
    for difference in compare(open_checkpoint(command.a), open_checkpoint(command.b)):
        counts[difference.what == "equal"] += 1
        if difference.what == "values":
            ulps = "" if difference.ulps is None else str(difference.ulps)
            sizes = (str(difference.differing), f"{difference.largest:.6g}", ulps)
            table.add_row(difference.name, difference.what, *sizes)
        elif difference.what != "equal" or command.all:
            table.add_row(difference.name, difference.what, "", "", "")
    if table.rows:
        console().print(table)
    print(f"{counts[True]} entries equal to the bit, {counts[False]} different")
    return 1 if counts[False] else 0


def main(arguments: Sequence[str]) -> int:
    """Carry out a command line; returns the exit status."""
    command: List | Verify | Diff = tyro.cli(
        Command, args=arguments, prog="mp-optim inspect", description=__doc__
    )
    if isinstance(command, List):
        return list_entries(command)
    if isinstance(command, Verify):
        return verify(command)
    return diff(command)
