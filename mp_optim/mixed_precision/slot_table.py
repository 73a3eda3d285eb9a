"""The slot table of a precision wrapper. Facts about all slots are columns (parallel lists),
because one C call reads a whole list."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar, cast

import torch
from torch import Tensor

from mp_optim.core import (
    CachedTensorList,
    ParamGroups,
    Slot,
    SlotUpdates,
    StepPlan,
    are_plain,
    current_grad,
    local_grad,
    local_tensor,
    param_at,
)
from mp_optim.core.executor import Executor
from mp_optim.core.quantized import FLOAT8_DTYPES, bits_of, is_quantized
from mp_optim.core.tensor_layout import ParamLayout
from mp_optim.core.tensors import (
    GRADIENT_DTYPES,
    ParamWatcher,
    has_memory,
    have_grad_only,
    held_tensor,
)
from mp_optim.kernels.sums import Groups
from mp_optim.mixed_precision.grad_norm import NormKey
from mp_optim.mixed_precision.settings_agreement import SettingsAlike

T = TypeVar("T")


@dataclass(frozen=True)
class SlotColumns:
    """Columns of the table for the slots of a step. The next step reuses the object if nothing
    changed.

    Attributes:
        indices: indices of the slots in the table.
        keys: norm key of each slot.
        group: norm group that all slots have in common; None if there is none.
        params: the model's tensor of each slot; a DTensor's local shard.
        slots: the slots as a step plan.
        outputs: the tensors that the step writes; None for a slot that is stepped in place.
    """

    indices: list[int]
    keys: list[NormKey]
    group: str | None
    params: CachedTensorList
    slots: StepPlan
    outputs: Sequence[Tensor | None]


@dataclass(eq=False)
class SlotTable:
    """The slots of a wrapper in slot order, as parallel lists, kept for the wrapper's life.

    A slot is in one of four states:

    - No main param: the parameter was never trainable (``has_main`` is False).
    - No main param, but :class:`MainParams` prepared one for state that is being loaded.
    - The parameter is its own main param (only ``has_main`` is True).
    - The main param is another tensor (``has_main`` and ``has_own_main``). The step writes the
      parameter, or quantizes into it afterwards (``quantized``).

    Attributes:
        executor: the executor that steps the slots.
        slots: group and position of each slot.
        seen: the model's tensors with their fingerprints, which detect changes by other code.
        has_main: True if the parameter has ever been trainable. Only such a slot has state.
        has_own_main: True if the main param is another tensor than the model's.
        quantized: True if the model's tensor is in 8 bits with scales.
        keys: norm key of each slot's gradient.
        streams: random stream of each parameter.
        layouts: device of the model's tensor, and its split over ranks.
        split_over: process groups over which the parameter is sharded.
        first: index of each group's first slot.

    NOTE: code that writes a column calls ``StepMark.invalidate_plans()``, which makes all
    cached values stale that were derived from the columns.
    """

    executor: Executor
    slots: list[Slot] = field(default_factory=list)
    seen: ParamWatcher = field(default_factory=ParamWatcher)
    has_own_main: list[bool] = field(default_factory=list)
    quantized: list[bool] = field(default_factory=list)
    has_main: list[bool] = field(default_factory=list)
    keys: list[NormKey] = field(default_factory=list)
    streams: list[int] = field(default_factory=list)
    layouts: list[ParamLayout] = field(default_factory=list)
    split_over: list[Groups] = field(default_factory=list)
    first: list[int] = field(default_factory=list)
    _facts: dict[str, Any] = field(default_factory=dict)
    _source: object = None

    def index(self, slot: Slot) -> int:
        """Return the index of a slot in the columns."""
        return self.first[slot.group] + slot.position

    @property
    def params(self) -> list[Tensor]:
        """The model tensor of each slot."""
        return self.seen.params

    def weight_at(self, index: int) -> Tensor:
        """Return this rank's weights of a slot as a plain tensor: the codes of a quantized
        parameter, else the values."""
        param = self.params[index]
        return bits_of(param) if self.quantized[index] else local_tensor(param)

    def reuse(self, name: str, make: Callable[[], T]) -> T:
        """Return a cached value that is derived from the columns. The first call computes the
        value, and the first call after ``StepMark.invalidate_plans()`` computes it again.

        Args:
            name: cache key of the value.
            make: function that computes the value.
        """
        if self._source is not (present := self.executor.step_mark.plan_key):
            self._facts, self._source = {}, present
        if name not in self._facts:
            self._facts[name] = make()
        fact: T = self._facts[name]
        return fact

    def settings_alike(self) -> SettingsAlike:
        """Return the settings that this rank compares with other ranks, and the device of the
        slots. Callers cache the result by :meth:`reuse` under the name ``common``."""
        return SettingsAlike(self.slots, self.params, self.keys)

    def add(
        self,
        slot: Slot,
        param: Tensor,
        stream: int,
        key: NormKey,
        layout: ParamLayout,
        split_over: Groups,
    ) -> None:
        """Append a slot that has no main param yet. Its present tensor counts as seen."""
        self.slots.append(slot)
        self.seen.extend([param])
        self.has_own_main.append(False)
        self.has_main.append(False)
        self.quantized.append(is_quantized(param))
        self.keys.append(key)
        self.layouts.append(layout)
        self.streams.append(stream)
        self.split_over.append(split_over)
        self.executor.step_mark.invalidate_plans()

    def grads(
        self, name_of: Callable[[Slot], str], released: Mapping[Slot, Tensor]
    ) -> tuple[SlotColumns, CachedTensorList]:
        """Return the columns of the slots that have a gradient, and their local gradients.

        Args:
            name_of: function that returns the FQN of a slot, for messages.
            released: gradients that were removed from their parameters during backward.

        Raises:
            TypeError: a gradient is sparse or not floating point; the message names the parameter.
            ValueError: a parameter is on the meta device, or has a second gradient in addition to
                the released one. Or a gradient has no memory, or another shape than its parameter.
        """
        params = self.seen.params
        simple = self.seen.plain and not released and have_grad_only(params)
        present: list[Tensor | None] = list(map(_GRAD if simple else current_grad, params))
        for slot, grad in released.items():
            index = self.index(slot)
            if present[index] is not None:
                raise ValueError(
                    f"{name_of(slot)}: its gradient was released during backward, so a second "
                    "gradient (of another dtype, sparse, or assigned by the program) cannot be "
                    "added; set release_gradients=False"
                )
            present[index] = grad
        is_whole = all(map(operator.is_not, present, itertools.repeat(None)))
        if is_whole and (simple or released):
            columns = self.select([*range(len(self.slots))])
            grads = CachedTensorList(cast("list[Tensor]", present))
        else:
            indices = [index for index, grad in enumerate(present) if grad is not None]
            if not indices:
                meta = [index for index, param in enumerate(params) if param.is_meta]
                empty = [params[index] for index in meta]
                self._refuse(meta, map(Tensor.size, empty), empty, name_of)
            columns = self.select(indices)
            grads = CachedTensorList(grad for grad in present if grad is not None)
        if simple:
            # torch requires that ``grad`` has the parameter's shape and device, so neither is
            # checked here.
            sizes, devices = columns.params.sizes, columns.params.devices
            vars(grads).update(sizes=sizes, devices=devices)
        elif not are_plain(grads):
            self._refuse(columns.indices, map(Tensor.size, grads), grads, name_of)
            with_grad = [params[index] for index in columns.indices]
            grads = CachedTensorList(map(local_grad, with_grad, grads))
        indices, shapes = columns.indices, self.seen.shapes
        if len(indices) < len(shapes):
            shapes = [shapes[index] for index in indices]
        try:  # is_contiguous() raises for layouts without strides.
            strided = grads.contiguous or all(grad.layout == torch.strided for grad in grads)
        except RuntimeError:
            strided = False
        is_readable = strided and grads.dtypes <= GRADIENT_DTYPES and _META not in grads.devices
        # torch checks the shape of a gradient at the assignment, but not when the memory of the
        # parameter or of the gradient is replaced later.
        if not is_readable or list(map(Tensor.size, grads)) != shapes or not grads.stored:
            self._refuse(indices, shapes, grads, name_of)
        # The shapes are checked by now, so the sizes of the parameters are those of the gradients.
        if "sizes" in vars(grads):
            vars(grads)["own_sizes"] = grads.sizes
        return columns, grads

    def _refuse(
        self,
        indices: Sequence[int],
        shapes: Iterable[torch.Size],
        tensors: Sequence[Tensor],
        name_of: Callable[[Slot], str],
    ) -> None:
        """Raise if a gradient has an unsupported dtype or layout, another shape than its parameter,
        or no memory; or if a parameter is on the meta device.

        Args:
            indices: indices of the slots.
            shapes: shape of each parameter.
            tensors: the gradient of each slot, or the parameter if it has no gradient.
            name_of: function that returns the FQN of a slot.
        """
        for index, shape, tensor in zip(indices, shapes, tensors, strict=True):
            error: type[Exception] = ValueError
            if tensor.is_meta:
                why = (
                    " is on the meta device, without values: call model.to_empty(device=...) and "
                    "initialise or load the weights, then build the optimizer"
                )
            elif tensor.dtype in FLOAT8_DTYPES:
                error, why = TypeError, f": gradient is {tensor.dtype}; set grad_dtype="
                why += "torch.bfloat16 on the parameter"
            elif tensor.layout != torch.strided or tensor.dtype not in GRADIENT_DTYPES:
                error, why = (
                    TypeError,
                    f": gradient is {tensor.dtype} with layout {tensor.layout}, ",
                )
                why += "but only dense floating-point gradients are supported; build the embedding "
                why += "with sparse=False"
            elif tensor.shape != shape:
                why = (
                    f": the gradient has the shape {tuple(tensor.shape)}, but the parameter "
                    f"{tuple(shape)}, because the memory of the gradient or of the parameter was "
                    "replaced after backward; call zero_grad(), and backward again"
                )
            elif not has_memory(tensor):
                why = (
                    ": the gradient's memory was freed (untyped_storage().resize_); call "
                    "zero_grad(), and backward again"
                )
            else:
                continue
            raise error(f"{name_of(self.slots[index])}{why}")

    def updates(
        self, grads: Mapping[Slot, Tensor], multiplier: float, param_groups: ParamGroups
    ) -> SlotUpdates:
        """Return the updates of some slots, in the order of their gradients. Leave out slots that
        have no main param, or whose parameter was replaced since the last step.

        Args:
            grads: local gradients by slot.
            multiplier: factor of the gradients.
            param_groups: live groups of the model's parameters.
        """
        indices = []
        for index, slot in [(self.index(slot), slot) for slot in grads]:
            param = param_at(param_groups, slot)
            shape = self.seen.shapes[index]
            is_seen = param is self.params[index] and held_tensor(param).shape == shape
            if is_seen and self.has_main[index]:
                indices.append(index)
        chosen = self._select(indices)
        present = [grads[slot] for slot in chosen.slots]
        return SlotUpdates(chosen.slots, present, [multiplier] * len(present), chosen.outputs)

    def select(self, indices: list[int]) -> SlotColumns:
        """Return the columns of some slots. Return the object of the last step if slots and tensors
        are unchanged.

        Args:
            indices: indices of the slots.
        """
        columns = self.reuse("columns", lambda: self._select(indices))
        if columns.indices != indices:
            columns = self._facts["columns"] = self._select(indices)
        return columns

    def _select(self, indices: list[int]) -> SlotColumns:
        params = [self.params[index] for index in indices]
        writable = CachedTensorList(params if are_plain(params) else map(local_tensor, params))
        written = [self.has_own_main[index] and not self.quantized[index] for index in indices]
        pairs = zip(writable, written, strict=True)
        outputs = writable if all(written) else [param if yes else None for param, yes in pairs]
        keys = [self.keys[index] for index in indices]
        groups = {key.group for key in keys}
        return SlotColumns(
            indices,
            keys,
            groups.pop() if len(groups) == 1 else None,
            writable,
            StepPlan(
                [self.slots[index] for index in indices],
                [key.shard_groups for key in keys],
                [self.streams[index] for index in indices],
                [self.layouts[index] for index in indices],
            ),
            outputs,
        )


_META = torch.device("meta")
_GRAD = operator.attrgetter("grad")
