"""The rules by the compiled kernels of ``update/csrc``: one pass over every tensor of a call, on
all host threads.

Bit for bit what ``reference`` computes. What the kernels do not read, such as FP64 gradients, goes
to it.
"""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from mp_optim.slots import CachedTensorList
from mp_optim.slots.state_keys import AVERAGE, REMAINDER, scale_key
from mp_optim.update.backends import native_library as lib
from mp_optim.update.backends.host_threads import thread_count
from mp_optim.update.backends.launch_kinds import (
    FLOATS,
    Kind,
    check_fit,
    kept_moments,
    parts_of,
)
from mp_optim.update.backends.memory_access import LARGE, AccessChoice
from mp_optim.update.backends.reference import ReferenceBackend
from mp_optim.update.chunking import mark_written, tell_autograd
from mp_optim.update.codecs import Noise
from mp_optim.update.kernel_args import (
    MAIN,
    AdamScalars,
    LambScalars,
    LionScalars,
    MuonScalars,
    SgdScalars,
    StableScalars,
    TensorLists,
)
from mp_optim.update.muon_passes import MOMENTUM
from mp_optim.update.stable_steps import Step

_MOMENTS = ("exp_avg", "exp_avg_sq")
_CODES = {
    None: 0,
    torch.float32: 1,
    torch.bfloat16: 2,
    torch.float16: 3,
    torch.int8: 4,
    torch.uint8: 5,
    torch.int16: 6,
}
_PACKED_CODE = 7
"""Of first moments in 4-bit codes."""


class Table:
    """The C view of tensor lists; keeps what it points to alive."""

    def __init__(
        self,
        kind: Kind,
        lists: Mapping[str, Sequence[Tensor]],
        noise: Sequence[Noise] | None = None,
        average_weight: float = 1.0,
    ) -> None:
        steady = {name: CachedTensorList.of(tensors) for name, tensors in lists.items()}
        check_fit(kind, steady)
        self._arrays = {name: tensors.addresses for name, tensors in steady.items()}
        sized = steady.get("main") or steady["grad"]
        self._arrays["numel"] = sized.sizes
        if noise is not None:
            self._arrays["stream"] = array("I", [item.own_stream for item in noise])
        addresses = {
            name: values.buffer_info()[0] for name, values in self._arrays.items()
        }
        dtypes = {
            f"{name}_dtype": _CODES[dtype] for name, dtype in kind._asdict().items()
        }
        if kind.moment1 == torch.uint8:
            dtypes["moment1_dtype"] = _PACKED_CODE
        seed = noise[0].seed if noise else 0
        count = len(steady.get("grad") or steady["main"])
        self.tensors = lib.Tensors(
            count=count,
            seed=seed,
            average_weight=average_weight,
            **addresses,
            **dtypes,
        )

    @property
    def numel(self) -> int:
        """Elements of all tensors."""
        return sum(self._arrays["numel"])


@cache
def access_choice() -> AccessChoice:
    """How this process's kernels go through memory."""
    return AccessChoice(lib.native_library())


def describe_access() -> str:
    """How the kernels go through memory, and why so."""
    return f"access to memory: {access_choice().describe()}"


