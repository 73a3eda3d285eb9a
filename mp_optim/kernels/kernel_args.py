"""Arguments of backends: parallel tensor lists, scalars, and groups of tensors for one launch.

Scalars are formed in double and rounded once. The tensors of a launch have equal dtypes.

A rule's row in :mod:`mp_optim.config.rules` names its moments in the order of kernel arguments. Its
scalars are the fields of a class in this module, also in that order. Native kernels take them after
the multiplier of the gradients, with switches as 0 and 1. Triton kernels take at most ten; switches
are compiled in.
"""

from __future__ import annotations

import ctypes
import math
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, replace
from functools import lru_cache
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mp_optim.config.state_forms import (
    AVERAGE_FORMS,
    FIRST_FORMS,
    SECOND_FORMS,
    blocks_of,
    packed_bytes,
)
from mp_optim.core import CachedTensorList
from mp_optim.core.slot_state import AVERAGE, REMAINDER, scale_key
from mp_optim.core.tensors import continue_from
from mp_optim.kernels.codecs import Noise, is_blocked

MAIN = ""
"""Key of main params among a slot's tensors."""


def fp32(value: float) -> float:
    """Return the double that equals ``value`` rounded to FP32."""
    return ctypes.c_float(value).value


@dataclass(frozen=True, slots=True)
class TensorLists:
    """Parallel lists of contiguous tensors on one device.

    Attributes:
        main: FP32 main params; or bfloat16 ones, with the lower half in ``state[REMAINDER]`` unless
            none is stored. Empty for a pass that steps no parameters.
        grad: gradients of any floating dtype.
        state: moments by name, in their storage formats, with ``state[scale_key(name)]`` for block
            formats; ``state[AVERAGE]`` for averages.
        output: tensor that receives the updated parameter in its dtype, or None; bfloat16 if main
            is.
        source: current values of main (``MAIN``) and state, if they are not in ``main`` and
            ``state``, whose values are undefined then. Only for backends with ``reads_source``.
        noise: for each tensor, random bits for stochastic rounding of state; None rounds to
            nearest.
        average_weight: weight of new main params in their averages, an FP32 number; with 1 the
            averages equal the main params.
        prepared: cached launch of each rule for these lists (:class:`PreparedLaunch`), reused with
            other gradients. None for temporary lists.
        changed: bitmaps in which kernels mark the elements of weights whose values change
            (``SlotUpdate.changed``), or None. Only for backends with ``marks_changes``.
        follows: True if ``output`` has the model's weights, and the step continues from them where
            main does not round to them. Only for backends with ``follows_weights``.

    A ``CachedTensorList`` may be the same object in every step.
    """

    main: list[Tensor]
    grad: list[Tensor]
    state: dict[str, list[Tensor]]
    output: Sequence[Tensor | None]
    noise: list[Noise] | None = None
    source: Mapping[str, Sequence[Tensor]] | None = None
    average_weight: float = 1.0
    prepared: dict[str, PreparedLaunch] | None = None
    changed: Sequence[Tensor] | None = None
    follows: bool = False

    def take(self, indices: Sequence[int]) -> TensorLists:
        """Return the lists of some of the tensors."""

        def some(values: Sequence[Any]) -> list[Any]:
            return [values[index] for index in indices]

        source = self.source
        return TensorLists(
            some(self.main) if self.main else [],
            some(self.grad),
            {key: some(tensors) for key, tensors in self.state.items()},
            some(self.output),
            None if self.noise is None else some(self.noise),
            None if source is None else {key: some(each) for key, each in source.items()},
            self.average_weight,
            changed=None if self.changed is None else some(self.changed),
            follows=self.follows,
        )

    def for_averages(self) -> TensorLists:
        """Return the lists that an update of averages reads; empty lists without averages."""
        if AVERAGE not in self.state or not self.main:
            return TensorLists([], [], {}, [])
        averages, outputs = self.only(REMAINDER, AVERAGE), [None] * len(self.main)
        return replace(averages, output=outputs, source=None, changed=None, follows=False)

    def only(self, *keys: str) -> TensorLists:
        """Return the lists with the state of these keys only."""
        state = {key: self.state[key] for key in keys if key in self.state}
        source = self.source
        if source is not None:
            source = {key: source[key] for key in keys if key in source}
        return replace(self, state=state, source=source, prepared=None)

    def in_place(self) -> TensorLists:
        """Return the lists with current values copied into ``main`` and ``state``."""
        if self.source is None:
            return self
        for key, tensors in self.source.items():
            if tensors:
                torch._foreach_copy_(
                    list(self.main if key == MAIN else self.state[key]), list(tensors)
                )
        return replace(self, source=None)


