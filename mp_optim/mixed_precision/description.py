"""The description of a stack as printable data: places and backends, with their reasons."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

from mp_optim.core import ParamGroups, iter_slots, param_at
from mp_optim.core.executor import Executor
from mp_optim.kernels.native_library import describe_threads
from mp_optim.mixed_precision.slot_table import SlotTable
from mp_optim.offload.hybrid_executor import stepper_of


@dataclass(frozen=True)
class DescriptionRow:
    """One row of the description: the slots of a param group that have the same place and dtype.

    Attributes:
        group: index of the param group.
        place: ``device``, ``host`` or ``streamed``.
        model_dtype: dtype of the parameters.
        slots: number of parameters.
        params: number of elements on this rank.
        bytes: bytes of main params and optimizer state, without the model's own parameters.
        backend: name of the backend.
        why: reason for the backend.
    """

    group: int
    place: str
    model_dtype: str
    slots: int
    params: int
    bytes: int
    backend: str
    why: str


@dataclass(frozen=True)
class Description:
    """The description of a stack. ``str()`` returns a plain text table, followed by the reason for
    the backend of each place.

    Attributes:
        rows: rows of the table.
        notes: lines after the table.
    """

    rows: tuple[DescriptionRow, ...]
    notes: tuple[str, ...] = ()

    def __str__(self) -> str:
        shown = [f.name for f in fields(DescriptionRow) if f.name != "why"]
        table = [shown]
        for row in self.rows:
            cells = (getattr(row, name) for name in shown)
            table.append([f"{cell:,}" if isinstance(cell, int) else str(cell) for cell in cells])
        reasons = dict.fromkeys(f"{row.place}: {row.backend} ({row.why})" for row in self.rows)
        return "\n".join([columns(table), *reasons, *self.notes])


def columns(rows: Sequence[Sequence[str]]) -> str:
    """Return a table as text with aligned columns.

    Args:
        rows: the cells of each line.
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join("  ".join(map(str.ljust, row, widths)).rstrip() for row in rows)


def describe(groups: ParamGroups, executor: Executor, table: SlotTable) -> Description:
    """Return the description of a precision wrapper. The call allocates missing state, because the
    table shows the bytes of state.

    Args:
        groups: groups of the model's parameters.
        executor: the executor that steps the parameters.
        table: the slot table.
    """
    counts: dict[DescriptionRow, list[int]] = defaultdict(lambda: [0, 0, 0])
    for index, (slot, param) in enumerate(iter_slots(groups)):
        place, dtype = executor.place(slot), str(param.dtype).removeprefix("torch.")
        backend, why = executor.backend_and_reason(slot.group, place, param.device)
        state = executor.state_of(slot).live() if table.has_main[index] else {}
        main = param_at(executor.param_groups, slot)
        tensors = [*state.values(), *([main] if table.has_own_main[index] else [])]
        kind = DescriptionRow(slot.group, place, dtype, 0, 0, 0, backend, why)
        row = counts[kind]
        row[0] += 1
        row[1] += main.numel()
        row[2] += sum(tensor.nbytes for tensor in tensors)
    rows = []
    for kind, (slots, params, size) in counts.items():
        rows.append(replace(kind, slots=slots, params=params, bytes=size))
    stepper = stepper_of(executor)
    notes = () if stepper is None else stepper.notes()
    if any(row.backend == "native" for row in rows):
        notes = (*notes, describe_threads())
    return Description(tuple(rows), notes)
