"""The back buffer of main params and moments: a step during backward writes to it, and present
values stay.

Tensors stay the same objects. Publishing a step gives them the memory of the back buffer, and the
memory that they had becomes the back buffer. Nothing has to be undone to discard a step.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

from torch import Tensor

from mp_optim.core import CachedTensorList, all_same
from mp_optim.host.host_memory import Block, TensorSpec, aligned_bytes
from mp_optim.host.leases import give_memory
from mp_optim.host.transfer import Transfer
from mp_optim.kernels.kernel_args import MAIN
from mp_optim.offload.buckets import back_buffer_bytes
from mp_optim.rules.rule import Launch

Key = tuple[int, int, str]
"""Group, position, and which of the slot's tensors: a key of its state, or ``MAIN``."""


@dataclass(slots=True, eq=False)
class _BufferedTensor:
    """A tensor in use, the memory it has, and as much memory again."""

    live: Tensor
    front: Tensor
    back: Tensor

    def fits(self, live: Tensor) -> bool:
        memory = live.data_ptr(), live.shape
        return live is self.live and memory == (self.front.data_ptr(), self.front.shape)

    def swap(self) -> None:
        self.front, self.back = self.back, self.front
        give_memory(self.live, self.front)


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
    """The back buffer of some slots: one allocation of host memory for main params and one for
    state.

    Args:
        transfer: allocates host memory.
        pin: True to page-lock the memory of main params.
    """

    def __init__(self, transfer: Transfer, pin: bool = False) -> None:
        self._transfer, self._pin = transfer, pin
        self._blocks: dict[bool, Block] = {}
        self._buffered: dict[Key, _BufferedTensor] = {}

    def reserve(self, live: Mapping[Key, Tensor]) -> tuple[int, int]:
        """Plan host memory for copies of these tensors, unless it is planned. Return the bytes that
        it takes after its first use, for main params and for state."""
        for is_main in () if self._blocks else (True, False):
            tensors = [live[key] for key in live if _is_main(key) == is_main]
            allocate = partial(self._transfer.empty_host, pin=self._pin and is_main)
            self._blocks[is_main] = Block(back_buffer_bytes(tensors), allocate)
        return self._blocks[True].capacity, self._blocks[False].capacity

    @property
    def allocated(self) -> int:
        """Bytes of host memory that the back buffer takes now."""
        return sum(block.allocated for block in self._blocks.values())

    def launches(self, launches: Sequence[Launch]) -> list[BackLaunch]:
        """Return launches into the back buffer; none if a tensor is not contiguous and would be
        stepped as a copy."""
        for planned in launches:
            lists = planned.lists
            if planned.mains is not lists.main or planned.outputs is not lists.output:
                return []
        return [self._launch(planned) for planned in launches]

    def _launch(self, planned: Launch) -> BackLaunch:
        names, live = (MAIN, *planned.lists.state), _stepped(planned)
        keys = [(planned.group, where, name) for name in names for where in planned.positions]
        backs = [self._pair(key, each).back for key, each in zip(keys, live, strict=True)]
        count = len(planned.positions)
        main = CachedTensorList(backs[:count])
        state: dict[str, list[Tensor]] = {
            name: CachedTensorList(backs[count * place : count * (place + 1)])
            for place, name in enumerate(planned.lists.state, start=1)
        }
        present = {MAIN: planned.lists.main, **planned.lists.state}
        lists = replace(planned.lists, main=main, state=state, source=present, prepared=None)
        target = planned._replace(mains=main, lists=lists)
        return BackLaunch(planned, target, keys, [tensor._version for tensor in live])

    def _pair(self, key: Key, live: Tensor) -> _BufferedTensor:
        pair = self._buffered.get(key)
        if pair is not None and pair.fits(live):
            return pair
        form = live.shape, live.dtype
        if pair is not None and (pair.back.shape, pair.back.dtype) == form:
            # The tensor was replaced: the room for it stays. Where a swap was interrupted, the
            # tensor has either of the two.
            back = pair.front if pair.back.data_ptr() == live.data_ptr() else pair.back
        else:
            back = self._take(_is_main(key), form)
        self._buffered[key] = _BufferedTensor(live, live.data, back)
        return self._buffered[key]

    def _take(self, is_main: bool, form: TensorSpec) -> Tensor:
        """Return memory for the back buffer of a main param, or of other state."""
        shape, dtype = form
        size = aligned_bytes(shape.numel(), dtype)
        return self._blocks[is_main].with_room(size).take(shape, dtype)

    def swap(self, keys: Iterable[Key]) -> None:
        """Give these tensors the memory of the back buffer, and it theirs."""
        for key in keys:
            self._buffered[key].swap()


def _is_main(key: Key) -> bool:
    return key[2] == MAIN


def _inputs(planned: Launch) -> tuple[object, ...]:
    """Return the inputs of a launch other than tensors."""
    plan = planned.updates.slots
    columns = map(list, (plan.streams, plan.shard_groups, plan.layouts))
    shared = planned.device, planned.step, planned.multiplier, list(planned.lists.state)
    return planned.group, planned.positions, planned.settings, shared, *columns


def _stepped(planned: Launch) -> list[Tensor]:
    """Return main params and moments of a launch."""
    moments = [tensor for tensors in planned.lists.state.values() for tensor in tensors]
    return [*planned.lists.main, *moments]
