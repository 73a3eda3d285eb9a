#!/usr/bin/env python
"""Look into checkpoints: list entries, verify checksums, compare two.

python -m mp_optim.cli.inspect list runs/quickstart/checkpoints/step-00000330
python -m mp_optim.cli.inspect verify PATH
python -m mp_optim.cli.inspect diff PATH OTHER_PATH
"""

from __future__ import annotations

import sys
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro
from rich.console import Console
from rich.table import Table

from mp_optim import checkpoint
from mp_optim.checkpoint.contents import compare, open_checkpoint


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


def list_entries(command: List, console: Console) -> int:
    contents = open_checkpoint(command.path)
    shown = [
        entry for entry in contents.entries.values() if command.match in entry.name
    ]
    table = Table(
        "entry", "dtype", "shape", "bytes", "boxes", title=str(contents.version)
    )
    for entry in shown:
        dtype = str(entry.dtype).removeprefix("torch.")
        table.add_row(
            entry.name, dtype, str(entry.shape), f"{entry.bytes:,}", str(entry.boxes)
        )
    console.print(table)
    total = sum(entry.bytes for entry in shown)
    versions = ", ".join(
        path.name for path in checkpoint.versions(contents.version.parent)
    )
    summary = f"{len(shown)} entries, {total:,} bytes; complete versions: {versions}"
    console.print(summary, highlight=False)
    return 0


def verify(command: Verify, console: Console) -> int:
    version = checkpoint.verify(command.path)
    console.print(f"{version}: every file is as it was written", highlight=False)
    return 0


def diff(command: Diff, console: Console) -> int:
    heads = "entry", "what", "differing", "largest difference", "ulps"
    table = Table(*heads, title=f"{command.a} against {command.b}")
    found = Counter[bool]()
    for difference in compare(open_checkpoint(command.a), open_checkpoint(command.b)):
        found[difference.what == "equal"] += 1
        if difference.what == "values":
            ulps = "" if difference.ulps is None else str(difference.ulps)
            sizes = (str(difference.differing), f"{difference.largest:.6g}", ulps)
            table.add_row(difference.name, difference.what, *sizes)
        elif difference.what != "equal" or command.all:
            table.add_row(difference.name, difference.what, "", "", "")
    if table.rows:
        console.print(table)
    console.print(
        f"{found[True]} entries equal to the bit, {found[False]} different",
        highlight=False,
    )
    return 1 if found[False] else 0


def main(command: Command, console: Console) -> int:
    """Carry out a command; returns the exit status."""
    try:
        if isinstance(command, List):
            return list_entries(command, console)
        if isinstance(command, Verify):
            return verify(command, console)
        return diff(command, console)
    except (FileNotFoundError, ValueError) as error:
        console.print(f"{type(error).__name__}: {error}", highlight=False, markup=False)
        return 1


if __name__ == "__main__":
    sys.exit(main(tyro.cli(Command), Console()))
