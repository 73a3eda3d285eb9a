"""Reduction of gradients: from autograd into buckets, and from the buckets to the ranks that own
them.

A hook moves a parameter's gradient into its bucket. When all gradients of a bucket have arrived,
the bucket is reduced: during backward (with ``overlap_grad_reduce`` or ZeRO-2), or at the step.

All reductions of a process have one order, also across the members of a chain. Members (dense
parameters, experts) often share a communicator, in which the n-th collective of one rank meets the
n-th of another. With separate communicators on one device, NCCL may deadlock if ranks launch in
different orders. So the order must not depend on the gradients that a rank has.

The ranks alone determine the order in which gradients are added, in one of two ways:

- Exchange: each rank sends every other rank its shard. The owner adds in FP32 in the order of
  ranks, and rounds once. The bits are the same on any backend. gloo supports only this way.
- Collective: the backend's reduce-scatter (NCCL). It needs no memory to receive. Its order of
  additions is its own, but always the same for the same bucket.
"""

from __future__ import annotations

import itertools
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import Variable
from torch.distributed import ProcessGroup
from torch.utils.hooks import RemovableHandle

from mp_optim.config import OptimizerConfig
from mp_optim.core.param_attributes import (
    adds_to_main_grad,
    reducer_of,
    set_main_grad,
    set_reducer,
    unset_reducer,
)
from mp_optim.host.calls import in_own_modes
from mp_optim.kernels.chunking import piece_elements
from mp_optim.process_groups.agreement import check_agreement
from mp_optim.process_groups.missing_ranks import start_collective, wait_for, wait_for_all
from mp_optim.zero.buckets import Entry, FlatBucket

_IN_FLIGHT = 2
"""Most reductions in progress during backward, if gradients are not kept (ZeRO-2) or if their
completion is announced. This bounds the memory."""
_marks = itertools.count(1)


