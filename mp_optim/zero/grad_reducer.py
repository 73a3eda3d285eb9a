"""Reduction of gradients: hooks move gradients from autograd into buckets, and collectives add the
gradients of all ranks.

A hook moves a parameter's gradient into the parameter's bucket. When all gradients of a bucket have
arrived, the bucket is reduced: during backward (with ``overlap_grad_reduce`` or ZeRO-2), or at the
step.

All reductions of a process have one order, also across the members of a chain. Members (dense
parameters, experts) often share a communicator, and the backend pairs the n-th collective of one
rank with the n-th of another rank. With separate communicators on one device, NCCL may deadlock if
ranks launch in different orders. So the order must not depend on which gradients a rank has.
"""

from __future__ import annotations

import itertools
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import Variable
from torch.distributed import ProcessGroup
from torch.utils.hooks import RemovableHandle

from mp_optim.config import OptimizerConfig
from mp_optim.host.calls import in_own_modes
from mp_optim.process_groups.agreement import check_agreement
from mp_optim.process_groups.missing_ranks import wait_for_all
from mp_optim.zero.buckets import Entry, FlatBucket
from mp_optim.zero.collectives import Flag, Reduction, all_gather, start_reduction, uses_exchange

_IN_FLIGHT = 2
"""Largest number of reductions in progress during backward, if ZeRO-2 frees gradients or if a
callback waits for reduced gradients. The limit bounds the memory."""
_marks = itertools.count(1)


