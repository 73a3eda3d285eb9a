"""Gradients on their way: from autograd into buckets, and from there, reduced, to the rank that
owns them.

A parameter's hook moves its gradient into its bucket. When all of a bucket's have arrived, the
bucket is reduced, in the order of buckets, which all ranks share: while backward goes on
(``overlap``, ZeRO-2), or at the step.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from mp_optim.config import OptimizerConfig
from mp_optim.distributed.buckets import Bucket, Entry
from mp_optim.distributed.collectives import (
    Reduction,
    all_gather,
    start_reduction,
    uses_exchange,
)
from mp_optim.distributed.reduction_order import LaunchOrder
from mp_optim.process.torch_modes import in_own_modes
from mp_optim.ranks.missing_ranks import wait_for_all
from mp_optim.slots.param_attributes import (
    adds_to_main_grad,
    reducer_of,
    set_main_grad,
    set_reducer,
)

_marks = itertools.count(1)


class GradReducer:
    """Hooks on parameters, and the state of each bucket's gradients.

    Args:
        buckets: the same on all ranks. first_used: where forward first uses each, which decides the
            order.
        config: how they are reduced. group: over which ranks. divisor: of averages.
        guard: context in which communication happens; gives failures a name.
        check_use: called when a parameter's gradient arrives in backward.

    Attributes:
        has_gradients: whether a parameter had a gradient since the last :meth:`zero`.
        on_reduced: called with a bucket's index when its owned shard is complete; perhaps during
            backward, which then has at most two reductions under way.
        order: of the reductions; perhaps with those of other reducers.
        rounds: how many passes were reduced since :meth:`zero`.
    """

    order: LaunchOrder

    def __init__(
        self,
        buckets: list[Bucket],
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
        # until zero_grad (ZeRO-1); else they are handed out (ZeRO-2)
        self._keeps_grads = strategy != "optim_grads"
        self._replicates = strategy == "no_shard"  # every rank gets all of the sums
        self._in_backward = config.overlap_grad_reduce or not self._keeps_grads
        self._guard, self._check_use = guard, check_use
        self.on_reduced: Callable[[int], None] | None = None
        self._arrived: list[set[int]] = [set() for _ in buckets]  # in this backward
        self._waiting = [False] * len(buckets)  # has gradients that were not reduced
        self._reduced = [False] * len(buckets)
        self._complete = False
        self.first_used, self.synchronizes, self.rounds = first_used, True, 0
        LaunchOrder([self], again=not self._keeps_grads)
        self.has_gradients = False
        self.bytes_reduced = self.bytes_gathered = 0
        for index, bucket in enumerate(buckets):
            for entry in bucket.entries:
                self.watch(index, entry)

    # -- hooks ----------------------------------------------------------------------------------

    def watch(self, index: int, entry: Entry) -> None:
        """Put the hook on an entry's parameter; one that an earlier optimizer put there has no
        effect any more."""
        this, param, mark = weakref.ref(self), cast(Any, entry.param), next(_marks)

        def arrive(tensor: Tensor) -> None:
            reducer = this()
            if reducer is not None and reducer_of(tensor) == mark:
                with reducer.order.arrivals:
                    reducer._arrive(index, entry)

        set_reducer(param, mark)
        param.register_post_accumulate_grad_hook(arrive)
        if self._keeps_grads:
            set_main_grad(param, self.buckets[index].local_grad(entry))

    @in_own_modes
    def _arrive(self, index: int, entry: Entry) -> None:
        self._check_use(entry)
        self.collect(index, entry)
        if not self._in_backward or not self.synchronizes:
            return
        self.order.arrives()
        self._arrived[index].add(entry.placed.param)
        self.order.advance()

    def begin_backward(self) -> None:
        """No gradient of this backward pass has arrived yet."""
        for arrived in self._arrived:
            arrived.clear()

    def collect(self, index: int, entry: Entry) -> None:
        """Move a parameter's ``grad`` into its bucket.

        Raises:
            RuntimeError: the bucket was reduced already. TypeError: the gradient is sparse.
        """
        grad, bucket = entry.param.grad, self.buckets[index]
        if self._reduced[index] and self._keeps_grads:
            raise RuntimeError(
                f"{entry.name} got a gradient after the gradients of this step were reduced: call "
                "zero_grad() after step(); with several backward passes per step and "
                "overlap_grad_reduce=True, run all but the last under no_sync(); checkpoint "
                "activations with use_reentrant=False"
            )
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

    def is_full(self, index: int) -> bool:
        """Whether all gradients of a bucket have arrived in this backward."""
        return len(self._arrived[index]) == len(self.buckets[index].entries)

    def is_due(self, index: int) -> bool:
        """Whether a bucket may be reduced now: those that keep their gradients are, once a step."""
        return not (self._keeps_grads and self._reduced[index])

    @property
    def _announces(self) -> bool:
        """Whether complete shards are told of; where all is gathered, they are no whole."""
        return self.on_reduced is not None and not self._replicates

    # -- reducing -------------------------------------------------------------------------------

    @in_own_modes
    def launch(self, index: int) -> None:
        """Start to reduce a bucket, with whatever gradients it has."""
        bucket, config = self.buckets[index], self._config
        in_fp32 = config.reduce_scatter_with_fp32_accumulation
        exchange = uses_exchange(self.group, bucket.params.device, in_fp32)
        if exchange or not self._keeps_grads or self._announces:
            self.order.make_room()
        grads = bucket.local_grads()
        self.bytes_reduced += grads.nbytes
        with self._guard(f"reducing the gradients of {_named(bucket)}"):
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
            bucket.grads = None  # the reduction holds them for as long as it needs them
        self._reduced[index], self._waiting[index] = True, False
        self._complete = False
        self.rounds += index == 0
        self.order.started(self, index, work)
        if not config.overlap_grad_reduce:
            self.order.wait_for_one()

    @in_own_modes
    def wait_for(self, index: int, work: Reduction) -> None:
        """Wait for a reduction that was started."""
        with self._guard(f"reducing the gradients of {_named(self.buckets[index])}"):
            work.wait()

    @in_own_modes
    def complete(self, index: int, work: Reduction) -> None:
        """Wait for a reduction that was started, and tell who wants to know."""
        self.wait_for(index, work)
        if self._announces and self.on_reduced is not None:
            self.on_reduced(index)

    @in_own_modes
    def finish(self) -> None:
        """Every owned shard (``replicate``: every rank's whole gradients) is complete on return.
        Collective; reduces what was not reduced since the last :meth:`zero`, here and in all that
        share the order."""
        self.order.finish()
        if self._replicates and not self._complete:
            self._gather()
        self._complete = True

    def _gather(self) -> None:
        for bucket in self.buckets:
            self.bytes_gathered += bucket.local_grads().nbytes
            with self._guard(f"gathering the gradients of {_named(bucket)}"):
                works = all_gather(bucket.local_grads(), bucket.plan.bounds, self.group)
                wait_for_all(works, self.group, bucket.params.device)

    @in_own_modes
    def collect_all(self) -> bool:
        """Take in gradients that no hook saw, because the caller put them into ``grad``.
        Returns whether anything is left to reduce."""
        for index, bucket in enumerate(self.buckets):
            for entry in bucket.entries:
                if entry.param.grad is not None:
                    self.collect(index, entry)
        return not all(self._reduced) or any(self._waiting)

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
                bucket.grads = None
                bucket.owned_grads.zero_()
            elif bucket.grads is not None:
                bucket.grads.zero_()
            self._reduced[index] = self._waiting[index] = False
            for entry in bucket.entries:
                entry.param.grad = None
        self._complete, self.rounds, self.has_gradients = False, 0, False
        self.bytes_reduced = self.bytes_gathered = 0


def _named(bucket: Bucket) -> str:
    first, last = bucket.entries[0].name, bucket.entries[-1].name
    return f"the bucket from {first} to {last}"
