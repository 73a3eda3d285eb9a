"""State of one param group: counts of steps and state tensors of each slot, and lists of them that
are kept from one step to the next."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from mp_optim.core import CachedTensorList, all_same
from mp_optim.core.tensor_layout import region_of
from mp_optim.core.tensors import ParamWatcher


class LaunchCache:
    """Tensor lists and the launch of slots that are mostly stepped together, the slots of one place
    or of one bucket. Kept between steps.

    Attributes:
        positions: positions of the slots, in order.
        known: the last list that was equal to them.
        watched: all state tensors of the slots, in the memory of the last step; empty if unknown.
        forms: layouts of these tensors when they were last checked.
        count: number of steps, if it is known to be equal for all slots.
        mains: the tensors that are stepped.
        seen: layout of these tensors if they are a model's parameters, whose memory other code may
            move (``param.data = ...``). Such memory is not held.
        lists: state tensors by key.
    """

    def __init__(self, positions: Iterable[int]) -> None:
        self.positions = list(positions)
        self.count: float | None = None
        self.known: Sequence[int] | None = None
        self.forms: list[tuple[object, ...]] = []
        self.forget()

    def forget(self) -> None:
        """Forget tensors: some were replaced or have other memory, and lists of them keep the
        former memory alive."""
        self.watched = CachedTensorList()
        self.lists: dict[str, CachedTensorList] = {}
        self.mains: CachedTensorList | None = None
        self.seen: ParamWatcher | None = None
        self._launch: Any = None
        self._sources: tuple[object, ...] = ()
        self._names: object = None

    def keep_launch(self, launch: Any, sources: tuple[object, ...], names: object) -> None:
        """Keep a launch without gradients.

        Args:
            sources: the objects that it was made from.
            names: of the moments that are kept under its settings. A launch depends on settings by
                these names alone.
        """
        self._launch, self._sources, self._names = launch, sources, names

    def launch_from(self, sources: tuple[object, ...], names: object) -> Any:
        """Return the kept launch if it was made from the same objects and for equal names, else
        None."""
        is_same = all_same(sources, self._sources) and names == self._names
        return self._launch if is_same else None


class GroupState:
    """State of one param group, kept for the optimizer's life.

    Attributes:
        regions: the elements of its parameter that each slot has.
        steps: FP32, shape (slots,), on the CPU: number of steps of each slot. A slot's ``step`` is
            a view of it.
        slots: state tensors of each slot; empty until they are read.
        mains: the tensor that each slot's state was last checked against.
        shapes: shape of that tensor.
        is_shown: True if callers were given state, so they may give it other memory.
    """

    def __init__(self, params: Sequence[Tensor]) -> None:
        count = len(params)
        self.regions = [region_of(param) for param in params]
        self.steps = torch.zeros(count, dtype=torch.float32, device="cpu")
        self.slots: list[dict[str, Tensor]] = [{} for _ in range(count)]
        self.mains: list[Tensor | None] = [None] * count
        self.shapes: list[torch.Size | None] = [None] * count
        self.is_shown = False
        self._version = self.steps._version
        self._caches: list[LaunchCache] = []  # of each slot
        self.step_together([])

    def step_together(self, sets: Iterable[Sequence[int]]) -> None:
        """The slots at each of these positions are mostly stepped at a time, and so are those that
        are left."""
        found: dict[int, LaunchCache] = {}
        for positions in sets:
            found |= dict.fromkeys(positions, LaunchCache(positions))
        every = range(len(self.slots))
        rest = LaunchCache(position for position in every if position not in found)
        self._caches = [found.get(position, rest) for position in every]
        self._sets = list(dict.fromkeys(self._caches))

    def launch_cache_for(self, positions: Sequence[int]) -> LaunchCache | None:
        """Return the cache of slots that are mostly stepped at a time, if these are all of them."""
        kept = self._caches[positions[0]]
        if positions is not kept.known and positions == kept.positions:
            kept.known = positions
        return kept if positions is kept.known else None

    def sets_of(self, positions: Iterable[int] | None = None) -> Iterable[LaunchCache]:
        """Return the sets that some slots are stepped with, or all sets."""
        every = self._caches
        if positions is None:
            return self._sets
        return dict.fromkeys(map(every.__getitem__, positions))

    def show(self, position: int) -> None:
        """Watch the memory of state from now on: a caller is given the state of a slot."""
        self.is_shown = True
        self._watched_of(self._caches[position])

    def has_moved(self, kept: LaunchCache) -> bool:
        """Return whether state of a set has other memory than at the last step, or another form."""
        if kept.watched:  # .data = .data.t() of a square tensor keeps address and shape
            return kept.watched.has_moved() or not all(map(Tensor.is_contiguous, kept.watched))
        return self.forms_of(kept) != kept.forms

    def _watched_of(self, kept: LaunchCache) -> CachedTensorList:
        if not kept.watched:
            kept.watched = CachedTensorList(
                value for position in kept.positions for value in self.slots[position].values()
            ).hold()
        return kept.watched

    def forms_of(self, kept: LaunchCache) -> list[tuple[object, ...]]:
        """Return the layout of all state tensors of a set, and the addresses of counts."""
        return [
            (t.shape, t.dtype, t.device, t.is_contiguous(), t.dim() or t.data_ptr())
            for t in self._watched_of(kept)
        ]

    def tensors(self, name: str, positions: Sequence[int]) -> list[Tensor]:
        """Return state tensors of one name; for slots that are stepped together the same list each
        time."""
        kept = self.launch_cache_for(positions)
        if kept is None:
            return [self.slots[position][name] for position in positions]
        if name not in kept.lists:
            tensors = CachedTensorList(self.slots[position][name] for position in positions)
            kept.lists[name] = tensors.hold()
        return kept.lists[name]

    def replaced(self, positions: Iterable[int] | None = None) -> None:
        """Forget lists of tensors: at some positions, or anywhere, there are others now."""
        for kept in self.sets_of(positions):
            kept.forget()

    def was_stepped(self, position: int) -> bool:
        """Whether a slot was ever stepped."""
        # unlike item(), tolist() is no question to a device
        return bool(self.steps[position : position + 1].tolist()[0] > 0)

    def count(self, positions: Sequence[int], by: int = 1) -> None:
        """Add a step to the given slots; -1 takes it back."""
        kept = self.launch_cache_for(positions)
        if kept is None or self.steps._version != self._version:
            self._forget_counts()
        elif kept.count is not None:
            kept.count += by
        if len(positions) == len(self.slots):
            self.steps += by
        else:
            self.steps[torch.tensor(positions, device="cpu")] += by
        self._version = self.steps._version

    def counts(self, positions: Sequence[int], kept: LaunchCache | None) -> list[float]:
        """Return the number of steps of each given slot; one number if it is equal for slots that
        are mostly stepped together.

        Args:
            positions: positions of the slots.
            kept: the cache of these positions (:meth:`launch_cache_for`).
        """
        if self.steps._version != self._version:
            self._forget_counts()
        if kept is not None and kept.count is not None:
            return [kept.count]
        of_all: list[float] = self.steps.tolist()
        counts = [of_all[position] for position in positions]
        if kept is not None and len(set(counts)) == 1:
            kept.count = counts[0]
            return counts[:1]
        return counts

    def _forget_counts(self) -> None:
        """They were written: slots' ``step`` are views of them, so torch counts who writes them."""
        self._version = self.steps._version
        for kept in self.sets_of():
            kept.count = None