class GradReducer:
    """Hooks on parameters, and the state of each bucket's gradients, kept for the optimizer's life.

    Args:
        buckets: the buckets, with equal plans on all ranks.
        first_used: for each bucket, the position in the model of the parameter that forward uses
            first. These positions determine the order of reductions.
        config: settings of the reduction.
        group: the ranks that reduce.
        divisor: divisor of averages.
        guard: takes the name of an action and returns a context for collectives. Errors in the
            context name the missing ranks.
        check_use: called when a parameter's gradient arrives in backward.

    Attributes:
        has_gradients: True if a parameter had a gradient since the last :meth:`zero`.
        on_reduced: called with a bucket's index when this rank's shard is complete, possibly during
            backward. None for no call.
        order: order of the reductions; a chain has one order for all of its reducers.
        rounds: number of backward passes that were reduced since :meth:`zero`.
        arrived: for each bucket, the indices of the parameters whose gradient arrived in this
            backward.
        late: name of the first parameter whose gradient arrived after its bucket was reduced; empty
            if there is none since :meth:`zero`.
        synchronizes: False inside :meth:`no_sync`.
    """

    order: LaunchOrder

    def __init__(
        self,
        buckets: list[FlatBucket],
        first_used: Sequence[int],
        config: OptimizerConfig,
        group: ProcessGroup,
        divisor: int,
        guard: Callable[[str], Any],
        check_use: Callable[[Entry], None],
    ) -> None:
        self.buckets, self.group, self._config = buckets, group, config
        self._divisor = divisor if config.grad_reduce_op == "avg" else 1
        strategy = config.data_parallel_sharding_strategy
        # ZeRO-1 keeps gradients until zero_grad(); ZeRO-2 frees them after the reduction.
        self._keeps_grads = strategy != "optim_grads"
        self._replicates = strategy == "no_shard"  # With no_shard every rank receives all sums.
        self._in_backward = config.overlap_grad_reduce or not self._keeps_grads
        self.guard, self._check_use = guard, check_use
        self.on_reduced: Callable[[int], None] | None = None
        self.arrived: list[set[int]] = [set() for _ in buckets]
        # True for a bucket with gradients that were not reduced.
        self._waiting = [False] * len(buckets)
        self._reduced = [False] * len(buckets)
        self._complete = False
        self.first_used, self.synchronizes, self.rounds = first_used, True, 0
        LaunchOrder([self], again=not self._keeps_grads)
        self.has_gradients, self.late = False, ""
        self.bytes_reduced = self.grad_bytes_gathered = 0
        self._entries: dict[int, Entry] = {}  # Keyed by the number of a hook.
        self._watched: dict[int, _Watched] = {}  # Keyed by the id of an entry.
        weakref.finalize(self, _unwatch, self._watched).atexit = False
        for index, bucket in enumerate(buckets):
            for entry in bucket.entries:
                self.watch(index, entry)

    # -- hooks ----------------------------------------------------------------------------------

    def watch(self, index: int, entry: Entry) -> None:
        """Register this reducer's hook on a parameter. The hook of an earlier optimizer on the
        parameter has no effect from now on.

        Args:
            index: index of the bucket.
            entry: the parameter.
        """
        this, param, mark = weakref.ref(self), cast(Any, entry.param), next(_marks)
        # The hook must not refer to the entry, because the entry refers to the parameter.
        self._entries[mark] = entry

        @in_own_modes
        def arrive(tensor: Tensor) -> None:
            reducer = this()
            if reducer is None or getattr(tensor, "reduced_by", None) != mark:
                return
            with reducer.order.arrivals:
                entry = reducer._entries[mark]
                reducer._check_use(entry)
                reducer._collect(index, entry)
                if reducer._in_backward and reducer.synchronizes:
                    reducer.order.arrive(reducer, index, entry.placed.param)

        if (before := self._watched.pop(id(entry), None)) is not None:
            del self._entries[before.mark]
            _unwatch({id(entry): before})
        # A plain number keeps the parameter picklable.
        param.reduced_by = mark
        handle = param.register_post_accumulate_grad_hook(arrive)
        grad = self.buckets[index].local_grad(entry) if self._keeps_grads else None
        if grad is not None:
            param.main_grad = grad
        self._watched[id(entry)] = _Watched(param, handle, mark, grad)

    def _collect(self, index: int, entry: Entry) -> None:
        """Move a parameter's ``grad`` into the parameter's bucket. If the bucket was reduced
        already, drop the gradient.

        A dropped gradient does no harm if ``zero_grad()`` is called before the next step. For
        example, training a GAN's generator leaves gradients on the discriminator.

        Args:
            index: index of the bucket.
            entry: the parameter.

        Raises:
            TypeError: the gradient is sparse.
        """
        grad, bucket = entry.param.grad, self.buckets[index]
        if self._reduced[index] and self._keeps_grads:
            self.late, entry.param.grad = self.late or entry.name, None
            return
        if grad is None:
            return
        self.has_gradients = True
        if grad.layout != torch.strided:
            raise TypeError(
                f"{entry.name}: gradient has layout {grad.layout}, but only dense gradients are "
                "reduced; build the embedding with sparse=False"
            )
        # Megatron's fused kernels set this attribute after they have added the gradient to
        # main_grad, so do not add the gradient again.
        if not getattr(entry.param, "grad_added_to_main_grad", False):
            bucket.local_grad(entry).add_(grad)
        entry.param.grad = None
        self._waiting[index] = True

    def collect_all(self) -> bool:
        """Move gradients that the caller assigned to ``grad`` into their buckets, because no hook
        runs for an assignment.

        Returns:
            True if any bucket has gradients that are not reduced yet.

        Raises:
            RuntimeError: a gradient of this step was dropped, because it arrived after the
                reduction.
        """
        for index, bucket in enumerate(self.buckets):
            for entry in bucket.entries:
                if entry.param.grad is not None:
                    self._collect(index, entry)
        if self.late:
            raise RuntimeError(
                f"{self.late} got a gradient after the gradients of this step were reduced: call "
                "zero_grad() between step() and the next backward; with several backward passes "
                "per step and overlap_grad_reduce=True, run all but the last under no_sync(); "
                "checkpoint activations with use_reentrant=False"
            )
        return not all(self._reduced) or any(self._waiting)

    # -- reducing -------------------------------------------------------------------------------

    @in_own_modes
    def launch(self, index: int) -> None:
        """Start to reduce a bucket with its present gradients. Do nothing if the bucket keeps its
        gradients and was already reduced in this step.

        Args:
            index: index of the bucket.
        """
        if self._keeps_grads and self._reduced[index]:
            return
        bucket, config = self.buckets[index], self._config
        in_fp32 = config.reduce_scatter_with_fp32_accumulation
        exchange = uses_exchange(self.group, bucket.params.device, in_fp32)
        # With no_shard a complete shard is only a part of the gradients until finish() gathers all
        # shards. So do not report the shard.
        announces = self.on_reduced is not None and not self._replicates
        if exchange or not self._keeps_grads or announces:
            self.order.wait(leave=_IN_FLIGHT - 1)
        grads = bucket.local_grads()
        self.bytes_reduced += grads.nbytes
        with self.guard(f"reducing the gradients of {_named(bucket)}"):
            work = start_reduction(
                grads,
                bucket.owned_grads,
                self.group,
                bucket.plan.bounds,
                divisor=self._divisor,
                exchange=exchange,
                add=self._reduced[index],
            )
        if not self._keeps_grads:
            # Drop this reference, so that the memory is freed as soon as the reduction has dropped
            # its own reference.
            bucket.grads = None
        self._reduced[index], self._waiting[index] = True, False
        self._complete = False
        self.rounds += index == 0
        self.order.under_way.append((weakref.proxy(self), index, work))
        if not config.overlap_grad_reduce:
            self.order.wait(leave=len(self.order.under_way) - 1)

    @in_own_modes
    def complete(self, index: int, work: Reduction, is_wanted: bool) -> None:
        """Wait for a reduction, and call :attr:`on_reduced`.

        Args:
            index: index of the bucket.
            work: the reduction.
            is_wanted: False to wait without the call of :attr:`on_reduced`.
        """
        with self.guard(f"reducing the gradients of {_named(self.buckets[index])}"):
            work.wait()
        if is_wanted and self.on_reduced is not None and not self._replicates:
            self.on_reduced(index)

    @in_own_modes
    def finish(self) -> None:
        """Reduce all gradients that arrived since :meth:`zero` and are not reduced yet, and wait.
        Collective. The call also finishes the other reducers of the chain.

        Afterwards this rank's shards are complete. With ``no_shard`` the gradients of all elements
        are complete.
        """
        self.order.finish()
        if self._replicates and not self._complete:
            for bucket in self.buckets:
                self.grad_bytes_gathered += bucket.local_grads().nbytes
                with self.guard(f"gathering the gradients of {_named(bucket)}"):
                    works = all_gather(bucket.local_grads(), bucket.plan.bounds, self.group)
                    wait_for_all(works, self.group, bucket.params.device)
        self._complete = True

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Return a context for backward passes that add to this rank's own gradients and reduce
        nothing."""
        before, self.synchronizes = self.synchronizes, False
        try:
            yield
        finally:
            self.synchronizes = before

    @in_own_modes
    def zero(self) -> None:
        """Set all gradients to zero, after waiting for reductions in progress."""
        self.order.restart()
        for index, bucket in enumerate(self.buckets):
            if not self._keeps_grads:
                # Zeros for this rank's shard are not needed, because the next reduction overwrites
                # the shard.
                bucket.grads = None
            elif bucket.grads is not None:
                bucket.grads.zero_()
            self._reduced[index] = self._waiting[index] = False
            for entry in bucket.entries:
                entry.param.grad = None
        self._complete, self.rounds, self.has_gradients, self.late = False, 0, False, ""
        self.bytes_reduced = self.grad_bytes_gathered = 0


class _Watched(NamedTuple):
    """A parameter with a reducer's hook, and the attributes that the reducer set on the parameter.
    The reference to the parameter is strong, because ``torch.utils.swap_tensors`` refuses
    parameters with weak references."""

    param: Any
    handle: RemovableHandle
    mark: int
    grad: Tensor | None


def _unwatch(watched: dict[int, _Watched]) -> None:
    """Remove a reducer's hooks and attributes from parameters, except attributes that another
    reducer has set since."""
    for param, handle, mark, grad in watched.values():
        handle.remove()
        if getattr(param, "reduced_by", None) == mark:
            del param.reduced_by
            if grad is not None and getattr(param, "main_grad", None) is grad:
                del param.main_grad
    watched.clear()


def _named(bucket: FlatBucket) -> str:
    first, last = bucket.entries[0].name, bucket.entries[-1].name
    return f"the bucket from {first} to {last}"


class LaunchOrder:
    """The order in which the buckets of some reducers are reduced: the bucket that backward
    completes first is reduced first.

    NOTE: if buckets are reduced after every backward pass, a rank does not know the number of
    passes of other ranks. So each pass begins with the reduction of a flag, which a rank in
    backward starts without waiting. At the step, each rank takes part in the passes of other ranks,
    with gradients of zeros, until no rank begins another pass.

    Args:
        members: the reducers, in the same order on all ranks.
        again: True if buckets are reduced after every backward pass; False for once a step.

    Attributes:
        arrivals: lock for the arrival of a gradient, because backward has one thread for each
            device with parameters, and one for the CPU.
        sequence: pairs of a member's index and the index of a bucket of this member, in order.
        under_way: reductions in progress, with their reducers and buckets.
    """

    def __init__(self, members: Sequence[GradReducer], again: bool) -> None:
        places = [
            (-place, number, index)
            for number, member in enumerate(members)
            for index, place in enumerate(member.first_used)
        ]
        # Each reducer refers to its order, so strong references to the reducers would be a cycle.
        self._members: tuple[GradReducer, ...] = tuple(map(weakref.proxy, members))
        self._again = again
        self._groups = tuple(dict.fromkeys(member.group for member in members))
        self._announced: list[Flag] = []
        self.arrivals = threading.Lock()
        self.sequence = [(number, index) for _, number, index in sorted(places)]
        self.under_way: deque[tuple[GradReducer, int, Reduction]] = deque()
        self._next = 0
        self._in_backward = False
        for member in members:
            member.order = self

    def arrive(self, member: GradReducer, index: int, param: int) -> None:
        """Record that a gradient arrived in backward. Then reduce buckets in order, as long as all
        gradients of the next bucket have arrived.

        Args:
            member: the reducer of the gradient.
            index: index of the bucket in this reducer.
            param: index of the parameter.
        """
        if not self._in_backward:  # This is the first gradient of a backward pass.
            self._in_backward = True
            for each in self._members:
                for arrived in each.arrived:
                    arrived.clear()
            Variable._execution_engine.queue_callback(self._end_of_backward)
        member.arrived[index].add(param)
        if not all(each.synchronizes for each in self._members):
            return
        while self._next < len(self.sequence):
            number, index = self.sequence[self._next]
            member = self._members[number]
            if len(member.arrived[index]) < len(member.buckets[index].entries):
                return
            self._launch_next()

    def _end_of_backward(self) -> None:
        """Reduce the remaining buckets. A parameter without a gradient on this rank counts as zero,
        because another rank may have a gradient of the parameter."""
        self._in_backward = False
        if all(member.synchronizes for member in self._members):
            while self._next < len(self.sequence):
                self._launch_next()
            if self._again:  # The next backward pass reduces the same buckets again.
                self._next = 0

    def _launch_next(self) -> None:
        if self._again and self._next == 0:
            with self._members[0].guard("announcing a pass to reduce"):
                self._announced += [Flag(group, True) for group in self._groups]
        number, index = self.sequence[self._next]
        self._members[number].launch(index)
        self._next += 1

    def finish(self) -> None:
        """Reduce all gradients that are not yet reduced, and wait. Collective.

        If buckets are reduced after every backward pass, the ranks first agree whether any rank
        has gradients that are still to be reduced.
        """
        while True:
            of_members = [member.collect_all() for member in self._members]
            left = any(of_members)
            if self._again and self._next > 0:
                left = True  # A backward pass failed. Reduce its remaining buckets.
            elif self._again:
                with self._members[0].guard("asking for another pass to reduce"):
                    for group in self._groups:
                        left = Flag(group, left).wait()
            if not left:
                break
            for number, index in self.sequence[self._next :]:
                self._members[number].launch(index)
            self._next = 0 if self._again else len(self.sequence)
        self.wait()
        self._heard()

    def _heard(self) -> None:
        """Wait for the flags of this rank's backward passes. The wait is short, because all other
        ranks have taken part in these passes by now."""
        if self._announced:
            with self._members[0].guard("announcing a pass to reduce"):
                for flag in self._announced:
                    flag.wait()
            self._announced.clear()

    def restart(self) -> None:
        """Begin another step. Wait for reductions in progress without calling ``on_reduced``,
        because the reduced gradients are cleared next."""
        self.wait(is_wanted=False)
        self._heard()
        self._next, self._in_backward = 0, False

    def wait(self, leave: int = 0, *, is_wanted: bool = True) -> None:
        """Wait for the oldest reductions in progress.

        Args:
            leave: number of reductions that may stay in progress.
            is_wanted: False to wait without calls of ``on_reduced``.
        """
        while len(self.under_way) > leave:
            member, index, work = self.under_way.popleft()
            member.complete(index, work, is_wanted)


def reduce_in_one_order(members: Sequence[GradReducer], again: bool) -> None:
    """Give several reducers one common order. Collective over all of their ranks.

    Args:
        members: the reducers.
        again: True if buckets are reduced after every backward pass.

    Raises:
        ValueError: the order differs between ranks; the message names the ranks.
    """
    order = LaunchOrder(members, again)
    turns = [f"part {number}" for number, _ in order.sequence]
    groups = list(dict.fromkeys(member.group for member in members))
    ranks = [set(dist.get_process_group_ranks(group)) for group in groups]
    for group, members_of in zip(groups, ranks, strict=True):
        # The groups of the members may have different ranks, and then ranks may have different
        # lists of members. Ranks that are in every group have the same list, so compare within a
        # group that is inside all groups. If there is none, compare within every group.
        inside = all(members_of <= other for other in ranks)
        if group.size() > 1 and (inside or not any(all(a <= b for b in ranks) for a in ranks)):
            host, what = torch.device("cpu"), "the order in which gradients are reduced"
            check_agreement((group,), turns, host, f"comparing {what}", what)
