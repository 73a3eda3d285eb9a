"""The spare of main params and moments: a step ahead is written there, present values stay.

Tensors stay the same objects. Publishing a step gives them the memory of the spare, and the memory
they had becomes the spare; taking a step back is doing nothing. Where state rests in host memory,
the spare is a back buffer, and while a background save reads one of the two, there is a third:

A step that is about to write the memory that is read would have to copy it first, all at once and
into memory that the system still has to give. Instead it writes the third, which a thread made
ready during the step before.

Where state rests in a file, the spare is as much of the file again, and a save is given copies.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from functools import partial

from torch import Tensor

from mp_optim.core import CachedTensorList, all_same
from mp_optim.host.calls import in_background
from mp_optim.host.host_memory import Block, TensorSpec, aligned_bytes, touch
from mp_optim.host.leases import borrows, give_memory, is_borrowed
from mp_optim.host.transfer import Transfer
from mp_optim.kernels.kernel_args import MAIN
from mp_optim.offload.buckets import back_buffer_bytes
from mp_optim.offload.state_file import StateFile
from mp_optim.rules.rule import Launch

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
        coming: gives a third memory, should the next step need it.
        third: the memory that came in addition.
        aside: which of the three is neither written nor in use; None as long as there are two.
    """

    live: Tensor
    front: Tensor
    back: Tensor
    home: Tensor
    coming: Callable[[Tensor], Tensor | None] | None = None
    third: Tensor | None = None
    aside: Tensor | None = None

    def fits(self, live: Tensor) -> bool:
        memory = live.data_ptr(), live.shape
        return live is self.live and memory == (self.front.data_ptr(), self.front.shape)

    def swap(self) -> None:
        self.front, self.back = self.back, self.front
        give_memory(self.live, self.front)

    def avoid_borrowed(self) -> None:
        """Have the back be memory that no save reads, if there is some; let go of the third as soon
        as no save reads the other two."""
        if is_borrowed(self.back):
            if self.aside is None and self.coming is not None:
                self.aside = self.third = self.coming(self.back)
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

    def restore(self) -> None:
        """Have the tensor be where it was at first."""
        if self.front is self.home or self.live.data_ptr() != self.front.data_ptr():
            return
        if self.aside is self.home:
            self.back, self.aside = self.aside, self.back
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

    planned: Launch
    target: Launch
    keys: list[Key]
    versions: list[int]

    def gives(self, now: Launch) -> bool:
        """Whether carrying out ``now`` would give what :attr:`target` gave."""
        then = self.planned
        return (
            _inputs(then) == _inputs(now)
            and all_same(_stepped(then), _stepped(now))
            and self.versions == [tensor._version for tensor in _stepped(now)]
        )


