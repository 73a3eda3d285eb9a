"""Arguments of backends: parallel tensor lists, scalars, and groups of tensors for one launch.

The tensors of a launch have equal dtypes. Scalars are computed in double and rounded once.

A rule's row in :mod:`mp_optim.config.rules` names the moments in the order of kernel arguments. The
fields of the rule's class in this module are its scalars, also in that order. Native kernels take
the multiplier of the gradients first, then the scalars, with switches as 0 and 1. Triton kernels
take at most ten scalars; switches are compile-time constants.
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
    """Return ``value`` rounded to FP32, as a float."""
    return ctypes.c_float(value).value


@dataclass(frozen=True, slots=True)
class TensorLists:
    """Parallel lists of contiguous tensors on one device. Several steps may pass the same list
    object.

    Attributes:
        main: main params: FP32, or bfloat16 with the lower half in ``state[REMAINDER]`` if a
            remainder is stored. Empty for a pass that steps no parameters.
        grad: gradients of any floating dtype.
        state: lists of moments by name, in their storage formats; scales of block formats by
            ``scale_key(name)``; averages by ``AVERAGE``.
        output: for each main param, the tensor that gets the new value in its dtype, or None.
            bfloat16 if main params are bfloat16.
        source: current values of main params (``MAIN``) and state, if ``main`` and ``state`` are
            only written. Only for backends with ``reads_source``.
        noise: for each tensor, random bits for stochastic rounding of state; None rounds to
            nearest.
        average_weight: FP32 weight of new main params in their averages; 1 makes the averages equal
            to the main params.
        prepared: cached launch of each rule for these lists (:class:`PreparedLaunch`), reused with
            other gradients. None for temporary lists.
        changed: for each tensor, a bitmap in which kernels mark weights that change
            (``SlotUpdate.changed``); or None. Only for backends with ``marks_changes``.
        follows: True if ``output`` has the model's weights. The step then continues from a weight
            where the main param does not round to it. Only for backends with ``follows_weights``.
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
        """Return the lists of the tensors at some indices."""

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
        """Return the lists for a pass that updates averages; empty lists without averages."""
        if AVERAGE not in self.state or not self.main:
            return TensorLists([], [], {}, [])
        averages, outputs = self.only(REMAINDER, AVERAGE), [None] * len(self.main)
        return replace(averages, output=outputs, source=None, changed=None, follows=False)

    def only(self, *keys: str) -> TensorLists:
        """Return the lists with the state of the given keys only."""
        state = {key: self.state[key] for key in keys if key in self.state}
        source = self.source
        if source is not None:
            source = {key: source[key] for key in keys if key in source}
        return replace(self, state=state, source=source, prepared=None)

    def in_place(self) -> TensorLists:
        """Copy the current values from ``source`` into ``main`` and ``state``, and return lists
        without ``source``."""
        if self.source is None:
            return self
        for key, tensors in self.source.items():
            if tensors:
                torch._foreach_copy_(
                    list(self.main if key == MAIN else self.state[key]), list(tensors)
                )
        return replace(self, source=None)


def contiguous(tensors: CachedTensorList) -> CachedTensorList:
    """Return the list if all tensors are contiguous, else a new list with contiguous copies."""
    if tensors.contiguous:
        return tensors
    return CachedTensorList(tensor.contiguous() for tensor in tensors)


def contiguous_outputs(outputs: Sequence[Tensor | None]) -> Sequence[Tensor | None]:
    """Return the list if all tensors are contiguous, else a new list with contiguous copies.

    A copy has the values of its tensor, because a step that the device skips writes no values into
    the copy.
    """
    if isinstance(outputs, CachedTensorList) and outputs.contiguous:
        return outputs
    if all(map(Tensor.is_contiguous, [output for output in outputs if output is not None])):
        return outputs
    return [None if output is None else output.contiguous() for output in outputs]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepInputs:
    """Settings and number of a step, for libraries with kernels that compute scalars themselves.

    The fields are in a base class, because ``__slots__`` of a subclass lists only the scalars.
    """

    given_lr: float
    given_decay: float
    given_step: int
    bias_correction: bool


