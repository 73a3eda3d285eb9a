"""A step of Muon in one call of the kernels: momenta, norms, Newton-Schulz steps and parameters of
one matrix after the other, each of which stays in a thread's caches meanwhile."""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Sequence
from typing import NamedTuple

from mp_optim.update.backends import native_library as lib
from mp_optim.update.backends.native import NativeBackend, muon_values
from mp_optim.update.backends.native_products import NativeSteps
from mp_optim.update.chunking import mark_written
from mp_optim.update.kernel_args import MuonScalars, TensorLists

_ALIGNED = 1024
"""Of elements before a matrix in its tensor there is a multiple."""
_spent = ctypes.c_double()


class MuonWork(NamedTuple):
    """What is stepped, in lists of as many tensors.

    Attributes:
        momenta, params: what each pass reads and writes; ``momenta.output`` and ``params.grad`` are
            the tensors of ``steps``.
        steps: of stacks in which each tensor has the matrices of ``members``.
        members: indices of the tensors of each stack, in order.
    """

    momenta: TensorLists
    params: TensorLists
    steps: NativeSteps
    members: Sequence[Sequence[int]]


def seconds_of_products() -> float:
    """Time that these calls have spent in products of matrices, since the process began."""
    return _spent.value


def step_in_one_call(
    backend: NativeBackend,
    work: MuonWork,
    scalars: MuonScalars,
    multiplier: float,
    factors: Sequence[float],
) -> bool:
    """Whether it was done; if not, nothing was."""
    places = _places(work)
    tables = None if places is None else backend.muon_tables(work.momenta, work.params)
    if places is None or tables is None:
        return False
    values, numbers = muon_values(scalars, multiplier), array("f", factors)
    passes = lib.MuonPasses(
        *(ctypes.pointer(table.tensors) for table in tables),
        ctypes.pointer(values),
        numbers.buffer_info()[0],
        places.buffer_info()[0],
        ctypes.pointer(_spent),
        scalars.decay,
    )
    work.steps.take_within(passes)
    mark_written(work.momenta)
    mark_written(work.params)
    return True


def _places(work: MuonWork) -> array[int] | None:
    """Tensor and first element of each matrix; None if one begins where kernels cannot."""
    places = array("q")
    for (stack, _), members in zip(work.steps.stacks, work.members, strict=True):
        size = stack.size(1) * stack.size(2)
        for index in members:
            count = work.params.grad[index].numel() // size
            if count > 1 and size % _ALIGNED:
                return None
            for matrix in range(count):
                places.extend((index, matrix * size))
    return places
