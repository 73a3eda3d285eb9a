"""Launches of a rule's kernel: the tensors of one launch, its arguments, and its fallback to
``reference``.

Numbers that change from step to step (rates, bias corrections, seeds) are stored on the device, in
one row for each call of a rule.
"""

from __future__ import annotations

import struct
from array import array
from collections.abc import Callable, Mapping, Sequence
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
from mp_optim.kernels.kernel_args import FLOATS, LambScalars, LaunchDtypes, TensorLists, check_fit
from mp_optim.kernels.reference import ReferenceBackend
from mp_optim.kernels.sums import sum_of_squares
from mp_optim.kernels.triton.kernels import sums
from mp_optim.kernels.triton.kernels.tiles import Flags
from mp_optim.kernels.triton.tables import RUN, Plan, Tables

OPTIONS: dict[str, Any] = {"enable_fp_fusion": False, "num_warps": 4}
"""Compiler options of every launch."""
WIDE = {**OPTIONS, "num_warps": 8}
"""Compiler options of launches with large tiles."""
ROWS = 4
"""Number of blocks of 256 elements in a tile: 8 elements for each of 128 threads. A multiprocessor
then has 70 to 100 kB in flight; 50 kB would hide the latency of memory (its share of the bandwidth
times 800 ns)."""
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
"""Index of a rule's first FP32 scalar in a row of int32 values, which store the scalars' bits. The
values before it are the seed, the weight of new main params in their averages, and, from
:data:`RATE` on, LAMB's lr in FP64."""
RATE = 2
_MOST_SCALARS = 10
WIDTH = SCALARS + _MOST_SCALARS
"""Number of int32 values in a row."""


def shape_of(rule: str, kind: LaunchDtypes) -> dict[str, Any]:
    """Return tile and number of threads of a rule's launch, chosen by ptxas reports.

    At most 128 registers are used, so that a multiprocessor has 16 warps, and none is spilled. The
    first kernel of LAMB, which has the tile of its sums, uses 180 in 4 warps. Four neighbouring
    elements of an FP32 tensor are 16 bytes, otherwise eight.
    """
    run = 4 if torch.float32 in kind else 8
    return {"ROWS": ROWS, "RUN": run, **(WIDE if rule == "lamb_moments" else OPTIONS)}


def row_of(scalars: Any, seed: int, average_weight: float = 1.0) -> array[int]:
    """Return the row of a call. The scalars are the FP32 fields, in their order.

    Raises:
        ValueError: the scalars do not fit into a row.
    """
    values = [getattr(scalars, name) for name in scalars.__slots__]
    rate = scalars.lr if isinstance(scalars, LambScalars) else 0.0
    numbers = [value for value in values if not isinstance(value, bool)]
    if len(numbers) > _MOST_SCALARS:
        raise ValueError(
            f"{type(scalars).__name__} has {len(numbers)} numbers, a row of kernels' numbers room "
            f"for {_MOST_SCALARS}"
        )
    numbers += [0.0] * (_MOST_SCALARS - len(numbers))
    layout = f"=ifd{_MOST_SCALARS}f"
    return array("i", struct.pack(layout, seed, average_weight, rate, *numbers))


def row_for(lists: TensorLists, scalars: Any) -> array[int]:
    """Return the row of a call with these lists."""
    seed = lists.noise[0].seed if lists.noise else 0
    # An int32 with the same bits.
    return row_of(scalars, seed - (seed >> 31 << 32), lists.average_weight)


# -- kernels that Triton has compiled --------------------------------------------------------------

MULTIPLE = 16
"""Triton compiles one kernel for pointers that are multiples of this number, and one for others."""