class GradReducer:
    """Hooks on parameters, and the state of each bucket's gradients, kept for the optimizer's life.

    Args:
        buckets: the buckets, alike on all ranks.
        first_used: for each bucket, the position in the model of the parameter that forward uses
            first; it determines the order of reductions.
        config: settings of the reduction.
        group: the ranks that reduce.
        divisor: divisor of averages.
        guard: takes the name of an action and returns a context for its collectives, in which
            errors name the missing ranks.
        check_use: called when a parameter's gradient arrives in backward.

    Attributes:
        has_gradients: True if a parameter had a gradient since the last :meth:`zero`.
        on_reduced: called with a bucket's index when this rank's shard is complete, possibly during
            backward. None for no call.
        order: order of the reductions; a chain has one order for all of its reducers.
        rounds: number of backward passes that were reduced since :meth:`zero`.
        arrived: for each bucket, the indices of the parameters whose gradient arrived in this
            backward.
        late: name of the first parameter whose gradient arrived after its bucket was reduced, until
            :meth:`zero`; else empty.
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
        self._entries: dict[int, Entry] = {}  # The mark of a hook finds its entry.
        self._watched: dict[int, _Watched] = {}  # The id of an entry finds its parameter.
        weakref.finalize(self, _unwatch, self._watched).atexit = False
        for index, bucket in enumerate(buckets):
            for entry in bucket.entries:
                self.watch(index, entry)

    # -- hooks ----------------------------------------------------------------------------------

    def watch(self, index: int, entry: Entry) -> None:
        """Register the hook on a parameter. A hook of an earlier optimizer has no effect after
        this.

        Args:
            index: index of the bucket.
            entry: the parameter.
        """
        this, param, mark = weakref.ref(self), cast(Any, entry.param), next(_marks)
        self._entries[mark] = (
            # The hook must not refer to the entry, because the entry refers to the parameter.
            entry
        )

        def arrive(tensor: Tensor) -> None:
            reducer = this()
            if reducer is not None and reducer_of(tensor) == mark:
                with reducer.order.arrivals:
                    reducer._arrive(index, reducer._entries[mark])

        if (before := self._watched.pop(id(entry), None)) is not None:
            del self._entries[before.mark]
            _unwatch({id(entry): before})
        set_reducer(param, mark)
        handle = param.register_post_accumulate_grad_hook(arrive)
        grad = self.buckets[index].local_grad(entry) if self._keeps_grads else None
        if grad is not None:
            set_main_grad(param, grad)
        self._watched[id(entry)] = _Watched(param, handle, mark, grad)

    @in_own_modes
    def _arrive(self, index: int, entry: Entry) -> None:
        self._check_use(entry)
        self._collect(index, entry)
        if self._in_backward and self.synchronizes:
            self.order.begin_backward()
            self.arrived[index].add(entry.placed.param)
            self.order.advance()

    def _collect(self, index: int, entry: Entry) -> None:
        """Move a parameter's ``grad`` into its bucket. If the bucket was reduced already, drop the
        gradient.

        A dropped gradient does no harm if ``zero_grad()`` is called before the next step. A GAN's
        generator gives such gradients to its discriminator.

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
        if not adds_to_main_grad(entry.param):
            bucket.local_grad(entry).add_(grad)
        entry.param.grad = None
        self._waiting[index] = True

    def collect_all(self) -> bool:
        """Move gradients into their buckets that no hook has seen, because the caller assigned
        ``grad``. Return True if any bucket is still to be reduced.

        Raises:
            RuntimeError: a gradient of this step was dropped.
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
        # If all shards are gathered later, a complete shard is only a part, so it is not announced.
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
            # The reduction keeps the gradients alive for as long as it needs them.
            bucket.grads = None
        self._reduced[index], self._waiting[index] = True, False
        self._complete = False
        self.rounds += index == 0
        self.order.under_way.append((weakref.proxy(self), index, work))
        if not config.overlap_grad_reduce:
            self.order.wait(leave=len(self.order.under_way) - 1)

    @in_own_modes
    def complete(self, index: int, work: Reduction, *, is_wanted: bool = True) -> None:
        """Wait for a reduction, and call :attr:`on_reduced`.

        Args:
            index: index of the bucket.
            work: the reduction.
            is_wanted: False for no call of :attr:`on_reduced`.
        """
        with self.guard(f"reducing the gradients of {_named(self.buckets[index])}"):
            work.wait()
        if is_wanted and self.on_reduced is not None and not self._replicates:
            self.on_reduced(index)

    @in_own_modes
    def finish(self) -> None:
        """Reduce all gradients that are not yet reduced since :meth:`zero`, and wait. Collective;
        includes all reducers that share the order.

        Afterwards this rank's shards are complete, or with ``no_shard`` all gradients are.
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
        """Return a context for backward passes that reduce nothing, and only add to this rank's own
        gradients."""
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
                # The next reduction overwrites this rank's shard, so it needs no zeros.
                bucket.grads = None
            elif bucket.grads is not None:
                bucket.grads.zero_()
            self._reduced[index] = self._waiting[index] = False
            for entry in bucket.entries:
                entry.param.grad = None
        self._complete, self.rounds, self.has_gradients, self.late = False, 0, False, ""
        self.bytes_reduced = self.grad_bytes_gathered = 0


class _Watched(NamedTuple):
    """A parameter with a reducer's hook, and the attributes that the reducer set on it. The
    reference is strong, because ``torch.utils.swap_tensors`` refuses parameters with weak
    references."""

    param: Any
    handle: RemovableHandle
    mark: int
    grad: Tensor | None


def _unwatch(watched: dict[int, _Watched]) -> None:
    """Remove hooks and attributes from parameters. Attributes that another reducer has set since
    stay."""
    for param, handle, mark, grad in watched.values():
        handle.remove()
        if reducer_of(param) == mark:
            unset_reducer(param, grad)
    watched.clear()


def _named(bucket: FlatBucket) -> str:
    first, last = bucket.entries[0].name, bucket.entries[-1].name
    return f"the bucket from {first} to {last}"


