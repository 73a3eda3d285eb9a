"""Execute compiled kernels on elements beyond 2^31, and print the number of compared tensors."""

import sys
import warnings
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from ptx.kernels import MachineBackend, _WatchedTables  # isort: skip  (imported first)

import torch
from torch import Tensor

from mp_optim.core.slot_state import AVERAGE
from mp_optim.kernels.kernel_args import AlikeLists, TensorLists
from mp_optim.kernels.reference import ReferenceBackend
from mp_optim.kernels.triton.tables import _COLUMNS, Column, Plan
from ptx.triton_driver import StaticDriver
from support.kernel_cases import GROUP, PASSES, Case, lists_of, step_with

BEFORE = 2**31 + 3 * 16384
"""Number of elements before the first present one: whole chunks of every kernel."""
SIZES = [300, 1, 9000]
COMPACT = Case(
    rest=torch.int8,
    moments=(torch.uint8, torch.uint8),
    noisy=True,
    aligned=True,
    average=torch.bfloat16,
)
CASES = {
    "adam": (Case(aligned=True), Case(), COMPACT),
    "lion": (replace(COMPACT, moments=(torch.int8, torch.uint8)),),
    "sgd": (Case(grad=torch.float32, output=None, aligned=True),),
}


class FarTables(_WatchedTables):
    def __init__(self) -> None:
        super().__init__()
        self._far: dict[Any, Any] = {}
        self._is_launch = False

    def _shifted(self, values: Tensor, num_bytes: int) -> Tensor:
        key = values.data_ptr(), num_bytes
        if key not in self._far:
            self._far[key] = far = values - num_bytes
            self._tensors[far.data_ptr()] = self._tensors[values.data_ptr()]
        shifted: Tensor = self._far[key]
        return shifted

    def column(self, tensors: Sequence[Tensor], device: torch.device) -> Column:
        column = super().column(tensors, device)
        if self._is_launch:
            return column
        return replace(
            column, values=self._shifted(column.values, BEFORE * tensors[0].element_size())
        )

    def launch_of(self, part: AlikeLists, moments: tuple[str, ...], chunk: int) -> Any:
        self._is_launch = True
        columns, plans = super().launch_of(part, moments, chunk)
        self._is_launch = False
        far = []
        for name, values in zip(_COLUMNS, columns, strict=True):
            dtype = None if name.startswith("scale") else getattr(part.kind, name)
            size = BEFORE // 64 if dtype is None else BEFORE * dtype.itemsize
            if dtype == torch.uint8 and name == "moment1":
                size //= 2
            far.append(None if values is None else self._shifted(values, size))
        return far, plans

    def plan_of(self, sizes: Any, chunk: int, *arguments: Any) -> Plan:
        near = super().plan_of(sizes, chunk, *arguments)
        if near not in self._far:
            far = Plan.__new__(Plan)
            far.__dict__.update(near.__dict__)
            far.rounds = near.rounds  # Partial sums keep their addresses.
            far.firsts = near.firsts - BEFORE // chunk
            far.sizes = near.sizes + BEFORE
            self._far[near] = far
        plan: Plan = self._far[near]
        return plan


def far_backend() -> MachineBackend:
    backend = MachineBackend()
    backend._watched = FarTables()
    backend.tables = backend._watched
    return backend


def tensors_of(lists: TensorLists) -> list[Tensor]:
    state = [tensor for tensors in lists.state.values() for tensor in tensors]
    return [*lists.main, *state, *(each for each in lists.output if each is not None)]


def compared(backend: MachineBackend, rule: str, case: Case) -> int:
    ours, theirs = (lists_of(5, SIZES, PASSES[rule], case) for _ in range(2))
    if theirs.noise:
        begin = [replace(each, start=each.start + BEFORE) for each in theirs.noise]
        theirs = replace(theirs, noise=begin)
    assert (AVERAGE in ours.state) == (case.average is not None)
    sums = []
    for lists, by in ((ours, backend), (theirs, ReferenceBackend())):
        step_with(by, rule, lists, GROUP, 2, 0.37)
        sums.append(by.sum_of_squares(lists.grad))
    pairs = list(zip([*tensors_of(ours), sums[0]], [*tensors_of(theirs), sums[1]], strict=True))
    for number, (mine, other) in enumerate(pairs):
        assert mine.view(torch.uint8).equal(other.view(torch.uint8)), (rule, case, number)
    return len(pairs)


def main(arch: int) -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    backend = far_backend()
    with StaticDriver(arch, backend.carry_out):
        print(sum(compared(backend, rule, case) for rule in CASES for case in CASES[rule]))


if __name__ == "__main__":
    main(int(sys.argv[1]))
