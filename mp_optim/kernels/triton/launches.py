"""Launches of a rule's kernel: compiled forms, arguments, and passes.

Numbers that change from step to step (rates, bias corrections, seeds) are stored on the device, in
one row for each call of a rule.
"""

from __future__ import annotations

import struct
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any, NamedTuple

import torch
import triton.language as tl
from torch import Tensor
from triton.compiler import CompiledKernel
from triton.runtime import JITFunction, driver

from mp_optim.core import CachedTensorList
from mp_optim.host.accelerator import current_device
from mp_optim.kernels.element_rules import ELEMENT_STEPS
from mp_optim.kernels.kernel_args import FLOATS, LambScalars, LaunchDtypes, TensorLists, check_fit
from mp_optim.kernels.reference import ReferenceBackend
from mp_optim.kernels.sums import sum_of_squares
from mp_optim.kernels.triton.kernels import sums
from mp_optim.kernels.triton.kernels.tiles import Flags
from mp_optim.kernels.triton.tables import RUN, Plan, Tables

OPTIONS: dict[str, Any] = {"enable_fp_fusion": False, "num_warps": 4}
"""Compiler options of every launch."""
WIDE = {**OPTIONS, "num_warps": 8}
"""Compiler options of launches with large tiles: 8 warps."""
ROWS = 4
"""Number of blocks of 256 elements in a tile, so that each of 128 threads has 8 elements.

A multiprocessor then has 70 to 100 kB of reads in progress. 50 kB are enough to hide the latency of
memory (800 ns times a multiprocessor's share of the bandwidth).
"""
TYPES = {
    torch.float32: tl.float32,
    torch.bfloat16: tl.bfloat16,
    torch.float16: tl.float16,
    torch.int16: tl.int16,
    torch.int8: tl.int8,
    torch.uint8: tl.uint8,
    None: None,
}
SCALARS = 4
"""Index of a rule's first FP32 scalar in a row of int32 values, which store the bits of scalars.

Before the scalars, a row has the seed, the weight of new main params in their averages, and, from
:data:`RATE` on, LAMB's lr in FP64.
"""
RATE = 2
_MOST_SCALARS = 10
WIDTH = SCALARS + _MOST_SCALARS
"""Number of int32 values in a row."""


def shape_of(rule: str, kind: LaunchDtypes) -> dict[str, Any]:
    """Return the tile and the number of warps of a rule's launch, chosen by reports of ptxas.

    A kernel uses at most 128 registers and spills none, so that a multiprocessor has 16 warps.
    LAMB's first kernel, whose tile is given by its sums, uses 180 registers in 4 warps. A thread
    reads 4 neighboring elements of an FP32 tensor (16 bytes), or 8 elements without FP32 tensors.
    """
    run = 4 if torch.float32 in kind else 8
    return {"ROWS": ROWS, "RUN": run, **(WIDE if rule == "lamb_moments" else OPTIONS)}


def row_for(lists: TensorLists, scalars: Any) -> array[int]:
    """Return the row of a call: the seed of the lists' noise, the average weight, LAMB's lr, and
    the FP32 fields of the scalars.

    Raises:
        ValueError: the scalars have too many numbers for a row.
    """
    values = [getattr(scalars, name) for name in scalars.__slots__]
    rate = scalars.lr if isinstance(scalars, LambScalars) else 0.0
    numbers = [value for value in values if not isinstance(value, bool)]
    if len(numbers) > _MOST_SCALARS:
        raise ValueError(
            f"scalars={type(scalars).__name__}: {len(numbers)} numbers do not fit into a row of "
            f"{_MOST_SCALARS}; raise _MOST_SCALARS and the number of scalars in the kernels"
        )
    numbers += [0.0] * (_MOST_SCALARS - len(numbers))
    layout = f"=ifd{_MOST_SCALARS}f"
    seed = lists.noise[0].seed if lists.noise else 0
    # struct packs int32, so convert the 32-bit seed to the int32 with the same bits.
    seed -= seed >> 31 << 32
    return array("i", struct.pack(layout, seed, lists.average_weight, rate, *numbers))


# -- compiled kernels ------------------------------------------------------------------------------

MULTIPLE = 16
"""Triton compiles a faster kernel for pointers that are multiples of this number of bytes."""


@dataclass(frozen=True, eq=False)
class KernelForm:
    """A kernel with its compile-time constants, and the kernels that Triton compiled for it.

    Before each launch Triton looks up the compiled kernel by all arguments and constants, in about
    50 microseconds of Python. This class caches compiled kernels by a short key and launches them
    directly.

    Attributes:
        kernel: the Triton function.
        constants: the last arguments of the kernel, in order.
        options: options of the compiler.
        compiled: compiled kernels by device and types of the arguments. For a pointer, the key has
            its dtype, and True if its address is a multiple of 16.
    """

    kernel: Any
    constants: Mapping[str, Any]
    options: Mapping[str, Any]
    compiled: dict[tuple[Any, ...], CompiledKernel] = field(default_factory=dict)

    def launch(self, programs: int, *arguments: Any) -> None:
        """Launch the kernel with ``programs`` programs, on the current device's current stream."""
        # An interpreted kernel is never compiled, so there is nothing to cache.
        if not isinstance(self.kernel, JITFunction):
            self.kernel[(programs,)](*arguments, **self.constants, **self.options)
            return
        types = [
            (each.dtype, each.data_ptr() % MULTIPLE == 0)
            if isinstance(each, Tensor)
            else type(each)
            for each in arguments
        ]
        key = driver.active.get_current_device(), *types
        known = self.compiled.get(key)
        if known is not None:
            known[(programs, 1, 1)](*arguments, *self.constants.values())
            return
        made = self.kernel[(programs,)](*arguments, **self.constants, **self.options)
        # The call above has launched the kernel, so only cache the compiled kernel.
        if isinstance(made, CompiledKernel) and made.module is not None:
            self.compiled[key] = made