class NativeBackend(ReferenceBackend):
    """Calls the library; ``reference`` does what it cannot."""

    name = "native"
    reads_source = True
    """Whether present values may lie elsewhere than what is written."""

    def __init__(self, library: lib.NativeLibrary) -> None:
        self.library = library
        self.access = access_choice()

    def adam(self, lists: TensorLists, scalars: AdamScalars, multiplier: float) -> None:
        values = lib.Adam(multiplier=multiplier, **_fields(scalars))
        self._run(
            "mp_adam",
            lists,
            kept_moments(lists, _MOMENTS),
            values,
            lambda part: ReferenceBackend.adam(self, part, scalars, multiplier),
        )

    def sgd(self, lists: TensorLists, scalars: SgdScalars, multiplier: float) -> None:
        values = lib.Sgd(multiplier=multiplier, **_fields(scalars))
        self._run(
            "mp_sgd",
            lists,
            kept_moments(lists, ("momentum_buffer",)),
            values,
            lambda part: ReferenceBackend.sgd(self, part, scalars, multiplier),
        )

    def lion(self, lists: TensorLists, scalars: LionScalars, multiplier: float) -> None:
        values = lib.Lion(multiplier=multiplier, **_fields(scalars))
        self._run(
            "mp_lion",
            lists,
            ("exp_avg",),
            values,
            lambda part: ReferenceBackend.lion(self, part, scalars, multiplier),
        )

    def muon_momentum(
        self, lists: TensorLists, scalars: MuonScalars, multiplier: float
    ) -> None:
        values = muon_values(scalars, multiplier)
        self._run(
            "mp_muon_momentum",
            lists,
            (MOMENTUM,),
            values,
            lambda part: ReferenceBackend.muon_momentum(
                self, part, scalars, multiplier
            ),
        )

    def muon_apply(
        self, lists: TensorLists, scalars: MuonScalars, factors: Sequence[float]
    ) -> None:
        for indices, kind, part in parts_of(lists, ()):
            part_factors = array("f", [factors[index] for index in indices])
            if kind is None:
                super().muon_apply(part.in_place(), scalars, part_factors)
            else:
                to = (scalars.decay, part_factors.buffer_info()[0])
                self._call("mp_muon_apply", _table(part, kind, ()), *to)
                mark_written(part)

    def muon_tables(
        self, momenta: TensorLists, params: TensorLists
    ) -> tuple[Table, Table] | None:
        """What both passes read and write; None if kernels do not take all of it at once."""
        tables = []
        for lists, moments in ((momenta, (MOMENTUM,)), (params, ())):
            (_, kind, part), *others = parts_of(lists, moments)
            if kind is None or others:
                return None
            tables.append(_table(part, kind, moments))
        self._settle_access(tables[0])
        return tables[0], tables[1]

    def _run(
        self,
        function: str,
        lists: TensorLists,
        moments: tuple[str, ...],
        values: ctypes.Structure,
        otherwise: Callable[[TensorLists], None],
    ) -> None:
        for _, kind, part in parts_of(lists, moments):
            if kind is None:
                otherwise(part.in_place())
            else:
                self._call(function, _table(part, kind, moments), values)
                mark_written(part)

    def stable_adamw_sums(
        self, lists: TensorLists, scalars: StableScalars, multiplier: float
    ) -> Tensor:
        values = _chosen(lib.Clip, scalars, multiplier)
        sums = torch.zeros(len(lists.main), 3, dtype=torch.int64, device="cpu")
        moments = kept_moments(lists, _MOMENTS)
        for indices, kind, part in parts_of(lists, moments):
            if kind is None:
                found = super().stable_adamw_sums(part.in_place(), scalars, multiplier)
            else:
                found = torch.empty(len(indices), 3, dtype=torch.int64, device="cpu")
                to = found.data_ptr()
                self._call("mp_clip_sums", _table(part, kind, moments), values, to)
            sums[torch.tensor(list(indices), device="cpu")] = found
        return sums

    def stable_adamw_apply(
        self,
        lists: TensorLists,
        scalars: StableScalars,
        steps: Sequence[Step],
        multiplier: float,
    ) -> None:
        values = _chosen(lib.Adam, scalars, multiplier)
        moments = kept_moments(lists, _MOMENTS)
        for indices, kind, part in parts_of(lists, moments):
            own = [steps[index] for index in indices]
            if kind is None:
                super().stable_adamw_apply(part.in_place(), scalars, own, multiplier)
                continue
            numbers = array("f", chain.from_iterable(own))
            to = numbers.buffer_info()[0]
            self._call("mp_clipped_adamw", _table(part, kind, moments), values, to)
            mark_written(part)

    def lamb_moments(
        self, lists: TensorLists, scalars: LambScalars, multiplier: float
    ) -> Tensor:
        values = lib.Lamb(multiplier=multiplier, **_fields(scalars, "lr", "adapts"))
        sums = torch.zeros(len(lists.main), 2, dtype=torch.float64, device="cpu")
        for indices, kind, part in parts_of(lists, _MOMENTS):
            if kind is None:
                squares = super().lamb_moments(part.in_place(), scalars, multiplier)
            else:
                squares = torch.empty(
                    len(indices), 2, dtype=torch.float64, device="cpu"
                )
                table = _table(part, kind._replace(output=None), _MOMENTS)
                self._call("mp_lamb_moments", table, values, squares.data_ptr())
            sums[torch.tensor(list(indices), device="cpu")] = squares
        return sums

    def lamb_apply(
        self, lists: TensorLists, scalars: LambScalars, ratios: Sequence[float]
    ) -> None:
        values = lib.Lamb(multiplier=1.0, **_fields(scalars, "lr", "adapts"))
        for indices, kind, part in parts_of(lists, _MOMENTS):
            part_ratios = array("f", [ratios[index] for index in indices])
            if kind is None:
                super().lamb_apply(part, scalars, part_ratios)
            else:
                table = _table(
                    replace(part, source=None), kind, _MOMENTS
                )  # the first pass brought it
                self._call("mp_lamb_apply", table, values, part_ratios.buffer_info()[0])
                mark_written(part)

    def average(self, lists: TensorLists) -> None:
        for _, kind, part in parts_of(lists.for_averages(), ()):
            if kind is None:
                super().average(part)
            else:
                self._call("mp_average", _table(part, kind, ()))
                tell_autograd(list(part.state[AVERAGE]))

    def sum_of_squares(self, tensors: Sequence[Tensor]) -> Tensor:
        steady = CachedTensorList.of(tensors)
        if len(steady.dtypes) == 1:
            return self._sum_alike(steady)
        sums = torch.empty(len(steady), dtype=torch.float64, device="cpu")
        for dtype in steady.dtypes:
            indices = [
                index for index, tensor in enumerate(steady) if tensor.dtype == dtype
            ]
            sums[torch.tensor(indices, device="cpu")] = self._sum_alike(
                CachedTensorList(steady[index] for index in indices)
            )
        return sums

    def _sum_alike(self, tensors: CachedTensorList) -> Tensor:
        """Sums of squares of tensors of one dtype."""
        if tensors[0].dtype not in FLOATS:
            return super().sum_of_squares(tensors)
        if not tensors.contiguous:
            tensors = CachedTensorList(tensor.contiguous() for tensor in tensors)
        sums = torch.empty(len(tensors), dtype=torch.float64, device="cpu")
        self._call(
            "mp_measure",
            Table(Kind(tensors[0].dtype), {"grad": tensors}),
            sums.data_ptr(),
            None,
        )
        return sums

    def _call(self, name: str, table: Table, *arguments: Any) -> None:
        given = [
            ctypes.byref(a) if isinstance(a, ctypes.Structure) else a for a in arguments
        ]
        self._settle_access(table)
        self.library.call(name, ctypes.byref(table.tensors), *given, thread_count())

    def _settle_access(self, table: Table) -> None:
        if not self.access.is_settled and table.numel >= LARGE:
            self.access.settle(thread_count())