def contiguous(tensors: CachedTensorList) -> CachedTensorList:
    """Return the list itself if every tensor in it is contiguous, else a list with contiguous
    copies."""
    if tensors.contiguous:
        return tensors
    return CachedTensorList(tensor.contiguous() for tensor in tensors)


def contiguous_outputs(outputs: Sequence[Tensor | None]) -> Sequence[Tensor | None]:
    """Return the list itself if every tensor in it is contiguous, else a list with contiguous
    copies.

    The copies have the values of the outputs, because a step that the device skips does not write
    them.
    """
    if isinstance(outputs, CachedTensorList) and outputs.contiguous:
        return outputs
    if all(map(Tensor.is_contiguous, [output for output in outputs if output is not None])):
        return outputs
    return [None if output is None else output.contiguous() for output in outputs]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepInputs:
    """Inputs of a step's scalars, for kernels that compute their own scalars.

    It is a base class, so that ``__slots__`` of a subclass lists only the scalars.
    """

    given_lr: float
    given_decay: float
    given_step: int
    bias_correction: bool


@dataclass(frozen=True, slots=True)
class AdamScalars(StepInputs):
    """Scalars of one Adam step: FP32 values formed in double."""

    beta1: float
    one_minus_beta1: float
    beta2: float
    one_minus_beta2: float
    eps: float
    step_size: float
    inv_sqrt_bias2: float
    decay: float
    l2: float
    _: KW_ONLY
    cautious_wd: bool

    @classmethod
    def at(cls, group: Mapping[str, Any], step: int) -> AdamScalars:
        """Return the scalars for a param group at step ``step`` >= 1.

        Reads ``lr``, ``betas``, ``eps``, ``weight_decay`` and flags.
        """
        beta1, beta2 = map(float, group["betas"])
        lr = float(group["lr"])
        bias1, bias2 = bias_corrections(group, beta1, beta2, step)
        decay, decoupled = float(group["weight_decay"]), group["adam_w_mode"]
        averages = beta1, 1 - beta1, beta2, 1 - beta2
        step_of = group["eps"], lr / bias1, 1 / math.sqrt(bias2)
        decays = (lr * decay, 0.0) if decoupled else (0.0, decay)
        return cls(
            *array("f", (*averages, *step_of, *decays)),
            cautious_wd=bool(group.get("cautious_wd")),
            given_lr=lr,
            given_decay=decay,
            given_step=int(step),
            bias_correction=bool(group["bias_correction"]),
        )


@dataclass(frozen=True, slots=True)
class SgdScalars:
    """Scalars of one SGD step. ``first`` is 1 if the momentum buffer starts with this gradient."""

    lr: float
    momentum: float
    one_minus_dampening: float
    decay: float
    nesterov: bool
    first: bool

    @classmethod
    def at(cls, group: Mapping[str, Any], step: int) -> SgdScalars:
        """Return the scalars for a param group at step ``step`` >= 1."""
        return cls(
            fp32(float(group["lr"])),
            fp32(group["momentum"]),
            fp32(1 - group["dampening"]),
            fp32(group["weight_decay"]),
            group["nesterov"],
            step == 1,
        )


@dataclass(frozen=True, slots=True)
class LionScalars:
    """Scalars of one Lion step."""

    beta1: float
    one_minus_beta1: float
    beta2: float
    one_minus_beta2: float
    lr: float
    decay: float
    _: KW_ONLY
    cautious_wd: bool

    @classmethod
    def at(cls, group: Mapping[str, Any], step: int) -> LionScalars:
        """Return the scalars for a param group. They are equal at every step."""
        beta1, beta2 = map(float, group["betas"])
        lr = float(group["lr"])
        averages = beta1, 1 - beta1, beta2, 1 - beta2
        decay = lr * float(group["weight_decay"])
        return cls(*array("f", (*averages, lr, decay)), cautious_wd=bool(group.get("cautious_wd")))


