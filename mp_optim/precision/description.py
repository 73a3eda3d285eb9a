"""What the stack chose and why, as data that prints."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, fields, replace
from typing import Any, Protocol

import torch

from mp_optim.slots import ParamGroups, Slot, iter_slots, param_at
from mp_optim.slots.host_part import Place
from mp_optim.slots.optimizer import SlotOptimizer
from mp_optim.update.backends.native import describe_threads
from mp_optim.update.foreign import ForeignOptimizer


@dataclass(frozen=True)
class DescriptionRow:
    """Slots of one param group that share place and dtype.

    Attributes:
        group: index of the param group. place: ``device`` or ``host``. model_dtype: of the
            parameters.
        slots: how many parameters. params: how many elements on this rank.
        bytes: main params and optimizer state, not counting the model's own parameters.
        backend: what steps them. why: how it was chosen.
    """

    group: int
    place: str
    model_dtype: str
    slots: int
    params: int
    bytes: int
    backend: str
    why: str

    def shifted(self, groups: int) -> DescriptionRow:
        """The row with its group index moved behind ``groups`` others."""
        return replace(self, group=self.group + groups)


@dataclass(frozen=True)
class Description:
    """All rows, and notes on the whole; ``str()`` is a plain text table, and below it why each
    place is stepped by what it is."""

    rows: tuple[DescriptionRow, ...]
    notes: tuple[str, ...] = ()

    def __str__(self) -> str:
        shown = [f.name for f in fields(DescriptionRow) if f.name != "why"]
        table = [shown]
        for row in self.rows:
            table.append([_cell(getattr(row, name)) for name in shown])
        widths = [max(map(len, column)) for column in zip(*table, strict=True)]
        lines = ["  ".join(map(str.ljust, line, widths)).rstrip() for line in table]
        reasons = dict.fromkeys(
            f"{row.place}: {row.backend} ({row.why})" for row in self.rows
        )
        return "\n".join([*lines, *reasons, *self.notes])


def _cell(value: object) -> str:
    return f"{value:,}" if isinstance(value, int) else str(value)


class Described(Protocol):
    """What is asked of the optimizer that is described."""

    param_groups: ParamGroups
    inner: SlotOptimizer

    def has_state(self, slot: Slot) -> bool: ...
    def has_separate_main(self, slot: Slot) -> bool: ...


def describe(optimizer: Described) -> Description:
    """Read the rows off an optimizer; allocates its state if it had none."""
    counts: dict[tuple[int, str, str, str, str], list[int]] = defaultdict(
        lambda: [0, 0, 0]
    )
    place_of, host = optimizer.inner.place, optimizer.inner.host
    for slot, param in iter_slots(optimizer.param_groups):
        backend, why = _stepper(optimizer, slot.group, place_of(slot), param.device)
        key = (
            slot.group,
            place_of(slot),
            str(param.dtype).removeprefix("torch."),
            backend,
            why,
        )
        state = optimizer.inner.slot_state(slot) if optimizer.has_state(slot) else {}
        main = param_at(optimizer.inner.param_groups, slot)
        own = main.nbytes if optimizer.has_separate_main(slot) else 0
        row = counts[key]
        row[0] += 1
        row[1] += main.numel()
        row[2] += own + sum(value.nbytes for value in state.values())
    return Description(
        tuple(
            DescriptionRow(group, place, dtype, slots, params, size, backend, why)
            for (group, place, dtype, backend, why), (
                slots,
                params,
                size,
            ) in counts.items()
        ),
        (*(() if host is None else host.notes()), *_threads(counts)),
    )


def _threads(backends: Iterable[tuple[int, str, str, str, str]]) -> tuple[str, ...]:
    on_host = any(backend == "native" for _, _, _, backend, _ in backends)
    return (describe_threads(),) if on_host else ()


def _stepper(
    optimizer: Described, group: int, place: Place, device: torch.device
) -> tuple[str, str]:
    sub: Any = optimizer.inner.sub_optimizer(place)
    if isinstance(sub, ForeignOptimizer):
        return type(sub.optimizer).__name__, "given by the caller; gets FP32 gradients"
    where = torch.device("cpu") if place == "host" else device
    found: tuple[str, str] = sub.group_backend(sub.param_groups[group], where)
    return found
