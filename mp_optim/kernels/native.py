"""Backend with the compiled kernels of ``kernels/csrc``: one pass over all tensors of a call.

The kernels run on several host threads and have the bits of ``reference``. ``reference`` steps
tensors that the kernels do not support, such as FP64 gradients.
"""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Callable, Mapping, Sequence
from ctypes import byref
from dataclasses import replace
from functools import partial
from itertools import repeat
from typing import Any

import torch
from torch import Tensor

from mp_optim.config.rules import RULES
from mp_optim.config.state_forms import (
    BF16,
    FIRST_FORMS,
    FP16,
    FP32,
    NO_REMAINDER,
    REMAINDER_FORMS,
    SECOND_FORMS,
)
from mp_optim.core import CachedTensorList
from mp_optim.core.slot_state import AVERAGE
from mp_optim.core.tensors import continue_from
from mp_optim.host.calls import tell_autograd
from mp_optim.kernels import native_library as lib
from mp_optim.kernels.chunking import mark_written, model_tensors
from mp_optim.kernels.codecs import Noise
from mp_optim.kernels.kernel_args import (
    FLOATS,
    LambScalars,
    LaunchDtypes,
    MuonScalars,
    TensorLists,
    alike_lists,
    check_fit,
    column_names,
    columns_of,
    continued,
    kept_moments,
    prepare_launch,
    prepared_launch,
)
from mp_optim.kernels.native_library import thread_count
from mp_optim.kernels.reference import MOMENTUM, ReferenceBackend
from mp_optim.kernels.sums import by_dtype

_MOMENTS = ("exp_avg", "exp_avg_sq")
_FORMS = {"moment1": FIRST_FORMS, "moment2": SECOND_FORMS, "remainder": REMAINDER_FORMS}
_FLOATS = {form.dtype: form.native for form in (FP32, BF16, FP16)}
_CODES = {
    name: _FLOATS | {form.dtype: form.native for form in _FORMS.get(name, ())} | {None: 0}
    for name in LaunchDtypes._fields
}
"""Number of each dtype in ``csrc/api.h``, by kind of tensor."""


class NativeTable:
    """C structure with addresses and sizes of tensor lists, and references that keep the memory
    allocated.

    NOTE: the caller of a kernel must keep this object, not only ``tensors``, until the call
    returns.
    """

    def __init__(
        self,
        kind: LaunchDtypes,
        lists: Mapping[str, Sequence[Tensor]],
        noise: Sequence[Noise] | None = None,
        average_weight: float = 1.0,
        follows: bool = False,
    ) -> None:
        steady = {name: CachedTensorList.of(tensors) for name, tensors in lists.items()}
        check_fit(kind, steady)
        self._arrays = {name: tensors.addresses for name, tensors in steady.items()}
        sized = steady.get("main") or steady["grad"]
        self._arrays["numel"] = sized.sizes
        if noise is not None:
            self._arrays["stream"] = array("I", [item.own_stream for item in noise])
        addresses = {name: values.buffer_info()[0] for name, values in self._arrays.items()}
        dtypes = {f"{name}_dtype": _CODES[name][dtype] for name, dtype in kind._asdict().items()}
        if kind.main == torch.bfloat16 and kind.remainder is None:
            dtypes["remainder_dtype"] = NO_REMAINDER.native
        dtypes["follows"] = int(follows)
        seed = noise[0].seed if noise else 0
        count = len(steady.get("grad") or steady["main"])
        self.tensors = lib.MpTensors(
            count=count, seed=seed, average_weight=average_weight, **addresses, **dtypes
        )

    def take(self, lists: TensorLists) -> None:
        """Set the gradients and the average weight of the next launch.

        The gradients must have the dtypes and sizes of the last gradients, because other fields
        stay unchanged.
        """
        assert isinstance(lists.grad, CachedTensorList)
        self._arrays["grad"] = lists.grad.addresses
        self.tensors.grad = lists.grad.addresses.buffer_info()[0]
        self.tensors.average_weight = lists.average_weight


