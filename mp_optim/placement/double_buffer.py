"""The back buffer of main params and moments: a step is written there, present values stay.

Tensors stay the same objects. Publishing a step gives them the memory of the back buffer, and the
memory they had becomes the back buffer; taking a step back is doing nothing. While a background
save reads one of the two, there is a third.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

from torch import Tensor

from mp_optim.placement.host_bytes import back_buffer_bytes
from mp_optim.placement.third_half import MemoryMaker, ThirdHalf
from mp_optim.process.host_memory import Block
from mp_optim.process.leases import (
    before_moving,
    before_writing,
    is_borrowed,
    is_lending,
)
from mp_optim.process.transfer import Transfer
from mp_optim.slots import CachedTensorList, all_same
from mp_optim.update.kernel_args import MAIN
from mp_optim.update.launches import PlannedLaunch
from mp_optim.update.rule import RuleOptimizer

Key = tuple[int, int, str]
"""Group, position, and which of the slot's tensors: a key of its state, or ``MAIN``."""


@dataclass(slots=True, eq=False)
class _Pair:
    """A tensor in use, the memory it has, and as much again.

    NOTE: while a background save reads what would be the back, it lies aside and a third memory is
    in its place. Which of the three goes when the save has read is known by :attr:`third`; none
    goes while the tensor is in it.

    Attributes:
        home: the memory that the tensor had at first.
        coming: has room for a third, should the next step need it.
        third: the memory that came in addition.
        aside: which of the three is neither written nor in use; None as long as there are two.
    """

    live: Tensor
    front: Tensor
    back: Tensor
    home: Tensor
    coming: ThirdHalf | None = None
    third: Tensor | None = None
    aside: Tensor | None = None

    def fits(self, live: Tensor) -> bool:
        memory = live.data_ptr(), live.shape
        return live is self.live and memory == (self.front.data_ptr(), self.front.shape)

    def swap(self) -> None:
        before_moving(self.front)
        self.front, self.back = self.back, self.front
        self.live.data = self.front

    def avoid_borrowed(self) -> None:
        """Have the back be memory that no save reads, if there is some; let go of the third as soon
        as no save reads the other two."""
        if is_borrowed(self.back):
            if self.aside is None and self.coming is not None:
                self.aside = self.third = self.coming.like(self.back)
            if self.aside is not None:
                self.back, self.aside = self.aside, self.back
        if self.aside is not None and not is_borrowed(self.aside):
            if self.back is self.third:
                self.back, self.aside = self.aside, self.back
            if self.aside is self.third:
                self.aside = self.third = None

    @property
    def has_third(self) -> bool:
        """Whether there is a third memory, or may be at the next step."""
        return self.third is not None or self.coming is not None

    @property
    def needs_third(self) -> bool:
        """Whether the step after the next would write what a save reads now."""
        return not self.has_third and is_borrowed(self.front)

    def come_home(self) -> None:
        """Have the tensor be where it was at first."""
        if self.front is self.home or self.live.data_ptr() != self.front.data_ptr():
            return
        if self.aside is self.home:
            self.back, self.aside = self.aside, self.back
        before_writing([self.home])
        self.home.copy_(self.front)
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
        maker: makes more of it while a save reads one half.
    """

    def __init__(self, transfer: Transfer, pin: bool, maker: MemoryMaker) -> None:
        self._transfer = transfer
        self._pin = pin
        self._maker = maker
        self._pairs: dict[Key, _Pair] = {}
        self._blocks: dict[bool, Block] = {}
        self._has_thirds = False

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
        pairs = {
            key: self._pair(key, live) for key, live in zip(keys, live, strict=True)
        }
        self._avoid_borrowed(pairs)
        backs = [pair.back for pair in pairs.values()]
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
        front = live.data
        self._pairs[key] = _Pair(live, front, back, home=front)
        return self._pairs[key]

    def _avoid_borrowed(self, pairs: Mapping[Key, _Pair]) -> None:
        """See to it that a step into the backs writes nothing that a save reads, nor the step after
        that one."""
        if not (is_lending() or self._has_thirds):
            return
        for pair in pairs.values():
            pair.avoid_borrowed()
        if is_lending():
            for is_main in (True, False):
                same = [pairs[key] for key in pairs if _is_main(key) == is_main]
                self._ask_third([pair for pair in same if pair.needs_third], is_main)
        else:
            for pair in self._pairs.values():
                pair.coming = None
        self._has_thirds = any(pair.has_third for pair in self._pairs.values())

    def _ask_third(self, pairs: Sequence[_Pair], is_main: bool) -> None:
        if pairs:
            fronts = [pair.front for pair in pairs]
            third = ThirdHalf(self._maker, fronts, self._pin and is_main)
            for pair in pairs:
                pair.coming = third

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