class LaunchOrder:
    """The order in which the buckets of some reducers are reduced. The bucket that backward
    completes first is the first.

    NOTE: if buckets are reduced after every backward pass, a rank does not know how many passes the
    other ranks have. So each pass begins with the reduction of one flag, which a rank in backward
    starts without waiting. At the step, each rank takes part in further passes, with zeros, until
    no rank begins another.

    Args:
        members: the reducers, in the same order on all ranks.
        again: True if buckets are reduced after every backward pass; False for once a step.

    Attributes:
        arrivals: lock for the arrival of a gradient, because backward has one thread for each
            device with parameters, and one for the CPU.
        sequence: pairs of a member's index and the index of its bucket, in order.
        under_way: reductions in progress, with their reducers and buckets.
    """

    def __init__(self, members: Sequence[GradReducer], again: bool) -> None:
        places = [
            (-place, number, index)
            for number, member in enumerate(members)
            for index, place in enumerate(member.first_used)
        ]
        # The references are weak, because each member keeps its order.
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

    def begin_backward(self) -> None:
        """Prepare for the gradients of a backward pass, when its first gradient arrives."""
        if not self._in_backward:
            self._in_backward = True
            for member in self._members:
                for arrived in member.arrived:
                    arrived.clear()
            Variable._execution_engine.queue_callback(self._end_of_backward)

    def advance(self) -> None:
        """Reduce buckets in order, as long as all gradients of the next bucket have arrived."""
        if not all(member.synchronizes for member in self._members):
            return
        while self._next < len(self.sequence):
            number, index = self.sequence[self._next]
            member = self._members[number]
            if len(member.arrived[index]) < len(member.buckets[index].entries):
                return
            self._launch_next()

    def _end_of_backward(self) -> None:
        """Reduce the remaining buckets. A parameter without a gradient on this rank counts as zero,
        because another rank may have a gradient of it."""
        self._in_backward = False
        if all(member.synchronizes for member in self._members):
            while self._next < len(self.sequence):
                self._launch_next()
            self._end_of_round()

    def _launch_next(self) -> None:
        if self._again and self._next == 0:
            with self._members[0].guard("announcing a pass to reduce"):
                self._announced += [Flag(group, True) for group in self._groups]
        number, index = self.sequence[self._next]
        self._members[number].launch(index)
        self._next += 1

    def _end_of_round(self) -> None:
        # Start from the first bucket again, because another backward may add to the same shards.
        if self._again:
            self._next = 0

    def finish(self) -> None:
        """Reduce all gradients that are not yet reduced, and wait. Collective."""
        while self._is_anything_left():
            for number, index in self.sequence[self._next :]:
                self._members[number].launch(index)
            self._next = len(self.sequence)
            self._end_of_round()
        self.wait()
        self._heard()

    def _heard(self) -> None:
        """Wait for this rank's flags. All other ranks have answered them by now."""
        if self._announced:
            with self._members[0].guard("announcing a pass to reduce"):
                for flag in self._announced:
                    flag.wait()
            self._announced.clear()

    def _is_anything_left(self) -> bool:
        """True if this rank has gradients to reduce; or if any rank has, when every backward pass
        is reduced."""
        of_members = [member.collect_all() for member in self._members]
        left = any(of_members)
        if not self._again:
            return left
        if self._next > 0:  # A backward that failed may have started the pass, so finish it.
            return True
        with self._members[0].guard("asking for another pass to reduce"):
            for group in self._groups:
                left = Flag(group, left).wait()
        return left

    def restart(self) -> None:
        """Begin another step. Wait for reductions in progress, but do not report them as complete,
        because their gradients are cleared next."""
        while self.under_way:
            member, index, work = self.under_way.popleft()
            member.complete(index, work, is_wanted=False)
        self._heard()
        self._next, self._in_backward = 0, False

    def wait(self, leave: int = 0) -> None:
        """Wait for the oldest reductions.

        Args:
            leave: number of reductions that may stay in progress.
        """
        while len(self.under_way) > leave:
            member, index, work = self.under_way.popleft()
            member.complete(index, work)


def reduce_in_one_order(members: Sequence[GradReducer], again: bool) -> None:
    """Give several reducers one common order. Collective over all of their ranks.

    Args:
        members: the reducers.
        again: True if buckets are reduced after every backward pass.

    Raises:
        ValueError: the order differs between ranks; the message names them.
    """
    order = LaunchOrder(members, again)
    turns = [f"part {number}" for number, _ in order.sequence]
    groups = list(dict.fromkeys(member.group for member in members))
    ranks = [set(dist.get_process_group_ranks(group)) for group in groups]
    for group, members_of in zip(groups, ranks, strict=True):
        # Only ranks that are in every group have the same list of members, so only those ranks
        # compare the order.
        inside = all(members_of <= other for other in ranks)
        if group.size() > 1 and (inside or not any(all(a <= b for b in ranks) for a in ranks)):
            host, what = torch.device("cpu"), "the order in which gradients are reduced"
            check_agreement((group,), turns, host, f"comparing {what}", what)


_gather_into: Callable[..., Any] = (
    getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
)
_reduce_scatter: Callable[..., Any] = (
    getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
)


def uses_exchange(group: ProcessGroup, device: torch.device, fp32_accumulation: bool) -> bool:
    """True if ranks exchange gradients and add them here; False if the backend reduces them.

    Args:
        group: the ranks that reduce.
        device: device of the gradients.
        fp32_accumulation: True to add in FP32, which only the exchange does.
    """
    return fp32_accumulation or group._get_backend(device).name() != "nccl"