@dataclass(frozen=True, slots=True)
class AdamScalars(StepInputs):
    """Scalars of a step of Adam, rounded to FP32."""

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
        """Return the scalars for a param group at a step, counted from 1.

        Reads ``lr``, ``betas``, ``eps``, ``weight_decay`` and flags of the group.
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
    """Scalars of a step of SGD, rounded to FP32. ``first`` is True if the gradient becomes the
    momentum buffer."""

    lr: float
    momentum: float
    one_minus_dampening: float
    decay: float
    nesterov: bool
    first: bool

    @classmethod
    def at(cls, group: Mapping[str, Any], step: int) -> SgdScalars:
        """Return the scalars for a param group at a step, counted from 1."""
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
    """Scalars of a step of Lion, rounded to FP32."""

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
        """Return the scalars for a param group, which do not depend on the step."""
        beta1, beta2 = map(float, group["betas"])
        lr = float(group["lr"])
        averages = beta1, 1 - beta1, beta2, 1 - beta2
        decay = lr * float(group["weight_decay"])
        return cls(*array("f", (*averages, lr, decay)), cautious_wd=bool(group.get("cautious_wd")))


@dataclass(frozen=True, slots=True)
class LambScalars(StepInputs):
    """Scalars of a step of LAMB, rounded to FP32 except ``lr``."""

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
    _: KW_ONLY
    adapts: bool

    @classmethod
    def at(cls, group: Mapping[str, Any], step: int) -> LambScalars:
        """Return the scalars for a param group at a step, counted from 1."""
        beta1, beta2 = map(float, group["betas"])
        bias1, bias2 = bias_corrections(group, beta1, beta2, step)
        lr, decay = float(group["lr"]), float(group["weight_decay"])
        averages = beta1, 1 - beta1 if group["grad_averaging"] else 1.0, beta2, 1 - beta2
        step_of = group["eps"], 1 / bias1, 1 / math.sqrt(bias2)
        decays = (decay, 0.0) if group["adam_w_mode"] else (0.0, decay)
        return cls(
            *(*array("f", (*averages, *step_of, *decays)), lr),
            adapts=bool(group["use_nvlamb"] or decay != 0.0),
            given_lr=lr,
            given_decay=decay,
            given_step=int(step),
            bias_correction=bool(group["bias_correction"]),
        )

    def ratio(self, param_square: float, update_square: float) -> float:
        """Return the trust ratio times the learning rate, rounded to FP32.

        The result is lr * ||p|| / ||u|| if the rule adapts and the norms of p and u are positive,
        else lr.

        Args:
            param_square: sum of squares of the parameter p.
            update_square: sum of squares of the update u.
        """
        if not self.adapts or param_square == 0.0 or update_square == 0.0:
            return fp32(self.lr)
        return fp32(self.lr * math.sqrt(param_square) / math.sqrt(update_square))


RULE_SCALARS: dict[str, Any] = {
    "adam": AdamScalars,
    "sgd": SgdScalars,
    "lion": LionScalars,
    "lamb": LambScalars,
}
"""Class of scalars, by name of the rule."""


@dataclass(frozen=True, slots=True)
class MuonScalars:
    """Scalars of Muon's passes over elements, rounded to FP32.

    Attributes:
        average: factor of (gradient - momentum) in the new momentum.
        ahead: factor of (momentum - gradient) in Nesterov's direction.
        decay: learning rate times weight decay.
        average_from_end: True if the product with ``average`` is added to the gradient, as
            ``torch.lerp`` does for weights from 0.5 on; False if it is added to the momentum.
        ahead_from_end: True if the product with ``ahead`` is added to the momentum; False if it is
            added to the gradient.
        nesterov: True for Nesterov's momentum.
        cautious_wd: True for cautious weight decay.
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
        """Return the scalars for a param group, which do not depend on the step."""
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


# -- lists of equal dtypes -----------------------------------------------------------------------

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
"""Dtypes of gradients that kernels support."""
_OUTPUTS: dict[tuple[torch.dtype | None, torch.dtype | None], tuple[torch.dtype | None, ...]] = {
    (None, None): FLOATS,
    (torch.float32, None): (None, *FLOATS),
    (torch.bfloat16, torch.int16): (None, torch.bfloat16),
    (torch.bfloat16, torch.int8): (None, torch.bfloat16),
    (torch.bfloat16, None): (None, torch.bfloat16),
}
"""Supported dtypes of outputs, by the dtypes of main params and remainders."""


_FIRST, _SECOND, _AVERAGES = (
    {None, *(form.dtype for form in forms)} for forms in (FIRST_FORMS, SECOND_FORMS, AVERAGE_FORMS)
)


class LaunchDtypes(NamedTuple):
    """Dtypes of all tensors of a launch, by kind of tensor; None if the launch has no such
    tensor."""

    grad: torch.dtype
    main: torch.dtype | None = None
    remainder: torch.dtype | None = None
    moment1: torch.dtype | None = None
    moment2: torch.dtype | None = None
    output: torch.dtype | None = None
    average: torch.dtype | None = None

    @property
    def compares_weights(self) -> bool:
        """True if kernels compare FP32 main params with the model's 16-bit weights."""
        return self.main == torch.float32 and self.output in (torch.bfloat16, torch.float16)


class AlikeLists(NamedTuple):
    """Tensors with equal dtypes.

    Attributes:
        indices: index of each tensor in the lists of the call.
        kind: dtypes of the tensors; None if no kernel supports them.
        lists: lists of these tensors alone.
    """

    indices: Sequence[int]
    kind: LaunchDtypes | None
    lists: TensorLists


