"""The rules by the compiled kernels of ``update/csrc``: one pass over every tensor of a call, on all host threads.

Bit for bit what ``reference`` computes. Gradients of a dtype the kernels do not read (FP64) go to it.
"""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from mp_optim.slots import SteadyList
from mp_optim.update.backends import native_library as lib
from mp_optim.update.backends.reference import ReferenceBackend
from mp_optim.update.lists import AdamScalars, LambScalars, LionScalars, SgdScalars, TensorLists

__all__ = ["NativeBackend", "set_host_cores", "set_host_threads"]

_DTYPES = {torch.float32: 1, torch.bfloat16: 2, torch.float16: 3}
_host_threads: int | None = None


def set_host_threads(threads: int | None) -> None:
    """Threads of the kernels in this process; None follows ``torch.get_num_threads()``."""
    global _host_threads
    _host_threads = threads


def set_host_cores(cores: Sequence[int]) -> None:
    """Pin the kernels' threads in this process to these cores, in turn; an empty list unpins them.

    Raises:
        ValueError: there are no native kernels to pin.
    """
    library = lib.native_library()
    if library.handle is None:
        raise ValueError(f"host_cores={tuple(cores)!r}: there are no native kernels to pin: {library.why}")
    library.set_cores(cores)


def _threads() -> int:
    return _host_threads or torch.get_num_threads()


class _Kind(NamedTuple):
    """What the tensors of one kernel call share."""

    grad: torch.dtype
    output: torch.dtype | None


class _Table:
    """The C view of tensor lists; keeps what it points to alive."""

    def __init__(self, kind: _Kind, grad: Sequence[Tensor], main: Sequence[Tensor] | None = None,
                 moments: Sequence[Sequence[Tensor]] = (), output: Sequence[Tensor] | None = None) -> None:
        first, second = [*moments, None, None][:2]
        tables = {"main": main, "grad": grad, "moment1": first, "moment2": second, "output": output}
        self._arrays = {"numel": SteadyList.of(moments[0] if moments else grad).sizes}
        self._arrays |= {name: SteadyList.of(tensors).addresses
                         for name, tensors in tables.items() if tensors is not None}
        addresses = {name: values.buffer_info()[0] for name, values in self._arrays.items()}
        first_dtype, second_dtype = [*(_DTYPES[tensors[0].dtype] for tensors in moments), 0, 0][:2]
        self.tensors = lib.Tensors(count=len(grad), grad_dtype=_DTYPES[kind.grad],
                                   output_dtype=_DTYPES[kind.output] if kind.output else 0,
                                   moment1_dtype=first_dtype, moment2_dtype=second_dtype, **addresses)


