"""Tables of addresses and sizes on a device, cached by their content.

A table is copied to the device only if no table with equal content is on the device.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from mp_optim.core import CachedTensorList
from mp_optim.host.accelerator import accelerator_of, is_capturing
from mp_optim.kernels.kernel_args import (
    AlikeLists,
    LaunchDtypes,
    TensorLists,
    check_fit,
    columns_of,
)

RUN = 1024
"""Number of sums that one program adds."""
MOST_ROWS = 64
"""Largest number of cached rows of scalars: enough for all calls of one step."""

_WIDE = LaunchDtypes._fields
"""Columns that kernels read 16 bytes at a time if all addresses are aligned. The columns of scales
are not included."""
_COLUMNS = (
    *("grad", "main", "remainder", "moment1", "moment2"),
    *("scale1", "scale2", "output", "average"),
)
"""Names of the columns of addresses, in the order of kernel arguments."""
_DTYPES = {"Q": torch.int64, "q": torch.int64, "i": torch.int32, "I": torch.int32}
_Value = TypeVar("_Value")


@dataclass(frozen=True, slots=True)
class Column:
    """Table of tensors' addresses on a device.

    Attributes:
        values: the addresses, int64, shape (tensors,).
        odd: indices of the tensors at addresses that are not multiples of 16.
    """

    values: Tensor
    odd: frozenset[int]

    @property
    def nbytes(self) -> int:
        """Device memory of the table in bytes."""
        return self.values.nbytes


class Plan:
    """Tensor and chunk of each program of a launch.

    Attributes:
        programs: number of programs.
        owners: index of each program's tensor, int32, shape (programs,).
        firsts: index of each tensor's first program, int32, shape (tensors,).
        sizes: number of elements of each tensor, int64, shape (tensors,).
        nbytes: device memory of ``owners`` in bytes.
    """

    def __init__(self, tables: Tables, sizes: array[int], chunk: int, device: torch.device) -> None:
        self._tables, self._device = tables, device
        self._chunks = [-(-size // chunk) for size in sizes]
        self.programs = sum(self._chunks)
        self.owners, self.firsts = _shares(tables, self._chunks, device)
        self.sizes = tables.values(sizes, device)
        self.nbytes = self.owners.nbytes

    @cached_property
    def rounds(self) -> list[Round]:
        """Passes that add the sums of each tensor's chunks, until each tensor has one sum."""
        rounds: list[Round] = []
        counts, starts = self._chunks, self.firsts
        while not rounds or max(counts) > 1:
            results = [max(1, -(-count // RUN)) for count in counts]
            owners, firsts = _shares(self._tables, results, self._device)
            before = self._tables.values(array("i", counts), self._device)
            rounds.append(Round(sum(results), owners, firsts, starts, before))
            counts, starts = results, firsts
        return rounds


class Round(NamedTuple):
    """One pass that adds runs of up to RUN sums of each tensor.

    Attributes:
        programs: number of programs.
        owners: index of each program's tensor, int32, shape (programs,).
        firsts: index of each tensor's first program, int32, shape (tensors,).
        starts: index of each tensor's first sum before the pass, int32, shape (tensors,).
        counts: number of sums of each tensor before the pass, int32, shape (tensors,).
    """

    programs: int
    owners: Tensor
    firsts: Tensor
    starts: Tensor
    counts: Tensor


def _shares(tables: Tables, counts: Sequence[int], device: torch.device) -> tuple[Tensor, Tensor]:
    owners = torch.repeat_interleave(
        torch.arange(len(counts), dtype=torch.int32, device="cpu"),
        torch.tensor(counts, dtype=torch.int64, device="cpu"),
    )
    firsts = array("i", accumulate(counts, initial=0))[:-1]
    return tables.upload(owners, device), tables.values(firsts, device)


class Tables:
    """Tables on devices, cached by their content.

    NOTE: a table is copied on the stream of its first use. As for any tensor, launches on other
    streams must be ordered after that stream.

    Args:
        remembered_bytes: largest number of bytes of device memory of cached tables.
    """

    def __init__(self, remembered_bytes: int = 64 << 20) -> None:
        self._most_bytes = remembered_bytes
        self._of_content: OrderedDict[Hashable, Any] = OrderedDict()
        self._bytes = 0
        self._rows: dict[tuple[bytes, torch.device], Tensor] = {}

    def column(self, tensors: Sequence[Tensor], device: torch.device) -> Column:
        """Return the table of some tensors' addresses."""
        addresses = CachedTensorList.of(tensors).addresses

        def build() -> Column:
            odd = frozenset(place for place, address in enumerate(addresses) if address % 16)
            return Column(self._uploaded(addresses, device), odd)

        return self._remembered(("column", addresses.tobytes(), device), build)

    def launch_of(
        self, part: AlikeLists, moments: tuple[str, ...], chunk: int
    ) -> tuple[list[Tensor | None], list[tuple[Plan, bool]]]:
        """Return tables of addresses in the order of kernel arguments, and plans of the launch.

        Each plan is paired with True if all addresses of its tensors, except scales, are multiples
        of 16.
        """
        lists, device = part.lists, part.lists.grad[0].device
        assert part.kind is not None
        found = columns_of(lists, part.kind, moments)
        there = {name: CachedTensorList.of(tensors) for name, tensors in found.items()}
        check_fit(part.kind, there)
        columns = {name: self.column(each, device) for name, each in there.items()}
        odd = frozenset[int]().union(
            *(column.odd for name, column in columns.items() if name in _WIDE)
        )
        plans = self.plans(there.get("main") or there["grad"], chunk, device, odd)
        return [columns[name].values if name in columns else None for name in _COLUMNS], plans

    def streams(self, lists: TensorLists, device: torch.device) -> Tensor | None:
        """Return the random stream and start of each tensor on the device; None without noise."""
        if not lists.noise:
            return None
        pairs = array("I")
        for noise in lists.noise:
            pairs.extend((noise.stream, noise.start & 0xFFFFFFFF))
        return self.values(pairs, device)

    def plans(
        self, tensors: Sequence[Tensor], chunk: int, device: torch.device, odd: frozenset[int]
    ) -> list[tuple[Plan, bool]]:
        """Return a plan with True for the tensors at multiples of 16 bytes, and a plan with False
        for the tensors at the indices ``odd``.

        A plan without tensors is left out. In each of two plans, the tensors of the other plan have
        size 0, so no program steps these tensors.
        """
        sizes = CachedTensorList.of(tensors).sizes
        if len(odd) in (0, len(tensors)):
            return [(self.plan_of(sizes, chunk, device), not odd)]
        found = []
        for aligned in (True, False):
            some = array("q", [0 if (i in odd) is aligned else n for i, n in enumerate(sizes)])
            found.append((self.plan_of(some, chunk, device), aligned))
        return found

    def plan_of(self, sizes: array[int], chunk: int, device: torch.device) -> Plan:
        """Return the cached plan for tensors of these sizes, divided into chunks of ``chunk``
        elements."""
        key = sizes.tobytes(), chunk, device
        return self._remembered(key, lambda: Plan(self, sizes, chunk, device))

    def values(self, values: array[int], device: torch.device) -> Tensor:
        """Return the cached table of some integers on a device."""
        key = values.typecode, values.tobytes(), device
        return self._remembered(key, lambda: self._uploaded(values, device))

    def _uploaded(self, values: array[int], device: torch.device) -> Tensor:
        dtype = _DTYPES[values.typecode]
        if not values:
            return torch.empty(0, dtype=dtype, device=device)
        return self.upload(torch.frombuffer(values, dtype=dtype), device)

    def row(self, row: array[int], device: torch.device) -> Tensor:
        """Return the cached row of a call's scalars on a device. All parts of the call read one
        row.

        Raises:
            RuntimeError: a CUDA graph is being captured.
        """
        _refuse_capture(device)
        key = (row.tobytes(), device)
        known = self._rows.pop(key, None)
        if known is None:
            known = self.upload(torch.frombuffer(row, dtype=torch.int32), device)
        self._rows[key] = known
        if len(self._rows) > MOST_ROWS:
            del self._rows[next(iter(self._rows))]
        return known

    def upload(self, table: Tensor, device: torch.device) -> Tensor:
        """Copy a table from host memory without synchronization.

        Raises:
            RuntimeError: a CUDA graph is being captured.
        """
        if accelerator_of(device) is None:
            return table.clone()
        _refuse_capture(device)
        return table.pin_memory().to(device, non_blocking=True)

    def _remembered(self, key: Hashable, build: Callable[[], _Value]) -> _Value:
        """Return the cached value of a key, or build and cache the value.

        If all cached values together need too much memory, the least recently used values are
        dropped.
        """
        value: Any = self._of_content.pop(key, None)
        if value is None:
            value = build()
            self._bytes += value.nbytes
        self._of_content[key] = value
        while self._bytes > self._most_bytes and len(self._of_content) > 1:
            self._bytes -= self._of_content.popitem(last=False)[1].nbytes
        known: _Value = value
        return known


def _refuse_capture(device: torch.device) -> None:
    if is_capturing(device):
        raise RuntimeError(
            "step() while a CUDA graph is captured: a replay would repeat this step's learning "
            "rate and bias corrections; capture forward and backward, and call step() after the "
            "capture"
        )