# -- launches -------------------------------------------------------------------------------------


CHUNK = 8192
"""Number of elements that a program steps: eight blocks of 1024, so that LAMB's sums of a chunk are
partial sums of ``kernels/sums.py``."""

MOST_LAUNCHES = 8
"""Largest number of cached launches per rule and list of main params, one for each set of gradient
addresses."""

Multiplier = float | Tensor
"""Factor of the gradients: a number, or an FP32 tensor on the tensors' device, shape (1,) or (2,).

The second element of a tensor is a flag. If the flag is not 0, the step writes nothing. The device
can compute the tensor without synchronization.
"""


class Pass(NamedTuple):
    """A pass of a rule over tensor lists.

    Attributes:
        kernel: Triton kernel of the pass. Its name is an element rule, or the method of a backend
            that runs the pass.
        lists: tensor lists.
        moments: names of the moments that the pass reads, as in ``alike_lists``.
        scalars: scalars of the step.
        flags: switches that are compiled into the kernel.
        multiplier: factor of the gradients.
        each: a number for each tensor, if the pass reads one.
        skip: FP32, shape (1,), on the device; if not 0, nothing is written.
    """

    kernel: Any
    lists: TensorLists
    moments: tuple[str, ...]
    scalars: Any
    flags: Flags
    multiplier: Multiplier = 1.0
    each: Sequence[float] | Tensor | None = None
    skip: Tensor | None = None

    def run_by(self, backend: ReferenceBackend, lists: TensorLists, *numbers: Any) -> Any:
        """Run the pass by any backend, and return the result of the backend's method.

        Args:
            backend: the backend.
            lists: tensor lists of the pass.
            *numbers: the multiplier, or a number for each tensor; and a flag that skips the pass.
        """
        name = self.kernel.__name__
        if name in ELEMENT_STEPS:
            return backend.step(name, lists, self.scalars, *numbers)
        return getattr(backend, name)(lists, self.scalars, *numbers)


@cache
def step_form(
    kernel: Any,
    rule: Any,
    flags: Flags,
    kind: LaunchDtypes,
    on_device: bool,
    aligned: bool,
    chunk: int,
) -> KernelForm:
    """Return the kernel with these compile-time constants. Equal constants return one cached
    object."""
    constants = {
        "RULE": rule,
        "FLAGS": flags,
        "KIND": LaunchDtypes._make(map(TYPES.__getitem__, kind)),
        "ON_DEVICE": on_device,
        "ALIGNED": aligned,
        "CHUNK": chunk,
    }
    shape = shape_of(rule.__name__, kind)
    constants |= {name: shape.pop(name) for name in ("ROWS", "RUN")}
    return KernelForm(kernel, constants, shape)


def on_host(multiplier: Multiplier, flag: Tensor | None = None) -> float | None:
    """Return the multiplier as a number; None if a flag on the device forbids the step to write.

    Synchronizes if the multiplier or the flag is a tensor on a device.
    """
    if flag is not None and flag.item():
        return None
    if not isinstance(multiplier, Tensor):
        return multiplier
    value, *skip = multiplier.tolist()
    return None if skip and skip[0] else float(value)


# -- sums of squares: chunk by chunk, then in the order of kernels/sums.py -------------------------


SUM_CHUNK, SUM_WARPS = 4096, 2
"""Number of elements that a program sums, and its number of warps.

Programs are small, so that some programs read memory while others add.
"""


def sum_alike(tables: Tables, tensors: CachedTensorList) -> Tensor:
    """Return the sum of squares of each tensor: FP64, shape (n,). All tensors have one dtype."""
    if tensors[0].dtype not in FLOATS:
        return sum_of_squares(tensors)
    if not tensors.contiguous:
        tensors = CachedTensorList(tensor.contiguous() for tensor in tensors)
    device = tensors[0].device
    check_fit(LaunchDtypes(tensors[0].dtype), {"grad": tensors})
    column = tables.column(tensors, device)
    total = None
    for plan, aligned in tables.plans(tensors, SUM_CHUNK, device, column.odd):
        squares = torch.empty(plan.programs, 1, dtype=torch.float64, device=device)
        if plan.programs:
            constants = {"TYPE": TYPES[tensors[0].dtype], "ALIGNED": aligned, "CHUNK": SUM_CHUNK}
            form = _sums_form(sums.chunk_sums, SUM_WARPS, **constants)
            given = (plan.owners, plan.firsts, plan.sizes, column.values, squares)
            with current_device(device):
                form.launch(plan.programs, *given)
        found = added(plan, squares)
        # A tensor without programs in a plan has sum 0 there, so add the sums of both plans.
        total = found if total is None else total + found
    assert total is not None
    return total[:, 0]


@cache
def _sums_form(kernel: Any, warps: int, **constants: Any) -> KernelForm:
    return KernelForm(kernel, constants, {**OPTIONS, "num_warps": warps})


def added(plan: Plan, values: Tensor) -> Tensor:
    """Add the sums of each tensor's chunks.

    Args:
        plan: tensor and chunk of each program.
        values: sums of chunks, shape (programs, columns).

    Returns:
        Shape (tensors, columns).
    """
    for each in plan.rounds:
        results = values.new_empty(each.programs, values.shape[1])
        with current_device(values.device):
            form = _sums_form(sums.run_sums, 4, COLUMNS=values.shape[1], RUN=RUN)
            tables = (each.owners, each.firsts, each.starts, each.counts)
            form.launch(each.programs, *tables, values, results)
        values = results
    return values
