"""What a part is made of: rows, each a function that runs in a process of its own."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

Columns = dict[str, Any]
"""Values of a row, by column; JSON."""


class NotInstalledError(Exception):
    """A package that a row needs is not there."""


@dataclass(frozen=True)
class Row:
    """One row of a part.

    Attributes:
        name: the row's label, unique in its part.
        call: ``module:function`` below ``end_to_end``. It takes ``arguments`` and ``device`` (a
            ``torch.device``) by keyword, and returns :data:`Columns`.
        arguments: JSON. A row with other arguments is another row: it is run again.
        seconds: limit of the row's process.
        source: URL of the page that the row's settings are taken from.
    """

    name: str
    call: str
    arguments: Mapping[str, Any] = field(default_factory=dict)
    seconds: float = 120.0
    source: str = ""


@dataclass(frozen=True)
class Sizes:
    """How large the rows are.

    Attributes:
        miniature: True for a few steps of a small shape, which only try the program.
        shape: of the miniature.
    """

    miniature: bool = False
    shape: str = "tiny"


@dataclass(frozen=True)
class Part:
    """One part of the benchmark.

    Attributes:
        title: heading of its table.
        rows: returns the part's rows, in the order in which they are run.
        columns: column of a row to its heading, in the order of the table. Columns that a row does
            not have stay empty.
        minutes: estimate on an H100.
    """

    title: str
    rows: Callable[[Sizes], list[Row]]
    columns: Mapping[str, str]
    minutes: float
