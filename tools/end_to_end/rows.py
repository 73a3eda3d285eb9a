"""What a part is made of: rows, each a function that runs in a process of its own."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

Columns = dict[str, Any]
"""Values of a row, by column; JSON."""
Record = dict[str, Any]
"""A row with ``columns`` (None if it has no result), ``cause`` (one line about that), ``took`` in
seconds, and ``facts``: card, commit and versions."""


class NotInstalledError(Exception):
    """A package that a row needs is not there."""


class UnfinishedError(Exception):
    """A row ran out of memory, and has some columns all the same.

    Args:
        columns: those that are known.
        cause: one line.
    """

    def __init__(self, columns: Columns, cause: str) -> None:
        super().__init__(cause)
        self.columns = columns


def is_out_of_memory(error: Exception) -> bool:
    """True if memory of the device or the host was refused."""
    refused = ("out of memory", "can't allocate memory", "Cannot allocate memory")
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return any(words in str(error) for words in refused)


def cause_of(error: Exception) -> str:
    """Return one line about an error."""
    said = (str(error).strip().splitlines() or [""])[0][:300]
    kind = "out of memory" if is_out_of_memory(error) else type(error).__name__
    return f"{kind}: {said}"


@dataclass(frozen=True)
class Row:
    """One row of a part.

    Attributes:
        name: the row's label, unique in its part.
        call: ``module:function``; a module without a dot is below ``end_to_end``. The function
            takes ``arguments`` and ``device`` (a ``torch.device``) by keyword, and returns
            :data:`Columns`. The current folder is that of its part's records.
        arguments: JSON. A row with other arguments is another row: it is run again.
        seconds: limit of the row's process.
        source: URL of the page that the row's settings are taken from.
        host_left: GiB of the host's memory; a row that leaves less is ended as out of memory.
    """

    name: str
    call: str
    arguments: Mapping[str, Any] = field(default_factory=dict)
    seconds: float = 120.0
    source: str = ""
    host_left: float = 1.0


@dataclass(frozen=True)
class Sizes:
    """How large the rows are.

    Attributes:
        miniature: True for a few steps of a small shape, which only try the program.
        shape: of the miniature. steps: of its jobs, after the first.
    """

    miniature: bool = False
    shape: str = "tiny"
    steps: int = 19


@dataclass(frozen=True)
class Part:
    """One part of the benchmark.

    Attributes:
        title: heading of its table.
        rows: returns the part's rows, in the order in which they are run.
        columns: column of a row to its heading, in the order of the table. Columns that a row does
            not have stay empty.
        minutes: estimate on an H100.
        compare: adds columns that need several records, or None.
        text: Markdown between heading and table.
    """

    title: str
    rows: Callable[[Sizes], list[Row]]
    columns: Mapping[str, str]
    minutes: float
    compare: Callable[[list[Record]], None] | None = None
    text: str = ""
