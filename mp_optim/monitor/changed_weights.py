"""The elements of a model's weights that changed since the last call of ``changed_weights()``."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from mp_optim.core import CachedTensorList, Slot, StepPlan, local_tensor
from mp_optim.core.executor import Executor
from mp_optim.core.tensor_layout import region_of
from mp_optim.core.weight_delta import WeightDelta, WeightPatch, bits_differ, bits_set
from mp_optim.kernels.checksums import WrittenWeights
from mp_optim.kernels.kernel_args import bitmap_bytes
from mp_optim.mixed_precision import MegatronOptimizer
from mp_optim.mixed_precision.main_params import MainParams
from mp_optim.mixed_precision.observer import Observer, WeightObserver
from mp_optim.mixed_precision.slot_table import SlotTable

ChangedPart = tuple[Slot, torch.Size, Tensor | None, Tensor]
"""The changes of one parameter: its slot; the shape of the parameter, or of this rank's part with
plain tensor parallelism; ascending row-major indices in that shape, None for all elements; and
the new values."""


class WeightChanges(WeightObserver):
    """Records which elements of each parameter changed since the last publication (the last call of
    ``changed_weights()``), for the wrapper's life.

    How changes are found depends on the parameter:

    - If the step's kernels mark changes, the parameter has a bitmap. A kernel sets the bit of each
      element that the kernel changes (``SlotUpdate.changed``). If other code writes the parameter,
      all of its elements count as changed.
    - Any other trained parameter has a copy of its values at the last publication.

    NOTE: a write by other code is found in one of two ways. A parameter with a separate main param
    differs from the rounded main param, and :class:`MainParams` calls :meth:`weight_written`. A
    parameter without a separate main param has a checksum, which is taken after each step and
    compared before the next step.

    Args:
        table: the slot table.
        executor: the executor that steps the parameters.

    Attributes:
        is_lost: True if a publication was begun and not delivered. Then the next publication has
            all elements.
    """

    def __init__(self, table: SlotTable, executor: Executor) -> None:
        self._table, self._executor = table, executor
        self._sums = WrittenWeights()
        self._written: set[int] = set()
        self._exposed: set[int] = set()
        self._count = len(table.slots)
        self._bits: dict[int, Tensor] = {}
        self._values: dict[int, Tensor] = {}
        self.is_lost = False
        self._had_main: list[bool] = []
        self._is_marked: list[bool] = []
        alone = self._alone(frozen=True)
        self._sums.note(alone, list(map(self._table.weight_at, alone)))
        self.look()

    # -- in a step --------------------------------------------------------------------------------

    def look(self, frozen: bool = True) -> None:
        """Find parameters that other code wrote since the last call, before a step or a
        publication.

        Args:
            frozen: True to compare parameters that are not trained, too.
        """
        table = self._table
        # Slots from self._count on belong to groups added since the last call, if any. All their
        # elements count as changed.
        self._written.update(range(self._count, len(table.slots)))
        self._count = len(table.slots)
        alone = self._alone(frozen or table.has_main != self._had_main)
        weights = [self._table.weight_at(index) for index in alone]
        changed = self._sums.changed(alone, weights)
        self._written.update(alone[at] for at in changed)
        self._sums.note([alone[at] for at in changed], [weights[at] for at in changed])
        once = self._exposed.union(filter(self._sums.knows, range(self._count)))
        # Parameters in _alone() keep their checksums. Each remaining parameter has a checksum only
        # because a caller holds its state tensors and may write to them. Compare this checksum
        # once, then drop it.
        once.difference_update(self._alone(frozen=True))
        for index in once:
            if self._sums.changed([index], [self._table.weight_at(index)]):
                self._written.add(index)
            self._sums.forget(index)
        self._exposed.clear()
        if table.has_main != self._had_main:
            has_main = list(table.has_main)
            self._is_marked = list(map(self._executor.marks_changes, table.slots))
            for index, is_trained in enumerate(has_main):
                if is_trained and not self._is_marked[index] and index not in self._written:
                    self._remember(index)
            # Assign the list last: if a signal interrupts this method, the next call repeats all of
            # it.
            self._had_main = has_main

    def _remember(self, index: int) -> None:
        if index not in self._values:
            self._values[index] = self._flat(index).clone()

    def before_launch(self, plan: StepPlan, indices: list[int]) -> Sequence[Tensor | None]:
        self.look(frozen=False)
        return plan.part("changed", (self._bits,), partial(self._bitmaps, indices))

    def _bitmaps(self, indices: Sequence[int]) -> Sequence[Tensor | None]:
        for index in indices:
            if self._is_marked[index] and index not in self._bits:
                stepped = self._executor.stepped(self._table.slots[index])
                count = bitmap_bytes(stepped.numel())
                self._bits[index] = torch.zeros(count, dtype=torch.uint8, device=stepped.device)
        bits = [self._bits.get(index) if self._is_marked[index] else None for index in indices]
        present = [each for each in bits if each is not None]
        if len(present) == len(bits):
            return CachedTensorList(present)
        return bits if present else ()

    def _alone(self, frozen: bool) -> list[int]:
        """Return the indices of parameters without a separate main param, which only checksums can
        compare.

        Args:
            frozen: True to include parameters that are not trained.
        """
        table = self._table
        every = enumerate(zip(table.has_main, table.has_own_main, strict=True))
        return [index for index, (main, own) in every if not own and (main or frozen)]

    def after_launch(self) -> None:
        alone = self._alone(frozen=False)
        self._sums.note(alone, list(map(self._table.weight_at, alone)))

    def weight_written(self, index: int) -> None:
        self._written.add(index)

    def state_exposed(self, index: int) -> None:
        # A parameter without a separate main param has a checksum already.
        if not self._sums.knows(index):
            self._exposed.add(index)
            self._sums.note([index], [self._table.weight_at(index)])

    # -- to publish -------------------------------------------------------------------------------

    def changed(self, full: bool, is_first: Callable[[Slot], bool]) -> Iterator[ChangedPart]:
        """Yield the changes of this rank's parameters, parameter by parameter.

        Args:
            full: True for all elements, changed or not.
            is_first: returns True if no rank before this one publishes the same elements of a slot.
        """
        for index, slot in enumerate(self._table.slots):
            flat, param = self._flat(index), self._table.params[index]
            if not is_first(slot) or not flat.numel():
                continue
            where: Tensor | None = None  # None stands for all elements.
            before, bits = self._values.get(index), self._bits.get(index)
            is_unknown = self._had_main[index] and not self._is_marked[index]
            if not full and not self.is_lost:
                if before is not None and (before.shape, before.dtype) == (flat.shape, flat.dtype):
                    where = bits_differ(before.to(flat.device), flat)
                elif not is_unknown and index not in self._written:
                    none = flat.new_empty(0, dtype=torch.int64)
                    where = none if bits is None else bits_set(bits)
                    where = where[where < flat.numel()].to(flat.device)
            if where is not None and not where.numel():
                continue
            values, region = flat.clone() if where is None else flat[where], region_of(param)
            if flat.numel() < region.shape.numel():
                if where is None:
                    where = torch.arange(flat.numel(), device=flat.device)
                if region.offsets is None:
                    where = where + region.start
                else:
                    held = local_tensor(param).shape
                    where = _index_in_whole(where, held, region.shape, region.offsets)
            yield slot, region.shape, where, values

    def forget_published(self) -> None:
        """Forget all changes, after they were published."""
        self._written.clear()
        for bits in self._bits.values():
            bits.zero_()
        for index, is_trained in enumerate(self._had_main):
            if is_trained and not self._is_marked[index]:
                self._values.pop(index, None)
                self._remember(index)

    def _flat(self, index: int) -> Tensor:
        return local_tensor(self._table.params[index]).reshape(-1)


class ChangedWeights(Observer):
    """The changes of a stack's weights while ``track_changes()`` is on. Each call of
    ``changed_weights()`` is a publication.

    Attributes:
        run: random name of this series of publications; each ``track_changes()`` makes a new name.
        number: number of publications so far.
        tracked: main params of each wrapper, with the changes of its weights; empty if tracking is
            off.
    """

    def __init__(self, stack: MegatronOptimizer) -> None:
        super().__init__(stack)
        self.run, self.number = "", 0
        self.tracked: list[tuple[MainParams, WeightChanges]] = []

    def track(self, on: bool) -> None:
        """Start or stop recording which weights change. See
        :meth:`mp_optim.MegatronOptimizer.track_changes`."""
        stack = self.stack
        stack.step_mark.check_lent("track_changes")
        stack.make_current()
        if on and any(any(mains.table.quantized) for mains in stack.all_mains()):
            raise ValueError(
                "track_changes: some parameters are in 8 bits, and their scales change with their "
                "values; save the whole model.state_dict() in place of the changes"
            )
        if on and any(
            group["params"] and not (group.get("param_names") or group.get("fqns"))
            for group in stack.param_groups
        ):
            raise ValueError(
                "track_changes: parameters have no names; build the optimizer with "
                "model.named_parameters()"
            )
        for mains, changes in self.tracked:
            mains.observers.remove(changes)
        self.tracked.clear()
        if not on:
            return
        for mains in stack.all_mains():
            changes = WeightChanges(mains.table, mains.executor)
            mains.observers.append(changes)
            self.tracked.append((mains, changes))
        self.run, self.number = uuid.uuid4().hex, 0

    def publish(self, full: bool) -> WeightDelta:
        """Return this rank's part of the changed weights. See
        :meth:`mp_optim.MegatronOptimizer.changed_weights`."""
        stack = self.stack
        if not self.tracked:
            raise RuntimeError(
                "changed_weights: changes are not tracked; call track_changes() before the steps"
            )
        stack.step_mark.check("changed_weights")
        stack.make_current()
        parallel, patches, watched = stack.model_parallel, [], 0
        for mains, changes in self.tracked:
            watched += sum(local_tensor(param).numel() for param in mains.table.params)
            mains.follow()
            changes.look(frozen=True)
            for slot, size, where, values in changes.changed(full, mains.is_first_copy):
                name, shape = mains.name(slot), tuple(size)
                if name in parallel.copies:
                    continue
                partition = parallel.partitions.get(name)
                if partition is not None:
                    if where is None:
                        where = torch.arange(values.numel(), device=values.device)
                    where = partition.whole_index(where, shape)
                    shape = partition.whole_shape(shape)
                dtype, of_model = values.dtype, parallel.names[name]
                patches.append(WeightPatch(of_model, shape, dtype, values, where))
        # If an exception or a signal handler interrupts the next lines, the changes are lost. Then
        # the next publication has all elements.
        for _, changes in self.tracked:
            changes.is_lost = True
        for _, changes in self.tracked:
            changes.forget_published()
        self.number += 1
        for _, changes in self.tracked:
            changes.is_lost = False
        ranks, rank = (dist.get_world_size(), dist.get_rank()) if dist.is_initialized() else (1, 0)
        return WeightDelta(self.run, self.number, full, rank, ranks, watched, tuple(patches))


def _index_in_whole(
    index: Tensor, held: torch.Size, whole: torch.Size, offsets: Sequence[int]
) -> Tensor:
    """Convert row-major indices in a box of a tensor to row-major indices in the tensor.

    Args:
        index: int64 indices in the box.
        held: shape of the box.
        whole: shape of the tensor.
        offsets: index of the box's first element in the tensor.
    """
    found, step = torch.zeros_like(index), 1
    for size, full, first in zip(reversed(held), reversed(whole), reversed(offsets), strict=True):
        found += (index % size + first) * step
        index, step = index // size, step * full
    return found