class DoubleBuffer:
    """The spare of some slots. In host memory it is one allocation for main params and one for the
    rest; in a file as much of that again, of which a save is given copies.

    Args:
        room: the file; or what host memory comes from, and more of it while a save reads one half.
        pin: page-lock the memory of main params.
    """

    def __init__(self, room: MemoryMaker | StateFile, pin: bool = False) -> None:
        self._room, self._pin = room, pin
        self._blocks: dict[bool, Block] = {}
        self._pairs: dict[Key, _Pair] = {}
        self._has_thirds = False

    def forget(self) -> None:
        """Something may still write to the spare: make another one."""
        self._pairs.clear()

    def reserve(self, live: Mapping[Key, Tensor]) -> tuple[int, int]:
        """Plan host memory for as much again as these tensors have, if that is not done yet. The
        bytes that it takes as soon as it is used, for main params and for the rest."""
        assert isinstance(self._room, MemoryMaker)
        for is_main in () if self._blocks else (True, False):
            tensors = [live[key] for key in live if _is_main(key) == is_main]
            allocate = partial(self._room.transfer.empty_host, pin=self._pin and is_main)
            self._blocks[is_main] = Block(back_buffer_bytes(tensors), allocate)
        return self._blocks[True].capacity, self._blocks[False].capacity

    def launches(self, launches: Sequence[Launch]) -> list[BackLaunch]:
        """Launches into the spare; none if a tensor does not rest in the file of which this is a
        part, or is not contiguous and would be stepped as a copy."""
        for planned in launches:
            lists = planned.lists
            if planned.mains is not lists.main or planned.outputs is not lists.output:
                return []
            if isinstance(file := self._room, StateFile):
                some = filter(Tensor.numel, _stepped(planned))
                if any(file.offset_of(each) is None for each in some):
                    return []
        return [self._launch(planned) for planned in launches]

    def _launch(self, planned: Launch) -> BackLaunch:
        names, live = (MAIN, *planned.lists.state), _stepped(planned)
        keys = [(planned.group, where, name) for name in names for where in planned.positions]
        pairs = {key: self._pair(key, live) for key, live in zip(keys, live, strict=True)}
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
        return BackLaunch(planned, target, keys, [tensor._version for tensor in live])

    def _pair(self, key: Key, live: Tensor) -> _Pair:
        pair = self._pairs.get(key)
        if pair is not None and pair.fits(live):
            return pair
        form = live.shape, live.dtype
        if pair is not None and (pair.back.shape, pair.back.dtype) == form:
            # The tensor was replaced: the room for it stays. Where a swap was interrupted, the
            # tensor has either of the two.
            back = pair.front if pair.back.data_ptr() == live.data_ptr() else pair.back
        else:
            back = self._take(_is_main(key), form)
        front = live.data
        self._pairs[key] = _Pair(live, front, back, home=front)
        return self._pairs[key]

    def _take(self, is_main: bool, form: TensorSpec) -> Tensor:
        """Memory for the spare of a main param, or of other state."""
        if isinstance(self._room, StateFile):
            return self._room.take(*form)
        shape, dtype = form
        size = aligned_bytes(shape.numel(), dtype)
        return self._blocks[is_main].with_room(size).take(shape, dtype)

    def _avoid_borrowed(self, pairs: Mapping[Key, _Pair]) -> None:
        """See to it that a step into the backs writes nothing that a save reads, nor the step after
        that one."""
        if not (borrows or self._has_thirds) or isinstance(self._room, StateFile):
            return
        for pair in pairs.values():
            pair.avoid_borrowed()
        if borrows:
            for is_main in (True, False):
                same = [pairs[key] for key in pairs if _is_main(key) == is_main]
                # The step after the next would write what a save reads now.
                read = [pair for pair in same if not pair.has_third and is_borrowed(pair.front)]
                if read:
                    fronts, pin = [pair.front for pair in read], self._pin and is_main
                    third = self._room.room_for(fronts, pin)
                    for pair in read:
                        pair.coming = third
        else:
            for pair in self._pairs.values():
                pair.coming = None
        self._has_thirds = any(pair.has_third for pair in self._pairs.values())

    def restore(self) -> None:
        """Have all tensors be in the memory that they had at first; nothing of the back buffer is
        in use any more."""
        for pair in self._pairs.values():
            pair.restore()

    def swap(self, keys: Iterable[Key]) -> None:
        """Give these tensors the memory of the back buffer, and it theirs."""
        for key in keys:
            self._pairs[key].swap()


def _is_main(key: Key) -> bool:
    return key[2] == MAIN


def _inputs(planned: Launch) -> tuple[object, ...]:
    """What the result depends on beside tensors."""
    updates = planned.updates
    columns = map(list, (updates.streams, updates.shard_groups, updates.layouts))
    shared = planned.device, planned.step, planned.multiplier, list(planned.lists.state)
    return planned.group, planned.positions, planned.settings, shared, *columns


def _stepped(planned: Launch) -> list[Tensor]:
    """Main params and moments of a launch."""
    moments = [tensor for tensors in planned.lists.state.values() for tensor in tensors]
    return [*planned.lists.main, *moments]


class MemoryMaker:
    """Asks the system for memory in one thread, a piece at a time.

    Args:
        transfer: whose memory.
    """

    def __init__(self, transfer: Transfer) -> None:
        self.transfer = transfer
        self._lock = threading.Lock()
        self._asked: deque[tuple[Future[Tensor], int, bool]] = deque()
        self._is_making = False

    def room_for(self, tensors: Iterable[Tensor], pin: bool) -> Callable[[Tensor], Tensor | None]:
        """Ask for room for tensors that are like these, whose pages are there.

        Returns:
            Gives memory for a tensor of this shape and dtype; waits until it is made. None if there
            is none left, or the system gave none.
        """
        size = back_buffer_bytes(tensors)
        made: Future[Tensor] = Future()
        with self._lock:
            self._asked.append((made, size, pin))
            begins, self._is_making = not self._is_making, True
        if begins:
            in_background(self._make)
        block = Block(size, lambda _: made.result())

        def like(tensor: Tensor) -> Tensor | None:
            if back_buffer_bytes([tensor]) > block.left or made.exception() is not None:
                return None
            return block.take(tensor.shape, tensor.dtype)

        return like

    def _make(self) -> None:
        while (asked := self._next()) is not None:
            made, num_bytes, pin = asked
            try:
                memory = self.transfer.empty_host(num_bytes, pin)
                touch(memory)
            except BaseException as error:  # whoever waits for it copies instead
                made.set_exception(error)
            else:
                made.set_result(memory)

    def _next(self) -> tuple[Future[Tensor], int, bool] | None:
        with self._lock:
            self._is_making = bool(self._asked)
            return self._asked.popleft() if self._asked else None
