"""How launches happen: at once; not at all, but noted; or inside of a CUDA graph.

What changes from step to step (rates, bias corrections, seeds) lies in memory, in one row of
numbers for each call of a rule. In a graph the rows are those of one table that is written before
each replay; everything else about a launch is fixed in the graph, and is what a rehearsal compares.
"""

from __future__ import annotations

import struct
from array import array
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import triton.language as tl
from torch import Tensor

from mp_optim.update.backends.launch_kinds import Kind
from mp_optim.update.backends.triton.tables import Tables
from mp_optim.update.kernel_args import LambScalars, StableScalars

OPTIONS: dict[str, Any] = {"enable_fp_fusion": False, "num_warps": 4}
"""Of every launch."""
ROWS, COMPACT_ROWS = 8, 4
"""Blocks of 256 elements in a tile: 16 elements for each of 128 threads, or 8 where state is in
fewer bits than FP32, or averages are kept."""
TYPES = {
    torch.float32: tl.float32,
    torch.bfloat16: tl.bfloat16,
    torch.float16: tl.float16,
    torch.int16: tl.int16,
    torch.int8: tl.int8,
    torch.uint8: tl.uint8,
    None: None,
}
WIDTH = 16
"""Int32 values of a row: the seed, FP32 scalars as their bits, from :data:`RATE` on LAMB's lr, or
StableAdamW's rate, in FP64, what new main params weigh in their averages, and from
:data:`DECAY_RATE` on StableAdamW's in FP64."""
RATE, DECAY_RATE = 10, 14


def shape_of(rule: str, kind: Kind) -> dict[str, Any]:
    """Tile and threads of a rule's launch, chosen by what ptxas says for sm_90: at most 128
    registers, so that a multiprocessor holds 16 warps, and no spills. Decoding and encoding in
    tiles of 8 blocks takes up to 244 registers; the first kernel of LAMB, whose tile is that of
    its sums, 180 in 4 warps."""
    state = {kind.remainder, kind.moment1, kind.moment2}
    is_plain = state <= {None, torch.float32} and kind.average is None
    rows = ROWS if is_plain else COMPACT_ROWS
    return {"ROWS": rows, **OPTIONS} | (
        {"num_warps": 8} if rule == "lamb_moments" else {}
    )


def row_of(scalars: Any, seed: int, average_weight: float = 1.0) -> array[int]:
    """A call's row: seed, then the fields of the scalars that are FP32 numbers, in their order."""
    values = [getattr(scalars, name) for name in scalars.__slots__]
    rate = scalars.lr if isinstance(scalars, LambScalars) else 0.0
    decay_rate = 0.0
    if isinstance(scalars, StableScalars):
        rate, decay_rate = scalars.rate, scalars.decay_rate
    numbers = [value for value in values if not isinstance(value, bool)][: RATE - 1]
    packed = struct.pack(
        f"i{RATE - 1}fdfd",
        seed,
        *numbers,
        *[0.0] * (RATE - 1 - len(numbers)),
        rate,
        average_weight,
        decay_rate,
    )
    return array("i", packed)


class Launcher:
    """Launches at once."""

    launches = True
    """Whether kernels run, or are captured to run later; false where they are only noted."""

    def __init__(self, tables: Tables) -> None:
        self._tables = tables

    def numbers(self, row: array[int], device: torch.device) -> Tensor:
        """A row on the device, int32, shape (WIDTH,); nothing waits for it."""
        return self._tables.upload(torch.frombuffer(row, dtype=torch.int32), device)

    def launch(self, run: Callable[[], object], fixed: Sequence[Any]) -> None:
        """Do it. ``fixed`` is what must stay the same for a graph that holds the launch."""
        run()

    def by_reference(self, what: str) -> None:
        """A part of the step is no kernel of ours."""


class Recording(Launcher):
    """Launches at once as well, into a graph that is being captured: numbers are rows of a table
    that stays."""

    def __init__(self, tables: Tables, table: Tensor) -> None:
        super().__init__(tables)
        self._rows: Iterator[Tensor] = iter(table.unbind())

    def numbers(self, row: array[int], device: torch.device) -> Tensor:
        return next(self._rows)


class Rehearsal(Launcher):
    """Launches nothing.

    Attributes:
        rows: the numbers of every call, in order.
        fixed: everything else about every launch.
        unfit: why a graph cannot hold the step; empty if it can.
    """

    launches = False

    def __init__(self, tables: Tables, device: torch.device) -> None:
        super().__init__(tables)
        self.rows: list[array[int]] = []
        self.fixed: list[Sequence[Any]] = []
        self.unfit = ""
        self._device = device
        self._nothing = torch.empty(0, dtype=torch.int32, device=device)

    def numbers(self, row: array[int], device: torch.device) -> Tensor:
        self.rows.append(row)
        return self._nothing

    def launch(self, run: Callable[[], object], fixed: Sequence[Any]) -> None:
        self.fixed.append(fixed)

    def by_reference(self, what: str) -> None:
        self.unfit = what

    def matches(self, other: Rehearsal) -> bool:
        """Whether a graph of the other step is one of this step, but for the numbers."""
        return (
            not self.unfit
            and len(self.rows) == len(other.rows)
            and len(self.fixed) == len(other.fixed)
            and all(map(_alike, self.fixed, other.fixed))
        )

    def upload(self) -> Tensor:
        """The numbers of all calls on the device, shape (calls, WIDTH), in memory of their own;
        nothing waits."""
        joined = array("i", b"".join(row.tobytes() for row in self.rows))
        if not joined:
            return torch.empty(0, WIDTH, dtype=torch.int32, device=self._device)
        return self._tables.upload(
            torch.frombuffer(joined, dtype=torch.int32), self._device
        ).view(-1, WIDTH)


def _alike(parts: Sequence[Any], others: Sequence[Any]) -> bool:
    """Tables are compared by identity: the same ones, kept along with the rehearsal; all else by
    value."""
    return len(parts) == len(others) and all(
        a is b if isinstance(a, Tensor) or isinstance(b, Tensor) else a == b
        for a, b in zip(parts, others, strict=True)
    )


@contextmanager
def using(owner: Any, launcher: Launcher) -> Iterator[None]:
    """Let a backend launch by another launcher for a while."""
    before, owner.launcher = owner.launcher, launcher
    try:
        yield
    finally:
        owner.launcher = before