def start_reduction(
    grads: Tensor,
    owned: Tensor,
    group: ProcessGroup,
    bounds: Sequence[int],
    *,
    divisor: int,
    exchange: bool,
    add: bool,
) -> Reduction:
    """Start to reduce a bucket.

    Args:
        grads: this rank's gradients, 1-D. No other code may use them until the reduction ends.
        owned: memory for this rank's shard of the result; may be a view of ``grads``.
        group: the ranks that reduce.
        bounds: index of the first element of each rank's shard in ``grads``, and the end of the
            last shard.
        divisor: divisor of the sum; 1 for a sum.
        exchange: True for an exchange, False for the backend's reduction.
        add: True to add to ``owned`` instead of replacing it.
    """
    kind = _Exchange if exchange or group.size() == 1 else Reduction
    return kind(grads, owned, group, bounds, divisor, add)


class Flag:
    """A reduction in progress of one bool: is it True on any rank? Collective.

    Args:
        group: the ranks.
        raised: the value of this rank.
    """

    def __init__(self, group: ProcessGroup, raised: bool) -> None:
        kinds = {device.type: device for device in group._device_types}
        self._device, self._group = kinds.get("cpu", next(iter(kinds.values()))), group
        self._flag = torch.full((1,), raised, dtype=torch.int32, device=self._device)
        largest = dist.ReduceOp.MAX
        self._work = start_collective(dist.all_reduce, self._flag, op=largest, group=group)

    def wait(self) -> bool:
        """Return True if any rank passed True. Waits for all ranks."""
        wait_for(self._work, self._group, self._device)
        return bool(self._flag.item())


def _are_even(bounds: Sequence[int]) -> bool:
    return len({last - first for first, last in itertools.pairwise(bounds)}) == 1


_PADDING = 1.25
"""Largest ratio of the fullest shard to the mean at which an exchange is done in one round."""


@dataclass
class Reduction:
    """A reduction of a bucket in progress, by the backend; the arguments are those of
    :func:`start_reduction`. Equal shards take one reduce-scatter. Other shards take one
    reduction for each rank.

    Attributes:
        works: handles of the backend's collectives.
        result: memory to which the collectives write this rank's shard.
    """

    grads: Tensor
    owned: Tensor
    group: ProcessGroup
    bounds: Sequence[int]
    divisor: int
    add: bool
    works: list[Any] = field(init=False, default_factory=list)
    result: Tensor = field(init=False)

    def __post_init__(self) -> None:
        op = dist.ReduceOp.SUM
        if self.divisor == self.group.size():
            op = dist.ReduceOp.AVG
        elif self.divisor != 1:  # Divide before the sum, which may overflow in 16 bits.
            divide_(self.grads, self.divisor)
        if _are_even(self.bounds):
            self.result = torch.empty_like(self.owned) if self.add else self.owned
            self.works.append(
                start_collective(_reduce_scatter, self.result, self.grads, op=op, group=self.group)
            )
            return
        for rank, (first, last) in enumerate(itertools.pairwise(self.bounds)):
            if rank == self.group.rank():
                self.result = self.grads[first:last]
            if last > first:
                to, part = dist.get_global_rank(self.group, rank), self.grads[first:last]
                self.works.append(start_collective(dist.reduce, part, to, op, group=self.group))

    def wait(self) -> None:
        """Wait until this rank's shard is complete. On an accelerator, only work that is queued
        later waits."""
        wait_for_all(self.works, self.group, self.grads.device)
        if self.add:
            self.owned += self.result
        elif self.result.data_ptr() != self.owned.data_ptr():
            self.owned.copy_(self.result)


