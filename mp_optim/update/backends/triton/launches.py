"""How a rule's kernel is launched: which tensors one launch takes, what it is told, and who steps
what no kernel reads."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mp_optim.update.backends.launch_kinds import (
    Kind,
    Part,
    current_device,
    parts_of,
)
from mp_optim.update.backends.reference import ReferenceBackend
from mp_optim.update.backends.triton.kernels import tiles
from mp_optim.update.backends.triton.kernels.tiles import Flags
from mp_optim.update.backends.triton.launcher import (
    TYPES,
    Launcher,
    Recording,
    Rehearsal,
    row_of,
    shape_of,
    using,
)
from mp_optim.update.backends.triton.tables import Plan, Tables
from mp_optim.update.chunking import mark_written
from mp_optim.update.kernel_args import TensorLists

CHUNK = 8192
"""Elements a program steps: eight blocks of 1024, so that LAMB's sums of a chunk are those of
``sums``."""

Multiplier = float | Tensor
"""A number; or FP32 on the tensors' device, shape (1,) or (2,): what gradients are multiplied with,
and a flag that is not 0 if nothing is to be written. What is on the device can be formed there,
without the host waiting for it."""


class Launch(NamedTuple):
    """What a launch is of: a rule, and the programs of a part with the columns they read."""

    rule: Any
    flags: Flags
    part: Part
    plan: Plan
    aligned: bool
    columns: list[Tensor | None]


class KernelLaunches(ReferenceBackend):
    """A backend whose rules are launches of kernels; ``reference`` does what none does.

    Attributes:
        tables: what launches read on the device.
        launcher: carries launches out, or notes them.
    """

    def __init__(self) -> None:
        self.tables = Tables()
        self.launcher = Launcher(self.tables)

    def rehearse(self, work: Callable[[], object], device: torch.device) -> Rehearsal:
        """Let ``work`` run without a launch, and note what it would launch."""
        rehearsal = Rehearsal(self.tables, device)
        with using(self, rehearsal):
            work()
        return rehearsal

    def record(self, work: Callable[[], object], table: Tensor) -> None:
        """Let ``work`` run with numbers from the rows of a table, as a graph has to that is
        replayed."""
        with using(self, Recording(self.tables, table)):
            work()

    def step_parts(
        self,
        rule: Any,
        lists: TensorLists,
        moments: tuple[str, ...],
        scalars: Any,
        multiplier: Multiplier,
        flags: Flags,
    ) -> None:
        """Carry out a rule, whose kernel is called like the method of ``reference``."""
        for part, numbers in self.parts(lists, moments, scalars):
            if numbers is not None:
                self.launch_part(rule, part, moments, flags, numbers, multiplier)
                mark_written(part.lists)
            elif (value := on_host(multiplier)) is not None:
                by_reference = getattr(ReferenceBackend, rule.__name__)
                by_reference(self, part.lists, scalars, value)

    def parts(
        self, lists: TensorLists, moments: tuple[str, ...], scalars: Any
    ) -> Iterator[tuple[Part, Tensor | None]]:
        """The parts with tensors, each with its numbers on the device; without any if there is no
        kernel for it."""
        for part in parts_of(lists, moments):
            if part.kind is not None:
                weight = part.lists.average_weight
                row = row_of(scalars, _seed(part.lists), weight)
                yield part, self.launcher.numbers(row, part.lists.grad[0].device)
                continue
            self.launcher.by_reference(
                f"there is no kernel for gradients of {part.lists.grad[0].dtype}, "
                f"{_main_dtype(part.lists)} and their state"
            )
            if self.launcher.launches:
                yield part, None

    def numbers_of(self, part: Part, numbers: Sequence[float]) -> Tensor:
        """Those of a part's tensors on the device, FP32."""
        some = [numbers[index] for index in part.indices]
        table = torch.tensor(some, dtype=torch.float32, device="cpu")
        return self.tables.upload(table, part.lists.grad[0].device)

    def plans_of(
        self, part: Part, moments: tuple[str, ...]
    ) -> tuple[list[Tensor | None], list[tuple[Plan, bool]]]:
        """The columns that launches over a part read, and for each launch its programs and whether
        tensors are aligned."""
        return self.tables.launch_of(part, moments, CHUNK)

    def launch_part(
        self,
        rule: Any,
        part: Part,
        moments: tuple[str, ...],
        flags: Flags,
        *given: Any,
    ) -> None:
        """Launch a rule over a part, once or twice (:meth:`Tables.plans`)."""
        columns, plans = self.plans_of(part, moments)
        for plan, aligned in plans:
            self.launch(Launch(rule, flags, part, plan, aligned, columns), *given)

    def launch(
        self,
        launch: Launch,
        numbers: Tensor,
        multiplier: Multiplier,
        skip: Tensor | None = None,
        made: Tensor | None = None,
    ) -> None:
        """``made``: what the step itself made on the device, or makes there."""
        rule, flags, (_, kind, lists), plan, aligned, columns = launch
        assert kind is not None
        device = lists.grad[0].device
        if not plan.programs:
            return
        if isinstance(multiplier, Tensor) and multiplier.numel() == 2:
            multiplier, skip = multiplier[:1], multiplier[1:]
        streams = self.tables.streams(lists, device)
        tables = (plan.owners, plan.firsts, plan.sizes, streams)

        def run() -> None:
            with current_device(device):
                tiles.step[(plan.programs,)](
                    *tables,
                    numbers,
                    multiplier,
                    skip,
                    *columns,
                    made,
                    RULE=rule,
                    FLAGS=flags,
                    KIND=Kind._make(map(TYPES.__getitem__, kind)),
                    ON_DEVICE=isinstance(multiplier, Tensor),
                    ALIGNED=aligned,
                    CHUNK=CHUNK,
                    **shape_of(rule.__name__, kind),
                )

        described = (rule.__name__, kind, aligned, flags)
        places = (_place(multiplier), _place(skip))
        self.launcher.launch(run, (*described, *places, *tables, *columns))

    def index(self, indices: Sequence[int], device: torch.device) -> Tensor:
        return self.tables.values(array("q", indices), device)


def _main_dtype(lists: TensorLists) -> str:
    return f"parameters of {lists.main[0].dtype}" if lists.main else "no parameters"


def _seed(lists: TensorLists) -> int:
    """The seed as the int32 of the same bits."""
    seed = lists.noise[0].seed if lists.noise else 0
    return seed - (seed >> 31 << 32)


def _place(value: Multiplier | None) -> Any:
    """What must stay of a launch's argument: the address, if it is read on the device."""
    return value.data_ptr() if isinstance(value, Tensor) else value


def on_host(multiplier: Multiplier) -> float | None:
    """The multiplier as a number, or None if nothing is to be written; waits for the device."""
    if not isinstance(multiplier, Tensor):
        return multiplier
    value, *skip = multiplier.tolist()
    return None if skip and skip[0] else float(value)
