"""The back buffer of main params and moments: a step is written there, present values stay.

Tensors stay the same objects. Publishing a step gives them the memory of the back buffer, and the
memory they had becomes the back buffer; taking a step back is doing nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

from torch import Tensor

from mp_optim.placement.host_bytes import back_buffer_bytes
from mp_optim.process.host_memory import Block
from mp_optim.process.transfer import Transfer
from mp_optim.slots import CachedTensorList, all_same
from mp_optim.update.kernel_args import MAIN
from mp_optim.update.launches import PlannedLaunch
from mp_optim.update.rule import RuleOptimizer

Key = tuple[int, int, str]
"""Group, position, and which of the slot's tensors: a key of its state, or ``MAIN``."""


@dataclass(slots=True)
class _Pair:
    """A tensor in use, the memory it has, and as much again."""

    live: Tensor
    front: Tensor
    back: Tensor
    is_swapped: bool = False

    def fits(self, live: Tensor) -> bool:
        memory = live.data_ptr(), live.shape
        return live is self.live and memory == (self.front.data_ptr(), self.front.shape)

    def swap(self) -> None:
        self.front, self.back = self.back, self.front
        self.live.data = self.front
        self.is_swapped = not self.is_swapped

    def come_home(self) -> None:
        if self.is_swapped and self.live.data_ptr() == self.front.data_ptr():
            self.back.copy_(self.front)
            self.swap()


@dataclass(frozen=True)
class BackLaunch:
    """A launch, and the same launch into the back buffer.

    Attributes:
        planned: as the step would carry it out in place.
        target: into the back buffer, from the present values.
        keys: of all tensors that are stepped.
        versions: how often each present tensor had been written.
    """

    rule: RuleOptimizer
    planned: PlannedLaunch
    target: PlannedLaunch
    keys: list[Key]
    versions: list[int]

    def run(self) -> None:
        """Step into the back buffer. Nothing that is in use is written."""
        self.rule.carry_out(self.target)

    def gives(self, now: PlannedLaunch) -> bool:
        """Whether carrying out ``now`` would give what :attr:`target` gave."""
        then = self.planned
        return (
            _inputs(then) == _inputs(now)
            and all_same(_stepped(then), _stepped(now))
            and self.versions == _versions(now)
        )


class DoubleBuffer:
    """The back buffer of some slots, in one allocation for main params and one for the rest.

    Args:
        pin: page-lock that of main params.
    """

    def __init__(self, transfer: Transfer, pin: bool) -> None:
        self._transfer = transfer
        self._pin = pin
        self._pairs: dict[Key, _Pair] = {}
        self._blocks: dict[bool, Block] = {}

    def reserve(self, live: Mapping[Key, Tensor]) -> None:
        """Plan room for as much again as these tensors have, if there is none yet."""
        for is_main in () if self._blocks else (True, False):
            tensors = [live[key] for key in live if _is_main(key) == is_main]
            allocate = partial(self._transfer.empty_host, pin=self._pin and is_main)
            self._blocks[is_main] = Block(back_buffer_bytes(tensors), allocate)

    @property
    def capacity(self) -> tuple[int, int]:
        """Bytes that it holds as soon as it is used, for main params and for the rest."""
        return self._blocks[True].capacity, self._blocks[False].capacity

    def launches(
        self, rule: RuleOptimizer, launches: Sequence[PlannedLaunch]
    ) -> list[BackLaunch]:
        """Launches into the back buffer; none if a tensor is not contiguous and would be stepped as
        a copy."""
        for planned in launches:
            lists = planned.lists
            if planned.mains is not lists.main or planned.outputs is not lists.output:
                return []
        return [self._launch(rule, planned) for planned in launches]

    def _launch(self, rule: RuleOptimizer, planned: PlannedLaunch) -> BackLaunch:
        keys, live = _keys(planned), _stepped(planned)
        backs = [
            self._pair(key, tensor).back for key, tensor in zip(keys, live, strict=True)
        ]
        count = len(planned.positions)
        main = CachedTensorList(backs[:count])
        state: dict[str, list[Tensor]] = {
            name: CachedTensorList(backs[count * place : count * (place + 1)])
            for place, name in enumerate(planned.lists.state, start=1)
        }
        present = {MAIN: planned.lists.main, **planned.lists.state}
        lists = replace(planned.lists, main=main, state=state, source=present)
        target = planned._replace(mains=main, lists=lists)
        return BackLaunch(
            rule, planned, target, keys, [tensor._version for tensor in live]
        )

    def _pair(self, key: Key, live: Tensor) -> _Pair:
        pair = self._pairs.get(key)
        if pair is not None and pair.fits(live):
            return pair
        form = live.shape, live.dtype
        if pair is not None and (pair.back.shape, pair.back.dtype) == form:
            back = pair.back  # the tensor was replaced: the room for it stays
        else:
            block = self._blocks[_is_main(key)]
            back = block.with_room(back_buffer_bytes([live])).take(*form)
        self._pairs[key] = _Pair(live, live.data, back)
        return self._pairs[key]

    def come_home(self) -> None:
        """Have all tensors be in the memory that they had at first; nothing of the back buffer is
        in use any more."""
        for pair in self._pairs.values():
            pair.come_home()

    def swap(self, keys: Iterable[Key]) -> None:
        """Give these tensors the memory of the back buffer, and it theirs."""
        for key in keys:
            self._pairs[key].swap()


def _is_main(key: Key) -> bool:
    return key[2] == MAIN


def _inputs(planned: PlannedLaunch) -> tuple[object, ...]:
    """What the result depends on beside tensors."""
    updates = planned.updates
    columns = map(list, (updates.streams, updates.shard_groups, updates.layouts))
    return planned.group, planned.positions, planned.settings, planned.launch, *columns


def _stepped(planned: PlannedLaunch) -> list[Tensor]:
    """Main params and moments of a launch."""
    moments = [tensor for tensors in planned.lists.state.values() for tensor in tensors]
    return [*planned.lists.main, *moments]


def _versions(planned: PlannedLaunch) -> list[int]:
    return [tensor._version for tensor in _stepped(planned)]


def _keys(planned: PlannedLaunch) -> list[Key]:
    return [
        (planned.group, position, name)
        for name in (MAIN, *planned.lists.state)
        for position in planned.positions
    ]