@dataclass(frozen=True, slots=True)
class LambScalars(StepInputs):
    """Scalars of one LAMB step."""

    beta1: float
    grad_weight: float
    beta2: float
    one_minus_beta2: float
    eps: float
    inv_bias1: float
    inv_sqrt_bias2: float
    decay: float
    l2: float
    lr: float
    adapts: bool

    @classmethod
    def at(cls, group: Mapping[str, Any], step: int) -> LambScalars:
        """Return the scalars for a param group at step ``step`` >= 1."""
        beta1, beta2 = (float(b) for b in group["betas"])
        bias1, bias2 = bias_corrections(group, beta1, beta2, step)
        lr, decay, decoupled = (
            float(group["lr"]),
            float(group["weight_decay"]),
            group["adam_w_mode"],
        )
        return cls(
            fp32(beta1),
            fp32(1 - beta1) if group["grad_averaging"] else 1.0,
            fp32(beta2),
            fp32(1 - beta2),
            fp32(group["eps"]),
            fp32(1 / bias1),
            fp32(1 / math.sqrt(bias2)),
            fp32(decay) if decoupled else 0.0,
            0.0 if decoupled else fp32(decay),
            lr,
            bool(group["use_nvlamb"] or decay != 0.0),
            given_lr=lr,
            given_decay=decay,
            given_step=int(step),
            bias_correction=bool(group["bias_correction"]),
        )

    def ratio(self, param_square: float, update_square: float) -> float:
        """Return lr * ||p|| / ||u|| if the rule adapts and both norms are positive, else lr."""
        if not self.adapts or param_square == 0.0 or update_square == 0.0:
            return fp32(self.lr)
        return fp32(self.lr * math.sqrt(param_square) / math.sqrt(update_square))


RULE_SCALARS: dict[str, Any] = {
    "adam": AdamScalars,
    "sgd": SgdScalars,
    "lion": LionScalars,
    "lamb": LambScalars,
}
"""The class of scalars of each rule."""


@dataclass(frozen=True, slots=True)
class MuonScalars:
    """Scalars of Muon's passes over elements.

    Attributes:
        average: factor of the difference of gradient and momentum, for the new momentum.
        ahead: the factor for the momentum one step ahead.
        decay: learning rate times weight decay.
        average_from_end: 1 if the product is added to the second term of the difference, as
            ``torch.lerp`` does with weights from 0.5 on.
        ahead_from_end: the switch for the momentum one step ahead.
    """

    average: float
    ahead: float
    decay: float
    average_from_end: bool
    ahead_from_end: bool
    nesterov: bool
    cautious_wd: bool

    @classmethod
    def at(cls, group: Mapping[str, Any]) -> MuonScalars:
        """Return the scalars for a param group. They are equal at every step."""
        momentum = float(group["momentum"])
        average, average_from_end = _lerp(1 - momentum)
        ahead, ahead_from_end = _lerp(momentum)
        decay = fp32(float(group["lr"]) * float(group["weight_decay"]))
        from_end = average_from_end, ahead_from_end
        return cls(
            average, ahead, decay, *from_end, group["nesterov"], bool(group.get("cautious_wd"))
        )


def _lerp(weight: float) -> tuple[float, bool]:
    from_end = weight >= 0.5
    return fp32(fp32(weight) - 1.0) if from_end else fp32(weight), from_end


def bias_corrections(
    group: Mapping[str, Any], beta1: float, beta2: float, step: int
) -> tuple[float, float]:
    return (1 - beta1**step, 1 - beta2**step) if group["bias_correction"] else (1.0, 1.0)


# -- kinds of launches ---------------------------------------------------------------------------

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
"""Dtypes of gradients that kernels read."""
_OUTPUTS: dict[tuple[torch.dtype | None, torch.dtype | None], tuple[torch.dtype | None, ...]] = {
    (None, None): FLOATS,
    (torch.float32, None): (None, *FLOATS),
    (torch.bfloat16, torch.int16): (None, torch.bfloat16),
    (torch.bfloat16, torch.int8): (None, torch.bfloat16),
    (torch.bfloat16, None): (None, torch.bfloat16),
}
"""Dtypes of outputs, by the dtypes of main params and remainders."""


_FIRST, _SECOND, _AVERAGES = (
    {None, *(form.dtype for form in forms)} for forms in (FIRST_FORMS, SECOND_FORMS, AVERAGE_FORMS)
)


class LaunchDtypes(NamedTuple):
    """Dtypes that the tensors of a launch have in common; None for a missing tensor."""

    grad: torch.dtype
    main: torch.dtype | None = None
    remainder: torch.dtype | None = None
    moment1: torch.dtype | None = None
    moment2: torch.dtype | None = None
    output: torch.dtype | None = None
    average: torch.dtype | None = None

    @property
    def compares_weights(self) -> bool:
        """True if kernels compare main params with weights of these dtypes."""
        return self.main == torch.float32 and self.output in (torch.bfloat16, torch.float16)


