"""One order for all reductions of a process, whichever part of the optimizer they belong to.

Parts (dense parameters, experts) often share a communicator, where the n-th collective of one rank
meets the n-th of another; and where they do not, communicators that share a device may wait for
each other if ranks launch in different orders (NCCL). Which gradients a rank has must therefore not
decide what is launched first.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence
from typing import Protocol

import torch
import torch.distributed as dist
from torch.autograd import Variable
from torch.distributed import ProcessGroup

from mp_optim.distributed.collectives import Reduction
from mp_optim.ranks.agreement import check_agreement

_IN_FLIGHT = 2
"""Buckets whose reduction may be under way while their gradients are not kept, which is the memory
that ZeRO-2 takes, or while their completion is to be told during backward."""


class Member(Protocol):
    """What takes part in an order: see :class:`~mp_optim.distributed.grad_reducer.GradReducer`."""

    order: LaunchOrder

    @property
    def first_used(self) -> Sequence[int]: ...
    @property
    def group(self) -> ProcessGroup: ...
    @property
    def synchronizes(self) -> bool: ...
    def begin_backward(self) -> None: ...
    def is_full(self, index: int) -> bool: ...
    def is_due(self, index: int) -> bool: ...
    def collect_all(self) -> bool: ...
    def launch(self, index: int) -> None: ...
    def wait_for(self, index: int, work: Reduction) -> None: ...
    def complete(self, index: int, work: Reduction) -> None: ...


class LaunchOrder:
    """The buckets of some members, that which backward completes first coming first.

    Args:
        members: each with its buckets' places in the model, the same on all ranks.
        again: whether buckets are reduced after every backward pass, rather than once a step.

    Attributes:
        arrivals: held by the thread in which a gradient arrives; backward has one for each device
            that has parameters, and one for the CPU.
    """

    def __init__(self, members: Sequence[Member], again: bool) -> None:
        places = [
            (place, part, index)
            for part, member in enumerate(members)
            for index, place in enumerate(member.first_used)
        ]
        self._members, self._again = tuple(members), again
        self.arrivals = threading.Lock()
        self._sequence = [
            (part, index)
            for _, part, index in sorted(places, key=lambda item: (-item[0], *item[1:]))
        ]
        self._under_way: deque[tuple[Member, int, Reduction]] = deque()
        self._next = 0
        self._in_backward = False
        for member in members:
            member.order = self

    @property
    def pattern(self) -> list[str]:
        """Whose turn it is, turn by turn."""
        return [f"part {part}" for part, _ in self._sequence]

    @property
    def _synchronizes(self) -> bool:
        return all(member.synchronizes for member in self._members)

    def arrives(self) -> None:
        """A gradient is about to arrive in backward."""
        if not self._in_backward:
            self._in_backward = True
            for member in self._members:
                member.begin_backward()
            Variable._execution_engine.queue_callback(self._end_of_backward)

    def advance(self) -> None:
        """Reduce what is full, up to the first bucket that is not."""
        if not self._synchronizes:
            return
        while self._next < len(self._sequence):
            part, index = self._sequence[self._next]
            if not self._members[part].is_full(index):
                return
            self._members[part].launch(index)
            self._next += 1

    def _end_of_backward(self) -> None:
        """Reduce what is left, with zeros for parameters that this rank did not use: others may."""
        self._in_backward = False
        if self._synchronizes:
            self._launch_rest()

    def _launch_rest(self) -> None:
        while self._next < len(self._sequence):
            part, index = self._sequence[self._next]
            if self._members[part].is_due(index):
                self._members[part].launch(index)
            self._next += 1
        if self._again:  # another backward may follow, and add to what is owned
            self._next = 0

    def finish(self) -> None:
        """Reduce what has not been reduced, and wait. Collective."""
        left = [member.collect_all() for member in self._members]
        if any(left):
            self._launch_rest()
        self.wait()

    def restart(self) -> None:
        """The next gradients are another step's. Waits for what is under way, and tells nobody: a
        gradient that is about to be cleared is not to be worked on."""
        while self._under_way:
            member, index, work = self._under_way.popleft()
            member.wait_for(index, work)
        self._next, self._in_backward = 0, False

    # -- what is under way ----------------------------------------------------------------------

    def make_room(self) -> None:
        """Wait until one more reduction may be under way."""
        while len(self._under_way) >= _IN_FLIGHT:
            self.wait_for_one()

    def started(self, member: Member, index: int, work: Reduction) -> None:
        """A member has launched a bucket."""
        self._under_way.append((member, index, work))

    def wait_for_one(self) -> None:
        """Wait for the oldest reduction."""
        member, index, work = self._under_way.popleft()
        member.complete(index, work)

    def wait(self) -> None:
        """Wait for all."""
        while self._under_way:
            self.wait_for_one()


def reduce_in_one_order(members: Sequence[Member], again: bool) -> None:
    """Let members share an order. Collective, of all their ranks.

    Raises:
        ValueError: ranks would take turns differently, naming them.
    """
    order = LaunchOrder(members, again)
    groups = list(dict.fromkeys(member.group for member in members))
    ranks = [set(dist.get_process_group_ranks(group)) for group in groups]
    for group, members_of in zip(groups, ranks, strict=True):
        # Ranks of a group inside all others see the same parts; those outside may have other
        # parts of their own between the common ones.
        inside = all(members_of <= other for other in ranks)
        if group.size() > 1 and (
            inside or not any(all(a <= b for b in ranks) for a in ranks)
        ):
            host, what = torch.device("cpu"), "the order in which gradients are reduced"
            check_agreement((group,), order.pattern, host, f"comparing {what}", what)