def muon_values(scalars: MuonScalars, multiplier: float) -> ctypes.Structure:
    """Scalars of the pass over momenta."""
    return lib.Muon(multiplier=multiplier, **_fields(scalars, "decay"))


def _fields(scalars: Any, *without: str) -> dict[str, Any]:
    return {
        name: getattr(scalars, name)
        for name in scalars.__slots__
        if name not in without
    }


def _chosen(
    structure: type[ctypes.Structure], scalars: StableScalars, multiplier: float
) -> ctypes.Structure:
    """Those of StableAdamW's scalars that a structure has fields for."""
    known = {"multiplier": multiplier, "l2": 0.0, **_fields(scalars)}
    names = [name for name, *_ in structure._fields_]
    return structure(**{name: known[name] for name in names})


def _sources(lists: TensorLists, moments: tuple[str, ...]) -> dict[str, Sequence[Any]]:
    """Where present values are read, by the names of ``MpTensors``; empty if they are in place."""
    if lists.source is None:
        return {}
    names = {MAIN: "main", REMAINDER: "remainder", AVERAGE: "average"}
    for at, name in enumerate(moments, start=1):
        if name:
            names |= {name: f"moment{at}", scale_key(name): f"scale{at}"}
    return {f"from_{names[key]}": tensors for key, tensors in lists.source.items()}


def _outputs(lists: TensorLists) -> list[Tensor]:
    """The outputs that there are; a list that knows its addresses is handed on as it is."""
    if isinstance(lists.output, CachedTensorList):
        return lists.output
    return [output for output in lists.output if output is not None]


def _columns(lists: TensorLists, moments: tuple[str, ...]) -> dict[str, Sequence[Any]]:
    """Lists of tensors by the names of ``MpTensors``, without the outputs."""
    columns: dict[str, Sequence[Any]] = {"grad": lists.grad}
    columns |= {"main": lists.main} if lists.main else {}
    columns |= {
        f"moment{1 + at}": lists.state[name] for at, name in enumerate(moments) if name
    }
    for key, name in ((REMAINDER, "remainder"), (AVERAGE, "average")):
        if key in lists.state:
            columns[name] = lists.state[key]
    return columns


def _table(lists: TensorLists, kind: Kind, moments: tuple[str, ...]) -> Table:
    columns = _columns(lists, moments)
    columns |= {
        f"scale{1 + at}": lists.state[scale_key(name)]
        for at, name in enumerate(moments)
        if scale_key(name) in lists.state
    }
    if kind.output is not None:
        columns["output"] = _outputs(lists)
    columns |= _sources(lists, moments)
    return Table(kind, columns, lists.noise, lists.average_weight)