@dataclass(frozen=True, eq=False)
class KernelForm:
    """A kernel with its compiled-in constants.

    Before each launch Triton looks up the compiled kernel by every argument and constant, in some
    50 microseconds of Python. So each compiled kernel is cached here by its key, and launched
    directly afterwards.

    Attributes:
        constants: the last arguments of the kernel, in their order.
        options: options of the compiler.
        compiled: compiled kernels by device and by Triton's key. For a pointer the key has whether
            it is given and a multiple of 16, for other arguments the type.
    """

    kernel: Any
    constants: Mapping[str, Any]
    options: Mapping[str, Any]
    compiled: dict[tuple[Any, ...], CompiledKernel] = field(default_factory=dict)

    def launch(self, programs: int, *arguments: Any) -> None:
        """Launch ``programs`` programs on the current device, on its current stream."""
        if not isinstance(self.kernel, JITFunction):  # The kernel is interpreted.
            self.kernel[(programs,)](*arguments, **self.constants, **self.options)
            return
        key = (driver.active.get_current_device(), *map(_compiled_for, arguments))
        known = self.compiled.get(key)
        if known is not None:
            known[(programs, 1, 1)](*arguments, *self.constants.values())
            return
        made = self.kernel[(programs,)](*arguments, **self.constants, **self.options)
        if isinstance(made, CompiledKernel) and made.module is not None:  # It was launched already.
            self.compiled[key] = made


def _compiled_for(argument: Any) -> Any:
    if isinstance(argument, Tensor):
        return argument.dtype, argument.data_ptr() % MULTIPLE == 0
    return type(argument)


# -- launches -------------------------------------------------------------------------------------


CHUNK = 8192
"""Number of elements that a program steps: eight blocks of 1024, so that LAMB's sums of a chunk
equal those of ``sums``."""

MOST_LAUNCHES = 8
"""Number of sets of gradient addresses that are cached for each rule and list of main params."""

Multiplier = float | Tensor
"""The factor of gradients: a number; or FP32 on the tensors' device, shape (1,) or (2,): the
factor, and a flag that is not 0 to write nothing. A tensor can be computed on the device without
synchronization."""


Call = Callable[[ReferenceBackend, TensorLists, Any, Any], Any]
"""A pass of a backend over lists, with a multiplier and a number for each tensor."""


class Pass(NamedTuple):
    """A pass of a rule over lists.

    Attributes:
        kernel: kernel of the pass.
        call: the same pass with any backend.
        moments: names of the moments that it reads, as in ``alike_lists``.
        each: a number for each tensor, if the pass needs some.
        skip: a flag on the device, FP32, shape (1,): not 0 to write nothing.
    """

    kernel: Any
    call: Call
    lists: TensorLists
    moments: tuple[str, ...]
    scalars: Any
    flags: Flags
    multiplier: Multiplier = 1.0
    each: Sequence[float] | Tensor | None = None
    skip: Tensor | None = None


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
    """Return the compiled form for such launches."""
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
    """Return the multiplier as a number; None if a flag forbids writing. Synchronizes with the
    device."""
    if flag is not None and flag.item():
        return None
    if not isinstance(multiplier, Tensor):
        return multiplier
    value, *skip = multiplier.tolist()
    return None if skip and skip[0] else float(value)


# -- sums of squares: chunk by chunk, then in the order of kernels/sums.py -------------------------


SUM_CHUNK, SUM_WARPS = 4096, 2
"""Number of elements that a program sums, and its warps: small programs, so that some read while
others add."""


def sum_alike(tables: Tables, tensors: CachedTensorList) -> Tensor:
    """Return sums of squares of tensors of one dtype."""
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
        # The sum is 0.0 if a plan has no programs.
        total = found if total is None else total + found
    assert total is not None
    return total[:, 0]


@cache
def _sums_form(kernel: Any, warps: int, **constants: Any) -> KernelForm:
    return KernelForm(kernel, constants, {**OPTIONS, "num_warps": warps})


def added(plan: Plan, values: Tensor) -> Tensor:
    """Return sums of tensors from sums of chunks, shape (programs, columns)."""
    for each in plan.rounds:
        results = values.new_empty(each.programs, values.shape[1])
        with current_device(values.device):
            form = _sums_form(sums.run_sums, 4, COLUMNS=values.shape[1], RUN=RUN)
            tables = (each.owners, each.firsts, each.starts, each.counts)
            form.launch(each.programs, *tables, values, results)
        values = results
    return values