class NativeBackend(ReferenceBackend):
    """Backend that calls the compiled kernels. ``reference`` computes steps that the kernels do not
    support."""

    name = "native"
    reads_source = True
    """True: kernels can read current values from other tensors than they write."""
    marks_changes = True
    follows_weights = True

    def __init__(self, library: lib.NativeLibrary) -> None:
        self.library = library

    def _launch(
        self,
        name: str,
        lists: TensorLists,
        kind: LaunchDtypes,
        moments: tuple[str, ...],
        *arguments: Any,
    ) -> NativeTable:
        """Call a kernel for tensors with equal dtypes, and return the kernel's structure."""
        columns, names = columns_of(lists, kind, moments), column_names(moments)
        for key, tensors in (lists.source or {}).items():
            columns[f"from_{names[key]}"] = tensors
        # A pass that writes no weights has no weights to compare, so clear ``follows``.
        follows = lists.follows and kind.compares_weights
        table = NativeTable(kind, columns, lists.noise, lists.average_weight, follows)
        self.library.call(name, byref(table.tensors), *arguments, thread_count())
        return table

    def step(self, rule: str, lists: TensorLists, scalars: Any, multiplier: float) -> None:
        if (launch := self.prepared(rule, lists, scalars, multiplier)) is not None:
            launch()
            return
        given = _numbers(rule, scalars, multiplier)
        moments = kept_moments(lists, RULES[rule].moment_names)
        for part in alike_lists(lists, moments):
            _, kind, alike = part
            alike = continued(alike, kind)
            if kind is None:
                super().step(rule, alike.in_place(), scalars, multiplier)
                for bits in alike.changed or ():
                    # reference does not compare values, so mark all elements as changed.
                    bits.fill_(0xFF)
                continue
            table = self._launch("mp_step", alike, kind, moments, *given)
            mark_written(alike)
            prepare_launch(rule, part, model_tensors(alike), table)

    def prepared(
        self, rule: str, lists: TensorLists, scalars: Any, multiplier: float
    ) -> Callable[[], None] | None:
        known = prepared_launch(lists, rule)
        if known is None:
            return None
        if lists.follows and not known.launch.tensors.follows:
            continue_from(lists.main, lists.output, lists.changed)
        known.launch.take(lists)
        tell_autograd(known.written)
        given = byref(known.launch.tensors), *_numbers(rule, scalars, multiplier), thread_count()
        return partial(self.library.call, "mp_step", *given)

    def muon_momentum(self, lists: TensorLists, scalars: MuonScalars, multiplier: float) -> None:
        values = values_of(lib.Muon, scalars, multiplier)
        for _, kind, alike in alike_lists(lists, (MOMENTUM,)):
            if kind is None:
                super().muon_momentum(alike.in_place(), scalars, multiplier)
            else:
                self._launch("mp_muon_momentum", alike, kind, (MOMENTUM,), values)
                mark_written(alike)

    def muon_apply(
        self, lists: TensorLists, scalars: MuonScalars, factors: Sequence[float]
    ) -> None:
        for indices, kind, alike in alike_lists(lists, ()):
            part_factors = array("f", [factors[index] for index in indices])
            if kind is None:
                super().muon_apply(alike.in_place(), scalars, part_factors)
            else:
                to = (scalars.decay, scalars.cautious_wd, part_factors.buffer_info()[0])
                self._launch("mp_muon_apply", alike, kind, (), *to)
                mark_written(alike)

    def lamb_moments(self, lists: TensorLists, scalars: LambScalars, multiplier: float) -> Tensor:
        """Update the moments, and return FP64 sums of p^2 and u^2 for each tensor, shape (n, 2)."""
        sums = torch.zeros(len(lists.main), 2, dtype=torch.float64, device="cpu")
        values = values_of(lib.Lamb, scalars, multiplier)
        for indices, kind, alike in alike_lists(lists, _MOMENTS):
            if kind is None:
                found = super().lamb_moments(alike.in_place(), scalars, multiplier)
            else:
                found = torch.empty_like(sums[: len(indices)])
                kind, to = kind._replace(output=None), (values, found.data_ptr())
                self._launch("mp_lamb_moments", alike, kind, _MOMENTS, *to)
            sums[torch.tensor(list(indices), device="cpu")] = found
        return sums

    def lamb_apply(self, lists: TensorLists, scalars: LambScalars, ratios: Sequence[float]) -> None:
        values = values_of(lib.Lamb, scalars, 1.0)
        for indices, kind, alike in alike_lists(lists, _MOMENTS):
            part_ratios = array("f", [ratios[index] for index in indices])
            if kind is None:
                super().lamb_apply(alike, scalars, part_ratios)
            else:
                # lamb_moments() has already copied the source values, so do not copy old values
                # over the new moments.
                here, to = replace(alike, source=None), part_ratios.buffer_info()[0]
                self._launch("mp_lamb_apply", here, kind, _MOMENTS, values, to)
                mark_written(alike)

    def average(self, lists: TensorLists) -> None:
        for _, kind, alike in alike_lists(lists.for_averages(), ()):
            if kind is None:
                super().average(alike)
            else:
                self._launch("mp_average", alike, kind, ())
                tell_autograd(list(alike.state[AVERAGE]))

    def sum_of_squares(self, tensors: Sequence[Tensor]) -> Tensor:
        steady = CachedTensorList.of(tensors)
        if len(steady.dtypes) != 1:
            return by_dtype(steady, self.sum_of_squares)
        if steady[0].dtype not in FLOATS:
            return super().sum_of_squares(steady)
        if not steady.contiguous:
            steady = CachedTensorList(tensor.contiguous() for tensor in steady)
        if steady.own_sizes != steady.sizes or not steady.stored:
            # Raise the error of check_fit(), which names the tensor that does not fit.
            check_fit(LaunchDtypes(steady[0].dtype), {"grad": steady})
        sums = torch.empty(len(steady), dtype=torch.float64, device="cpu")
        # The kernel only reads these tensors, and ``addresses`` and ``sizes`` outlive the call.
        addresses, sizes = steady.addresses, steady.sizes
        table = lib.MpTensors(
            count=len(steady),
            grad=addresses.buffer_info()[0],
            numel=sizes.buffer_info()[0],
            grad_dtype=_CODES["grad"][steady[0].dtype],
            average_weight=1.0,
        )
        self.library.call("mp_measure", byref(table), sums.data_ptr(), None, thread_count())
        return sums


def _numbers(rule: str, scalars: Any, multiplier: float) -> tuple[bytes, Any, int]:
    """Return the arguments of ``mp_step`` that describe the rule: name, scalars, and their
    number."""
    numbers = [multiplier, *map(getattr, repeat(scalars), scalars.__slots__)]
    return rule.encode(), (ctypes.c_float * len(numbers))(*numbers), len(numbers)


def values_of(structure: type[ctypes.Structure], scalars: Any, multiplier: float) -> Any:
    """Return a C structure with the rule's scalars in the fields of the same names.

    Scalars without a field are left out. The field ``l2`` is 0 for a rule without ``l2``.
    """
    known = {"multiplier": multiplier, "l2": 0.0}
    known |= {name: getattr(scalars, name) for name in scalars.__slots__}
    return structure(**{name: known[name] for name, *_ in structure._fields_})