class NativeBackend(ReferenceBackend):
    """Calls the library; ``reference`` does what it cannot."""

    name = "native"

    def __init__(self, library: lib.NativeLibrary) -> None:
        self.library = library

    def adam(self, lists: TensorLists, scalars: AdamScalars, multiplier: float) -> None:
        values = lib.Adam(multiplier=multiplier, **_fields(scalars))
        self._run("mp_adam", lists, ("exp_avg", "exp_avg_sq"), values,
                  lambda part: ReferenceBackend.adam(self, part, scalars, multiplier))

    def sgd(self, lists: TensorLists, scalars: SgdScalars, multiplier: float) -> None:
        values = lib.Sgd(multiplier=multiplier, **_fields(scalars))
        self._run("mp_sgd", lists, tuple(lists.state), values,
                  lambda part: ReferenceBackend.sgd(self, part, scalars, multiplier))

    def lion(self, lists: TensorLists, scalars: LionScalars, multiplier: float) -> None:
        values = lib.Lion(multiplier=multiplier, **_fields(scalars))
        self._run("mp_lion", lists, ("exp_avg",), values,
                  lambda part: ReferenceBackend.lion(self, part, scalars, multiplier))

    def _run(self, function: str, lists: TensorLists, moments: tuple[str, ...], values: ctypes.Structure,
             otherwise: Callable[[TensorLists], None]) -> None:
        for _, kind, part in _by_kind(lists):
            if kind is None:
                otherwise(part)
            else:
                self._call(function, _table(part, kind, *moments), values)
                _mark_written(part)

    def lamb_moments(self, lists: TensorLists, scalars: LambScalars, multiplier: float) -> Tensor:
        values = lib.Lamb(multiplier=multiplier, **_fields(scalars, "lr", "adapts"))
        sums = torch.zeros(len(lists.main), 2, dtype=torch.float64)
        for indices, kind, part in _by_kind(lists):
            if kind is None:
                found = super().lamb_moments(part, scalars, multiplier)
            else:
                found = torch.empty(len(indices), 2, dtype=torch.float64)
                plain = TensorLists(part.main, part.grad, part.state, [None] * len(part.main))
                table = _table(plain, _Kind(kind.grad, None), "exp_avg", "exp_avg_sq")
                self._call("mp_lamb_moments", table, values, found.data_ptr())
            sums[torch.tensor(list(indices))] = found
        return sums

    def lamb_apply(self, lists: TensorLists, scalars: LambScalars, ratios: Sequence[float]) -> None:
        values = lib.Lamb(multiplier=1.0, **_fields(scalars, "lr", "adapts"))
        for indices, kind, part in _by_kind(lists):
            mine = array("f", [ratios[index] for index in indices])
            if kind is None:
                super().lamb_apply(part, scalars, mine)
            else:
                table = _table(part, kind, "exp_avg", "exp_avg_sq")
                self._call("mp_lamb_apply", table, values, mine.buffer_info()[0])
                _mark_written(part)

    def sum_of_squares(self, tensors: Sequence[Tensor]) -> Tensor:
        steady = SteadyList.of(tensors)
        if len(steady.dtypes) == 1:
            return self._sum_alike(steady)
        sums = torch.empty(len(steady), dtype=torch.float64)
        for dtype in steady.dtypes:
            mine = [index for index, tensor in enumerate(steady) if tensor.dtype == dtype]
            sums[torch.tensor(mine)] = self._sum_alike(SteadyList(steady[index] for index in mine))
        return sums

    def _sum_alike(self, tensors: SteadyList) -> Tensor:
        """Sums of squares of tensors of one dtype."""
        if tensors[0].dtype not in _DTYPES:
            return super().sum_of_squares(tensors)
        if not tensors.contiguous:
            tensors = SteadyList(tensor.contiguous() for tensor in tensors)
        sums = torch.empty(len(tensors), dtype=torch.float64)
        self._call("mp_measure", _Table(_Kind(tensors[0].dtype, None), tensors), sums.data_ptr(), None)
        return sums

    def _call(self, name: str, table: _Table, *arguments: Any) -> None:
        given = [ctypes.byref(a) if isinstance(a, ctypes.Structure) else a for a in arguments]
        self.library.call(name, ctypes.byref(table.tensors), *given, _threads())


def _mark_written(lists: TensorLists) -> None:
    """Tell autograd, which cannot see the kernels write."""
    written = [*lists.main, *(output for output in lists.output if output is not None)]
    try:
        increment_version(written)
    except TypeError:  # before torch 2.7 one at a time
        for tensor in written:
            increment_version(tensor)


def _fields(scalars: Any, *without: str) -> dict[str, Any]:
    return {name: getattr(scalars, name) for name in scalars.__slots__ if name not in without}


def _by_kind(lists: TensorLists) -> list[tuple[Sequence[int], _Kind | None, TensorLists]]:
    """Parts of the lists whose tensors share dtypes; None is what the kernels do not read."""
    grads = SteadyList.of(lists.grad).dtypes
    outputs = [None if output is None else output.dtype for output in lists.output]
    if len(grads) == len(set(outputs)) == 1:
        return [(range(len(outputs)), _kind(next(iter(grads)), outputs[0]), lists)]
    pairs = list(zip((grad.dtype for grad in lists.grad), outputs, strict=True))
    parts: list[tuple[Sequence[int], _Kind | None, TensorLists]] = []
    for pair in dict.fromkeys(pairs):
        indices = [index for index, other in enumerate(pairs) if other == pair]
        parts.append((indices, _kind(*pair), TensorLists(
            [lists.main[i] for i in indices], [lists.grad[i] for i in indices],
            {key: [tensors[i] for i in indices] for key, tensors in lists.state.items()},
            [lists.output[i] for i in indices])))
    return parts


def _kind(grad: torch.dtype, output: torch.dtype | None) -> _Kind | None:
    return _Kind(grad, output) if grad in _DTYPES and (output is None or output in _DTYPES) else None


def _table(lists: TensorLists, kind: _Kind, *moments: str) -> _Table:
    outputs = [output for output in lists.output if output is not None] if kind.output else None
    return _Table(kind, lists.grad, lists.main, [lists.state[name] for name in moments], outputs)
