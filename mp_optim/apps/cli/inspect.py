"""Inspect checkpoints: list entries, verify checksums, compare two checkpoints.

$ mp-optim inspect list runs/quickstart/checkpoints
$ mp-optim inspect verify PATH
$ mp-optim inspect diff PATH OTHER_PATH
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import torch
import tyro
from torch import Tensor

from mp_optim import checkpoint
from mp_optim.apps.cli.command import console
from mp_optim.checkpoint.reading import Contents, open_checkpoint

if TYPE_CHECKING:
    from rich.table import Table


Checkpoint = Annotated[
    tyro.conf.Positional[Path],
    tyro.conf.arg(help="A checkpoint directory (its newest version), or one version."),
]


def list_entries(path: Checkpoint, match: str = "") -> int:
    """List the tensors of a checkpoint with dtype, shape, bytes and the number of slices that ranks
    saved.

    Args:
        match: show only names that contain this text.
    """
    contents, out = open_checkpoint(path), console()
    shown = {name: each for name, each in contents.entries.items() if match in name}
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
    """Return a table whose first column is never truncated."""
    from rich.table import Table

    table = Table(title=title)
    table.add_column(first, overflow="fold")
    for head in heads:
        table.add_column(head)
    return table


def verify(path: Checkpoint) -> int:
    """Compare every file with its checksum. The exit status is 1 if a file differs."""
    version = checkpoint.verify(path)
    print(f"{version}: every file is as it was written")
    return 0


def diff(a: Checkpoint, b: Checkpoint) -> int:
    """Compare two checkpoints tensor by tensor. The exit status is 1 if they differ.

    Args:
        a: the first checkpoint.
        b: the second checkpoint.
    """
    heads = "entry", "what", "differing", "largest difference", "ulps"
    table = _table(f"{a} against {b}", *heads)
    counts = Counter[bool]()
    for difference in compare(open_checkpoint(a), open_checkpoint(b)):
        counts[difference.what == "equal"] += 1
        if difference.what == "values":
            ulps = "" if difference.ulps is None else str(difference.ulps)
            sizes = (str(difference.differing), f"{difference.largest:.6g}", ulps)
            table.add_row(difference.name, difference.what, *sizes)
        elif difference.what != "equal":
            table.add_row(difference.name, difference.what, "", "", "")
    if table.rows:
        console().print(table)
    print(f"{counts[True]} entries equal to the bit, {counts[False]} different")
    return 1 if counts[False] else 0


def main(arguments: Sequence[str]) -> int:
    """Run a command line, and return the exit status."""
    commands: dict[str, Callable[..., int]] = {"list": list_entries, "verify": verify, "diff": diff}
    status: int = tyro.extras.subcommand_cli_from_dict(
        commands, args=arguments, prog="mp-optim inspect", description=__doc__
    )
    return status


# -- comparison -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Difference:
    """The difference of one tensor between two checkpoints.

    Attributes:
        name: name of the tensor.
        what: "equal" to the bit; "only in a", "only in b", "dtype", "shape"; or "values".
        differing: number of elements whose bits differ.
        largest: largest absolute difference; inf or nan if an infinity or a NaN differs.
        ulps: largest difference in units of the last place for floats of 2 or 4 bytes; else None.
    """

    name: str
    what: str
    differing: int = 0
    largest: float = 0.0
    ulps: int | None = None


def compare(a: Contents, b: Contents) -> Iterator[Difference]:
    """Yield the difference of each tensor of two checkpoints, by name. At most two tensors are in
    memory at a time."""
    for name in sorted(a.entries.keys() | b.entries.keys()):
        entry, other = a.entries.get(name), b.entries.get(name)
        if entry is None or other is None:
            yield Difference(name, "only in a" if other is None else "only in b")
        elif entry.shape != other.shape or entry.dtype != other.dtype:
            yield Difference(name, "shape" if entry.shape != other.shape else "dtype")
        else:
            x, y = a.read(name).reshape(-1), b.read(name).reshape(-1)
            size = x.element_size()
            bits = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}.get(size)
            differs = (x != y) if bits is None else (x.view(bits) != y.view(bits))
            if not differs.any():
                yield Difference(name, "equal")
                continue
            x, y = x[differs], y[differs]
            wide = torch.complex128 if x.is_complex() else torch.float64
            distance = (x.to(wide) - y.to(wide)).abs()
            largest = float("nan") if bool(distance.isnan().any()) else float(distance.max())
            counted = x.is_floating_point() and size in (2, 4)
            ulps = int((_ordered(x) - _ordered(y)).abs().max()) if counted else None
            yield Difference(name, "values", int(differs.sum()), largest, ulps)


def _ordered(x: Tensor) -> Tensor:
    """Return integers in the order of the given floating values. Neighbouring values differ by 1,
    and both zeros are 0."""
    bits = x.view(torch.int16 if x.element_size() == 2 else torch.int32).long()
    low = -(1 << (8 * x.element_size() - 1))
    return torch.where(bits < 0, low - bits, bits)