class PreparedLaunch(NamedTuple):
    """A launch of a rule over whole lists, cached in :attr:`TensorLists.prepared`.

    Attributes:
        kind: dtypes of the tensors.
        sizes: number of elements of each gradient.
        written: tensors that kernels write and autograd may track.
        launch: object of the backend.
    """

    kind: LaunchDtypes
    sizes: array[int]
    written: list[Tensor]
    launch: Any


def prepared_launch(lists: TensorLists, rule: str) -> PreparedLaunch | None:
    """Return the cached launch of a rule if the gradients have its dtype and sizes; else None."""
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
    """Cache a launch for :func:`prepared_launch` if the launch covers all tensors of its lists."""
    lists, kind = part.lists, part.kind
    if lists.prepared is None or not isinstance(part.indices, range):
        return
    if lists.noise is None and lists.source is None:
        sizes = CachedTensorList.of(lists.grad).own_sizes
        assert kind is not None
        lists.prepared[rule] = PreparedLaunch(kind, sizes, written, launch)


def continued(lists: TensorLists, kind: LaunchDtypes | None) -> TensorLists:
    """Set main params to the model's weights in ``output``, where a main param does not round to
    the weight.

    Does nothing if a kernel compares the weights.

    Returns:
        The lists; without ``follows`` if the main params were set.
    """
    if not lists.follows or (kind is not None and kind.compares_weights):
        return lists
    continue_from(lists.main, lists.output, lists.changed)
    return replace(lists, follows=False)


def kept_moments(lists: TensorLists, moments: tuple[str, ...]) -> tuple[str, ...]:
    """Return a rule's moments with "" in place of moments that are not stored."""
    return tuple([name if name in lists.state else "" for name in moments])


def alike_lists(lists: TensorLists, moments: tuple[str, ...]) -> list[AlikeLists]:
    """Divide the lists into lists of tensors with equal dtypes. Equal lists are returned undivided.

    Args:
        lists: tensor lists.
        moments: names of the first and the second moment, "" for a moment that is not stored.
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
    dtypes: list[set[torch.dtype | None]] = []
    for column in columns:
        if isinstance(column, CachedTensorList):
            dtypes.append(set(column.dtypes))
        else:
            dtypes.append({None if each is None else each.dtype for each in column or (None,)})
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


def _supported(
    kind: LaunchDtypes, lists: TensorLists, moments: tuple[str, ...]
) -> LaunchDtypes | None:
    """Return the dtypes if kernels support them with these scales and seeds; else None."""
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
    """Return the kernels' names of a slot's tensors, by key in ``TensorLists``.

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
    """Return lists of equal dtypes by the names that kernels use for their tensors."""
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


# -- checks of addresses and sizes ----------------------------------------------------------------


def check_fit(kind: LaunchDtypes, columns: Mapping[str, CachedTensorList]) -> None:
    """Check tensor lists before their addresses go to a kernel, because kernels do not check
    addresses.

    Args:
        kind: expected dtypes.
        columns: tensor lists. Keys are the fields of :class:`LaunchDtypes`, and ``scale1``,
            ``scale2`` and ``changed``. A key with the prefix ``from_`` has the tensors that a step
            reads when it writes its results to other tensors.

    Raises:
        ValueError: a tensor has an unexpected dtype or number of elements, or its storage is too
            small. Nothing was written.
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
            # A first moment in uint8 has 4-bit codes, two in a byte, so expect half as many bytes
            # as elements.
            if dtype == torch.uint8 and column == "moment1":
                expected = _sizes(numbers, "packed")
        fits = tensors.own_sizes == expected and tensors.dtypes <= {dtype}
        if not fits or not tensors.stored:
            raise ValueError(_misfit(name, tensors, expected, dtype))


@lru_cache(maxsize=64)
def _sizes(numbers: bytes, form: str) -> array[int]:
    each = {"blocks": blocks_of, "packed": packed_bytes, "bits": bitmap_bytes}[form]
    return array("q", map(each, array("q", numbers)))


def bitmap_bytes(numel: int) -> int:
    """Return the number of bytes of a bitmap for ``numel`` elements, a multiple of 8."""
    return -(-numel // 64) * 8


def _misfit(
    name: str, tensors: Sequence[Tensor], expected: Sequence[int], dtype: torch.dtype
) -> str:
    for place, (tensor, size) in enumerate(zip(tensors, expected, strict=False)):
        held = tensor.untyped_storage().nbytes()
        is_misfit = (tensor.numel(), tensor.dtype) != (size, dtype)
        if is_misfit or held < tensor.nbytes:
            return (
                f"tensor {place} of {len(tensors)} in column {name!r} of a kernel's call has "
                f"{tensor.numel()} elements of {tensor.dtype} in a storage of {held} bytes, but "
                f"its slot has {size} of {dtype}, because memory was replaced or resized "
                "(`tensor.data = ...`, `resize_`), so nothing was written; put a new parameter "
                "into the param group, or build the optimizer again"
            )
    return (
        f"column {name!r} of a kernel's call has {len(tensors)} tensors for {len(expected)} slots; "
        "build the optimizer again"
    )
