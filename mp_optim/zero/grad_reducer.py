"""Gradients on their way: from autograd into buckets, and from there, reduced, to the rank that
owns them.

A parameter's hook moves its gradient into its bucket. When all of a bucket's have arrived, the
bucket is reduced: while backward goes on (``overlap``, ZeRO-2), or at the step.

All reductions of a process have one order, whichever member of a chain they belong to. Members
(dense parameters, experts) often share a communicator, where the n-th collective of one rank meets
the n-th of another; and where they do not, communicators that share a device may wait for each
other if ranks launch in different orders (NCCL). Which gradients a rank has must therefore not
decide what is launched first.

Gradients are added up in an order that ranks alone decide, in one of two ways. *Exchange*: each
rank sends every other its shard, and the owner adds in FP32 in the order of ranks, rounding once:
the same bits on any backend, and the only way on gloo. *Collective*: the backend's reduce-scatter
(NCCL), which needs no memory to receive and adds in an order of its own, though always the same for
the same bucket.
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
"""Buckets whose reduction may be in progress while their gradients are not kept, which bounds
ZeRO-2's memory, or while their completion is announced during backward."""
_marks = itertools.count(1)


class GradReducer:
    """Hooks on parameters, and the state of each bucket's gradients, kept for the optimizer's life.

    Args:
        buckets: the same on all ranks.
        first_used: for each bucket its first use in forward, which decides the order.
        config: settings of the reduction.
        group: the ranks that reduce.
        divisor: divisor of averages.
        guard: context of communication, which names failures.
        check_use: called when a parameter's gradient arrives in backward.

    Attributes:
        has_gradients: True if a parameter had a gradient since the last :meth:`zero`.
        on_reduced: called with a bucket's index when its owned shard is complete, perhaps during
            backward, which has at most two reductions in progress then.
        order: order of the reductions, perhaps together with those of other reducers.
        rounds: number of passes that were reduced since :meth:`zero`.
        arrived: for each bucket, the parameters whose gradient has arrived in this backward.
        late: the first parameter whose gradient arrived after the gradients of its bucket were
            reduced, until :meth:`zero`; empty for none.
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
        # kept until zero_grad (ZeRO-1), or passed to the optimizer (ZeRO-2)
        self._keeps_grads = strategy != "optim_grads"
        self._replicates = strategy == "no_shard"  # every rank receives all sums
        self._in_backward = config.overlap_grad_reduce or not self._keeps_grads
        self.guard, self._check_use = guard, check_use
        self.on_reduced: Callable[[int], None] | None = None
        self.arrived: list[set[int]] = [set() for _ in buckets]
        self._waiting = [False] * len(buckets)  # has gradients that were not reduced
        self._reduced = [False] * len(buckets)
        self._complete = False
        self.first_used, self.synchronizes, self.rounds = first_used, True, 0
        LaunchOrder([self], again=not self._keeps_grads)
        self.has_gradients, self.late = False, ""
        self.bytes_reduced = self.grad_bytes_gathered = 0
        self._entries: dict[int, Entry] = {}  # keyed by mark
        self._watched: dict[int, _Watched] = {}  # keyed by the id of the entry
        weakref.finalize(self, _unwatch, self._watched).atexit = False
        for index, bucket in enumerate(buckets):
            for entry in bucket.entries:
                self.watch(index, entry)

    # -- hooks ----------------------------------------------------------------------------------

    def watch(self, index: int, entry: Entry) -> None:
        """Put the hook on an entry's parameter; one that an earlier optimizer put there has no
        effect any more."""
        this, param, mark = weakref.ref(self), cast(Any, entry.param), next(_marks)
        self._entries[mark] = (
            entry  # the hook must not refer to the entry, which refers to the parameter
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
        """Move a parameter's ``grad`` into its bucket; drop it if the bucket was reduced already.

        A dropped gradient does no harm if ``zero_grad()`` comes before the next step: a GAN's
        generator gives its discriminator such gradients.

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
                f"{entry.name}: gradient has layout {grad.layout}; dense gradients are reduced "
                "(build the embedding with sparse=False)"
            )
        if not adds_to_main_grad(entry.param):
            bucket.local_grad(entry).add_(grad)
        entry.param.grad = None
        self._waiting[index] = True

    def collect_all(self) -> bool:
        """Take in gradients that no hook saw, because the caller put them into ``grad``.
        Return whether anything is left to reduce.

        Raises:
            RuntimeError: a gradient was dropped that belongs to this step.
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
        """Start to reduce a bucket with its present gradients; once a step for one that keeps its
        gradients."""
        if self._keeps_grads and self._reduced[index]:
            return
        bucket, config = self.buckets[index], self._config
        in_fp32 = config.reduce_scatter_with_fp32_accumulation
        exchange = uses_exchange(self.group, bucket.params.device, in_fp32)
        # if all shards are gathered, a complete shard is not a whole, and nothing is announced
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
            bucket.grads = None  # the reduction refers to them as long as it needs them
        self._reduced[index], self._waiting[index] = True, False
        self._complete = False
        self.rounds += index == 0
        self.order.under_way.append((weakref.proxy(self), index, work))
        if not config.overlap_grad_reduce:
            self.order.wait(leave=len(self.order.under_way) - 1)

    @in_own_modes
    def complete(self, index: int, work: Reduction, *, is_wanted: bool = True) -> None:
        """Wait for a reduction that was started, and tell of it if its gradients are wanted."""
        with self.guard(f"reducing the gradients of {_named(self.buckets[index])}"):
            work.wait()
        if is_wanted and self.on_reduced is not None and not self._replicates:
            self.on_reduced(index)

    @in_own_modes
    def finish(self) -> None:
        """Every owned shard (``replicate``: every rank's whole gradients) is complete on return.
        Collective; reduces what was not reduced since the last :meth:`zero`, here and in all that
        share the order."""
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
        """Backward passes in here only add up this rank's own gradients."""
        before, self.synchronizes = self.synchronizes, False
        try:
            yield
        finally:
            self.synchronizes = before

    @in_own_modes
    def zero(self) -> None:
        """Forget all gradients. Waits for reductions under way."""
        self.order.restart()
        for index, bucket in enumerate(self.buckets):
            if not self._keeps_grads:
                bucket.grads = None  # the owned part is written again
            elif bucket.grads is not None:
                bucket.grads.zero_()
            self._reduced[index] = self._waiting[index] = False
            for entry in bucket.entries:
                entry.param.grad = None
        self._complete, self.rounds, self.has_gradients, self.late = False, 0, False, ""
        self.bytes_reduced = self.grad_bytes_gathered = 0


class _Watched(NamedTuple):
    """A parameter with a reducer's hook, and the attributes that the reducer set there. No weak
    reference: ``torch.utils.swap_tensors`` refuses parameters that have some."""

    param: Any
    handle: RemovableHandle
    mark: int
    grad: Tensor | None


def _unwatch(watched: dict[int, _Watched]) -> None:
    """Take hooks and attributes from parameters, unless another reducer has set its own since."""
    for param, handle, mark, grad in watched.values():
        handle.remove()
        if reducer_of(param) == mark:
            unset_reducer(param, grad)
    watched.clear()


def _named(bucket: FlatBucket) -> str:
    first, last = bucket.entries[0].name, bucket.entries[-1].name
    return f"the bucket from {first} to {last}"


class LaunchOrder:
    """The order in which the buckets of some reducers are reduced: the one that backward completes
    first is the first.

    NOTE: if buckets are reduced after every pass, a rank does not know how many passes the others
    have: it may have no work in one. So each round begins with a reduction of one flag, which a
    rank in backward starts without waiting. At the step each rank joins rounds, with zeros, until
    no rank begins another.

    Args:
        members: reducers, each with its buckets' places in the model, the same on all ranks.
        again: True if buckets are reduced after every backward pass, rather than once a step.

    Attributes:
        arrivals: lock of the thread in which a gradient arrives. Backward has one thread for each
            device with parameters, and one for the CPU.
        sequence: pairs of a member and one of its buckets, in order.
        under_way: reductions in progress, with their reducers.
    """

    def __init__(self, members: Sequence[GradReducer], again: bool) -> None:
        places = [
            (-place, number, index)
            for number, member in enumerate(members)
            for index, place in enumerate(member.first_used)
        ]
        # Weak, because each member keeps its order.
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
        """A gradient arrives in backward: if it is the first one, no other has yet."""
        if not self._in_backward:
            self._in_backward = True
            for member in self._members:
                for arrived in member.arrived:
                    arrived.clear()
            Variable._execution_engine.queue_callback(self._end_of_backward)

    def advance(self) -> None:
        """Reduce what is full, up to the first bucket that is not."""
        if not all(member.synchronizes for member in self._members):
            return
        while self._next < len(self.sequence):
            number, index = self.sequence[self._next]
            member = self._members[number]
            if len(member.arrived[index]) < len(member.buckets[index].entries):
                return
            self._launch_next()

    def _end_of_backward(self) -> None:
        """Reduce what is left, with zeros for parameters that this rank did not use: others may."""
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
        if self._again:  # another backward may follow, and add to the owned gradients
            self._next = 0

    def finish(self) -> None:
        """Reduce the gradients that were not reduced, and wait. Collective."""
        while self._is_anything_left():
            for number, index in self.sequence[self._next :]:
                self._members[number].launch(index)
            self._next = len(self.sequence)
            self._end_of_round()
        self.wait()
        self._heard()

    def _heard(self) -> None:
        """Let go of this rank's own announcements, which all others have answered by now."""
        if self._announced:
            with self._members[0].guard("announcing a pass to reduce"):
                for flag in self._announced:
                    flag.wait()
            self._announced.clear()

    def _is_anything_left(self) -> bool:
        """Whether this rank, or with a reduction after every pass any other, has to reduce."""
        of_members = [member.collect_all() for member in self._members]
        left = any(of_members)
        if not self._again:
            return left
        if self._next > 0:  # a failed backward may have started the round
            return True
        with self._members[0].guard("asking for another pass to reduce"):
            for group in self._groups:
                left = Flag(group, left).wait()
        return left

    def restart(self) -> None:
        """Begin another step. Wait for reductions in progress without announcing them: gradients
        that are about to be cleared must not be used."""
        while self.under_way:
            member, index, work = self.under_way.popleft()
            member.complete(index, work, is_wanted=False)
        self._heard()
        self._next, self._in_backward = 0, False

    def wait(self, leave: int = 0) -> None:
        """Wait for the oldest reductions until ``leave`` are in progress."""
        while len(self.under_way) > leave:
            member, index, work = self.under_way.popleft()
            member.complete(index, work)


def reduce_in_one_order(members: Sequence[GradReducer], again: bool) -> None:
    """Give reducers one order. Collective over all their ranks.

    Raises:
        ValueError: ranks would take turns differently, naming them.
    """
    order = LaunchOrder(members, again)
    turns = [f"part {number}" for number, _ in order.sequence]
    groups = list(dict.fromkeys(member.group for member in members))
    ranks = [set(dist.get_process_group_ranks(group)) for group in groups]
    for group, members_of in zip(groups, ranks, strict=True):
        # Only ranks in every group have the same list of members, so only they compare it.
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
    """Whether gradients on a device are exchanged and added here, rather than by the backend."""
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
        grads: this rank's gradients, flat; no other code may use them before the end.
        owned: memory for this rank's shard of the result; may be its part of ``grads``.
        group: the ranks that reduce.
        bounds: first element of each rank's shard in ``grads``, and the end of the last one.
        divisor: divisor of the sum; 1 for a sum.
        exchange: the kind of communication.
        add: True to add to ``owned`` instead of replacing it.
    """
    kind = _Exchange if exchange or group.size() == 1 else Reduction
    return kind(grads, owned, group, bounds, divisor, add)


class Flag:
    """A question to a group that is under way: is it so on any rank? Collective.

    Args:
        raised: whether it is so here.
    """

    def __init__(self, group: ProcessGroup, raised: bool) -> None:
        kinds = {device.type: device for device in group._device_types}
        self._device, self._group = kinds.get("cpu", next(iter(kinds.values()))), group
        self._flag = torch.full((1,), raised, dtype=torch.int32, device=self._device)
        largest = dist.ReduceOp.MAX
        self._work = start_collective(dist.all_reduce, self._flag, op=largest, group=group)

    def wait(self) -> bool:
        """The answer, known to the host."""
        wait_for(self._work, self._group, self._device)
        return bool(self._flag.item())


def _are_even(bounds: Sequence[int]) -> bool:
    return len({last - first for first, last in itertools.pairwise(bounds)}) == 1


_PADDING = 1.25
"""By how much the fullest shard may exceed the mean before an exchange is done in several
rounds."""


@dataclass
class Reduction:
    """A reduction of a bucket under way, by the arguments of :func:`start_reduction`: the backend's
    reduce-scatter, or for shards of different sizes one reduction for each rank's.

    Attributes:
        works: of the backend. result: where they leave this rank's shard.
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
        elif self.divisor != 1:  # divide before the sum, which may overflow in 16 bits
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
        """Return when the owned shard is complete (on an accelerator: for work queued from now
        on)."""
        wait_for_all(self.works, self.group, self.grads.device)
        if self.add:
            self.owned += self.result
        elif self.result.data_ptr() != self.owned.data_ptr():
            self.owned.copy_(self.result)


@dataclass
class _Exchange(Reduction):
    """An all-to-all of shards: each rank sends the others theirs.

    Attributes:
        fullest: elements of the largest shard.
        piece: elements of a shard that are exchanged in one round. The owner of a large one
            receives it from every rank, which in one round would take the memory of several whole
            buckets.
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
        """Start a round for the elements from ``start`` on in every shard."""
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
            for row in rows[1:]:  # in the order of ranks
                total += row
            self.received = self.sent = None
            finish_sum(total, self.owned[start : start + len(total)], self.divisor, self.add)


def divide_(grads: Tensor, divisor: int) -> None:
    """Divide gradients in their own dtype, each rounded once: also by a number that a 16-bit float
    does not hold (257 would be 256 in bfloat16)."""
    device = grads.device
    if torch.tensor(divisor, dtype=grads.dtype, device="cpu").item() == divisor:
        grads.div_(torch.full((), divisor, dtype=grads.dtype, device=device))
        return
    by = torch.full((), divisor, dtype=torch.float32, device=device)
    for piece in torch.split(grads.view(-1), piece_elements(device)):
        piece.copy_(piece.float().div_(by))


def finish_sum(total: Tensor, owned: Tensor, divisor: int, add: bool) -> None:
    """Write a sum over ranks, divided, to the owned shard, or add it there."""
    if divisor != 1:  # divide by a tensor, because CUDA multiplies by the reciprocal of a number
        total /= torch.full_like(total, divisor)
    if add:
        total += owned
    owned.copy_(total)


def all_gather(flat: Tensor, bounds: Sequence[int], group: ProcessGroup) -> list[Any]:
    """Start to fill a flat buffer with all ranks' shards, of which this rank has its own.

    Args:
        flat: the buffer.
        bounds: first element of each rank's shard, and the end of the last one.
        group: the ranks.

    Returns:
        Work to wait for.
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
    """Give every rank the first one's values."""
    if group.size() > 1:
        first = dist.get_global_rank(group, 0)
        work = start_collective(dist.broadcast, _bytes(flat), src=first, group=group)
        wait_for(work, group, flat.device)


def _bytes(tensor: Tensor) -> Tensor:
    """Return the tensor's memory as bytes, because backends differ in the dtypes that they
    communicate."""
    return tensor.view(torch.uint8)