class AlikeLists(NamedTuple):
    """Tensors with equal dtypes: their indices in the lists, and lists of them alone.

    A kind of None has no kernel.
    """

    indices: Sequence[int]
    kind: LaunchDtypes | None
    lists: TensorLists


class PreparedLaunch(NamedTuple):
    """A launch of a rule over whole lists, stored in :attr:`TensorLists.prepared`.

    Attributes:
        kind: dtypes of the tensors.
        sizes: number of elements of each gradient.
        written: tensors that kernels write and autograd tracks.
        launch: the backend's own object.
    """

    kind: LaunchDtypes
    sizes: array[int]
    written: list[Tensor]
    launch: Any


def prepared_launch(lists: TensorLists, rule: str) -> PreparedLaunch | None:
    """Return the stored launch of a rule, if the gradients have the same dtypes and sizes."""
    known, grads = lists.prepared.get(rule) if lists.prepared else None, lists.grad
    if known is None or lists.noise is not None or lists.source is not None:
        return None
    fits = (
        isinstance(grads, CachedTensorList)
        and grads.dtypes == {known.kind.grad}
        and grads.own_sizes == known.sizes
        and grads.stored
    )
    return known if fits else None


def prepare_launch(rule: str, part: AlikeLists, written: list[Tensor], launch: Any) -> None:
    """Store a launch for :func:`prepared_launch`, if it covers all of its lists."""
    lists, kind = part.lists, part.kind
    if lists.prepared is None or not isinstance(part.indices, range):
        return
    if lists.noise is None and lists.source is None:
        sizes = CachedTensorList.of(lists.grad).own_sizes
        assert kind is not None
        lists.prepared[rule] = PreparedLaunch(kind, sizes, written, launch)


def continued(lists: TensorLists, kind: LaunchDtypes | None) -> TensorLists:
    """Return the lists, with main params set to the weights in ``output`` if no kernel compares
    them."""
    if not lists.follows or (kind is not None and kind.compares_weights):
        return lists
    continue_from(lists.main, lists.output, lists.changed)
    return replace(lists, follows=False)


def kept_moments(lists: TensorLists, moments: tuple[str, ...]) -> tuple[str, ...]:
    """Return the names of a rule's moments, with "" for moments that are not stored."""
    return tuple([name if name in lists.state else "" for name in moments])


def alike_lists(lists: TensorLists, moments: tuple[str, ...]) -> list[AlikeLists]:
    """Return the lists by kind; the lists themselves if all tensors have one kind.

    Args:
        moments: names of the first and the second moment, "" for one that is not stored.
    """
    if not lists.grad:
        return []
    names = [*moments, "", ""][:2]
    columns: list[Sequence[Tensor | None] | None] = [
        lists.grad,
        lists.main or None,
        lists.state.get(REMAINDER),
        *[lists.state[name] if name else None for name in names],
        lists.output,
        lists.state.get(AVERAGE),
    ]
    dtypes = list(map(_dtypes, columns))
    if set(map(len, dtypes)) == {1}:
        kind = LaunchDtypes._make(chain.from_iterable(dtypes))
        return [AlikeLists(range(len(lists.grad)), _supported(kind, lists, moments), lists)]
    by_kind: dict[LaunchDtypes, list[int]] = {}
    for index in range(len(lists.grad)):
        tensors = [None if column is None else column[index] for column in columns]
        kind = LaunchDtypes._make(None if each is None else each.dtype for each in tensors)
        by_kind.setdefault(kind, []).append(index)
    parts = []
    for kind, indices in by_kind.items():
        part = lists.take(indices)
        parts.append(AlikeLists(indices, _supported(kind, part, moments), part))
    return parts


def _dtypes(column: Sequence[Tensor | None] | None) -> set[torch.dtype | None]:
    if column is None:
        return {None}
    if isinstance(column, CachedTensorList):
        return set(column.dtypes)
    return {None if tensor is None else tensor.dtype for tensor in column}