@dataclass
class _Exchange(Reduction):
    """A reduction of a bucket in progress, by an all-to-all: each rank sends every other rank its
    shard.

    A large shard is exchanged in several rounds. Its owner receives it from every rank, and in one
    round this would take the memory of several whole buckets.

    Attributes:
        received: shards that this rank receives in the present round.
        sent: shards that this rank sends in the present round.
        fullest: number of elements of the largest shard.
        piece: number of elements of a shard that are exchanged in one round.
    """

    received: Tensor | None = field(init=False, default=None)
    sent: Tensor | None = field(init=False, default=None)
    fullest: int = field(init=False)
    piece: int = field(init=False)

    def __post_init__(self) -> None:
        ranks, numel = self.group.size(), self.bounds[-1]
        self.fullest = max(last - first for first, last in itertools.pairwise(self.bounds))
        is_even = self.fullest * ranks <= _PADDING * numel
        self.piece = max(1, self.fullest if is_even else -(-numel // (2 * ranks)))
        if ranks > 1:
            self._start(0)

    def _start(self, start: int) -> None:
        """Start a round: exchange ``piece`` elements of every shard.

        Args:
            start: index of the first of these elements in its shard.
        """
        ranks, width = self.group.size(), self.grads.element_size()
        parts = [
            (min(first + start, last), min(first + start + self.piece, last))
            for first, last in itertools.pairwise(self.bounds)
        ]
        self.sent = self.grads
        if self.piece < self.fullest:
            self.sent = torch.cat([self.grads[a:b] for a, b in parts])
        counts = [b - a for a, b in parts]
        count, even = counts[self.group.rank()], len(set(counts)) == 1
        self.received = self.grads.new_empty(count * ranks)
        work = start_collective(
            dist.all_to_all_single,
            _bytes(self.received),
            _bytes(self.sent),
            None if even else [count * width] * ranks,
            None if even else [of_rank * width for of_rank in counts],
            group=self.group,
        )
        self.works = [work]

    def wait(self) -> None:
        for start in range(0, max(1, self.fullest), self.piece):
            if start:
                self._start(start)
            wait_for_all(self.works, self.group, self.grads.device)
            received = self.grads if self.received is None else self.received
            ranks = self.group.size()
            rows = received.view(ranks, received.numel() // ranks)
            total = rows[0].to(torch.float32, copy=True)
            # Add in the order of ranks, so that the bits do not depend on the backend.
            for row in rows[1:]:
                total += row
            self.received = self.sent = None
            finish_sum(total, self.owned[start : start + len(total)], self.divisor, self.add)


def divide_(grads: Tensor, divisor: int) -> None:
    """Divide gradients in place, each rounded once to its own dtype. This includes divisors that a
    16-bit dtype does not hold (257 would be 256 in bfloat16)."""
    device = grads.device
    if torch.tensor(divisor, dtype=grads.dtype, device="cpu").item() == divisor:
        grads.div_(torch.full((), divisor, dtype=grads.dtype, device=device))
        return
    by = torch.full((), divisor, dtype=torch.float32, device=device)
    for piece in torch.split(grads.view(-1), piece_elements(device)):
        piece.copy_(piece.float().div_(by))


def finish_sum(total: Tensor, owned: Tensor, divisor: int, add: bool) -> None:
    """Divide a sum over ranks, and write it to this rank's shard.

    Args:
        total: the sum, FP32, 1-D; overwritten.
        owned: this rank's shard.
        divisor: divisor of the sum.
        add: True to add to the shard instead of replacing it.
    """
    if divisor != 1:  # Divide by a tensor, because CUDA multiplies by the reciprocal of a number.
        total /= torch.full_like(total, divisor)
    if add:
        total += owned
    owned.copy_(total)


def all_gather(flat: Tensor, bounds: Sequence[int], group: ProcessGroup) -> list[Any]:
    """Start to fill a flat buffer with the shards of all ranks. Collective.

    Args:
        flat: the buffer, 1-D; has this rank's shard.
        bounds: index of the first element of each rank's shard, and the end of the last shard.
        group: the ranks.

    Returns:
        Handles for :func:`wait_for_all`.
    """
    if group.size() == 1:
        return []
    data, width = _bytes(flat), flat.element_size()
    parts = [data[first * width : last * width] for first, last in itertools.pairwise(bounds)]
    if _are_even(bounds):
        return [start_collective(_gather_into, data, parts[group.rank()], group=group)]
    return [
        start_collective(dist.broadcast, part, src=dist.get_global_rank(group, rank), group=group)
        for rank, part in enumerate(parts)
        if len(part)
    ]


def broadcast(flat: Tensor, group: ProcessGroup) -> None:
    """Overwrite a flat buffer with the values of the group's first rank, and wait. Collective."""
    if group.size() > 1:
        first = dist.get_global_rank(group, 0)
        work = start_collective(dist.broadcast, _bytes(flat), src=first, group=group)
        wait_for(work, group, flat.device)


def _bytes(tensor: Tensor) -> Tensor:
    """Return the memory of a tensor as uint8, because backends support different dtypes."""
    return tensor.view(torch.uint8)