def _supported(
    kind: LaunchDtypes, lists: TensorLists, moments: tuple[str, ...]
) -> LaunchDtypes | None:
    """Return the kind if kernels support it, including its scales and seeds; else None."""
    scaled = True
    for name, dtype in zip(moments, (kind.moment1, kind.moment2), strict=False):
        scaled &= (scale_key(name) in lists.state) == (dtype is not None and is_blocked(dtype))
    seeds = {item.seed for item in lists.noise or []}
    rounds = kind.average != torch.bfloat16 or lists.noise is not None
    known = (
        kind.grad in FLOATS
        and kind.moment1 in _FIRST
        and kind.moment2 in _SECOND
        and kind.output in _OUTPUTS.get((kind.main, kind.remainder), ())
        and kind.average in _AVERAGES
    )
    return kind if known and scaled and rounds and len(seeds) <= 1 else None


def column_names(moments: tuple[str, ...]) -> dict[str, str]:
    """Return the kernels' names for the tensors of a slot, by their keys in ``TensorLists``.

    Args:
        moments: moments of the rule, see :func:`alike_lists`.
    """
    names = {MAIN: "main", REMAINDER: "remainder", AVERAGE: "average"}
    for number, moment in enumerate(moments, start=1):
        if moment:
            names |= {moment: f"moment{number}", scale_key(moment): f"scale{number}"}
    return names


def columns_of(
    lists: TensorLists, kind: LaunchDtypes, moments: tuple[str, ...]
) -> dict[str, Sequence[Any]]:
    """Return the lists of one kind that kernels read or write in place, by kernel argument."""
    names = column_names(moments)
    columns: dict[str, Sequence[Any]] = {"grad": lists.grad}
    if lists.main:
        columns["main"] = lists.main
    columns |= {names[key]: tensors for key, tensors in lists.state.items() if key in names}
    if kind.output is not None:
        columns["output"] = lists.output
    if lists.changed is not None:
        columns["changed"] = lists.changed
    return columns


# -- whether they fit each other ------------------------------------------------------------------


def check_fit(kind: LaunchDtypes, columns: Mapping[str, CachedTensorList]) -> None:
    """Check each list when its addresses are first used, because kernels access any address.

    Args:
        kind: expected dtypes.
        columns: lists by the names of :class:`LaunchDtypes`, ``scale1``, ``scale2``, ``changed``,
            each with the prefix ``from_`` for current values that are stored elsewhere.

    Raises:
        ValueError: the elements or the dtype of a tensor differ from those of its slot, or its
            storage is too small. Nothing was written.
    """
    sized = columns.get("main") or columns["grad"]
    numbers = sized.sizes.tobytes()
    for name, tensors in columns.items():
        column = name.removeprefix("from_")
        if column.startswith("scale"):
            dtype, expected = torch.float32, _sizes(numbers, "blocks")
        elif column == "changed":
            dtype, expected = torch.uint8, _sizes(numbers, "bits")
        else:
            dtype, expected = getattr(kind, column), sized.sizes
            if dtype == torch.uint8 and column == "moment1":  # A byte holds two codes.
                expected = _sizes(numbers, "packed")
        fits = tensors.own_sizes == expected and tensors.dtypes <= {dtype}
        if not fits or not tensors.stored:
            raise ValueError(_misfit(name, tensors, expected, dtype))


@lru_cache(maxsize=64)
def _sizes(numbers: bytes, form: str) -> array[int]:
    each = {"blocks": blocks_of, "packed": packed_bytes, "bits": bitmap_bytes}[form]
    return array("q", map(each, array("q", numbers)))


def bitmap_bytes(numel: int) -> int:
    """Return the number of bytes of a bitmap of ``numel`` elements, a multiple of 8."""
    return -(-numel // 64) * 8


def _misfit(
    name: str, tensors: Sequence[Tensor], expected: Sequence[int], dtype: torch.dtype
) -> str:
    """Describe the first tensor that differs from the kernels' expectation."""
    for place, (tensor, size) in enumerate(zip(tensors, expected, strict=False)):
        held = tensor.untyped_storage().nbytes()
        is_misfit = (tensor.numel(), tensor.dtype) != (size, dtype)
        if is_misfit or held < tensor.nbytes:
            return (
                f"tensor {place} of {len(tensors)} in column {name!r} of a kernel's call has "
                f"{tensor.numel()} elements of {tensor.dtype} in a storage of {held} bytes, where "
                f"its slot has {size} of {dtype}: its memory or its parameter's was replaced or "
                "resized (`tensor.data = ...`, `resize_`); nothing was written. Put a new "
                "parameter into the param group, or build the optimizer again"
            )
    return f"column {name!r} of a kernel's call has {len(tensors)} tensors for {len(expected)}"
