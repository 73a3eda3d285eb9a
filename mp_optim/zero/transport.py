"""The two ways to move gradients to the ranks that own them, and parameters back: buckets of this
package, or Megatron's DistributedDataParallel.

Megatron's buffers are flat already, and Megatron's hooks reduce gradients and gather parameters. So
buffers and hooks are used unchanged. Megatron's modules are recognised by attributes, so Megatron
need not be installed.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import fields
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from mp_optim.config import OptimizerConfig
from mp_optim.host.calls import weak_method
from mp_optim.process_groups.missing_ranks import wait_for_all
from mp_optim.zero.buckets import (
    Entry,
    FlatBucket,
    FlatBucketPlan,
    ParamRange,
    check_shardable,
    make_buckets,
)
from mp_optim.zero.collectives import all_gather, broadcast
from mp_optim.zero.grad_reducer import GradReducer

_BUFFERS = ("buffers", "expert_parallel_buffers")
_DDP_DECIDES = (
    *("overlap_grad_reduce", "grad_reduce_in_fp32", "reduce_scatter_with_fp32_accumulation"),
    *("bucket_size", "use_layer_wise_distributed_optimizer"),
    *("data_parallel_sharding_strategy", "grad_reduce_op"),
)
"""Fields of the config that Megatron's DistributedDataParallel decides itself."""


def _leave(
    handles: Sequence[Any], under_way: dict[int, Any], group: ProcessGroup, device: torch.device
) -> None:
    """Remove hooks from modules, and wait for parameters that these hooks would have waited for."""
    for handle in handles:
        handle.remove()
    for works in under_way.values():
        wait_for_all(works, group, device)


class ParamGatherer:
    """Gathers the parameters of buckets from the ranks that stepped them.

    Args:
        buckets: the buckets.
        group: the ranks that share the buckets.
        modules: modules whose next forward waits for the parameters; empty to wait at once. Each
            module waits for its own parameters, and for those of children without a ``forward``
            (``nn.ParameterDict``, ``nn.ParameterList``).
        guard: takes the name of an action and returns a context for collectives. Errors in the
            context name the missing ranks.
    """

    def __init__(
        self,
        buckets: Sequence[FlatBucket],
        group: ProcessGroup,
        modules: Sequence[nn.Module],
        guard: Callable[[str], Any],
    ) -> None:
        self._buckets, self._group, self._guard = buckets, group, guard
        self._under_way: dict[int, Any] = {}
        self._waited_for: set[int] | None = None
        self._bucket_of: dict[int, int] = {}
        self._overlaps = bool(modules)
        self.bytes_gathered = 0
        self.look()
        handles: list[Any] = []
        for module in {id(m): m for root in modules for m in root.modules()}.values():
            handles.append(module.register_forward_pre_hook(weak_method(self._before_forward)))
        for root in modules:
            hook = weak_method(self.finish)
            handles.append(root.register_state_dict_pre_hook(hook))  # type: ignore[no-untyped-call]
        device = buckets[0].params.device if buckets else torch.device("cpu")
        leave = weakref.finalize(self, _leave, handles, self._under_way, group, device)
        leave.atexit = False

    def look(self) -> None:
        """Record which bucket contains each of the present parameters."""
        self._bucket_of = {
            id(entry.param): index
            for index, bucket in enumerate(self._buckets)
            for entry in bucket.entries
        }

    def start(self) -> None:
        """Start to gather all parameters. Collective. With overlap, :meth:`finish` or the next
        forward waits; without overlap, this call waits."""
        self.finish()
        self.bytes_gathered = 0
        # Start with the last bucket, because forward uses its parameters first.
        for index in reversed(range(len(self._buckets))):
            bucket = self._buckets[index]
            self.bytes_gathered += bucket.params.nbytes
            with self._guard("gathering parameters"):
                self._under_way[index] = all_gather(bucket.params, bucket.plan.bounds, self._group)
        if self._overlaps:
            self._waited_for = set()
        else:
            self.finish()

    def finish(self, *_: Any) -> None:
        """Wait until all parameters are gathered. The modules' hooks of ``state_dict()`` call this
        method, too, with arguments that are ignored."""
        for index in list(self._under_way):
            self._wait(index)
        self._waited_for = None

    def _wait(self, index: int) -> None:
        works = self._under_way.pop(index, [])
        with self._guard("gathering parameters"):
            wait_for_all(works, self._group, self._buckets[index].params.device)

    def _before_forward(self, module: nn.Module, _: Any) -> None:
        if self._waited_for is None:
            return
        for param in _own(module):
            index = self._bucket_of.get(id(param))
            if index is not None:
                self._waited_for.add(id(param))
                self._wait(index)

    def check_use(self, entry: Entry) -> None:
        """Raise RuntimeError if forward did not wait for a parameter. Called when the parameter's
        gradient arrives in backward.

        Raises:
            RuntimeError: forward did not wait, so forward may have used old values.
        """
        if self._waited_for is not None and id(entry.param) not in self._waited_for:
            raise RuntimeError(
                f"{entry.name} was used without a call of the module that holds it, so forward "
                "did not wait for the new values; set overlap_param_gather=False, or call "
                "optimizer.finish_param_sync() before forward"
            )


def _own(module: nn.Module) -> Iterator[Tensor]:
    """Yield the parameters of a module, and of its children that have no ``forward``."""
    yield from (param for param in module._parameters.values() if param is not None)
    for child in module.children():
        if type(child).forward is nn.Module.forward:
            yield from _own(child)


# -- Megatron's buckets


def is_megatron_ddp(chunk: nn.Module) -> bool:
    """True if a module is Megatron's DistributedDataParallel, with buffers of parameters and
    gradients. In other modules ``buffers`` is a method."""
    return isinstance(getattr(chunk, "buffers", None), list) and hasattr(chunk, "start_param_sync")


class MegatronHooks:
    """The reducer and gatherer for Megatron's modules, whose own hooks reduce gradients and gather
    parameters.

    The training loop calls ``finish_grad_sync``. If the modules' forward does not gather
    parameters, :meth:`start` gathers them after the step.

    Args:
        chunks: Megatron's modules.
        buckets: buckets over the modules' buffers.
    """

    def __init__(self, chunks: Sequence[Any], buckets: Sequence[FlatBucket]) -> None:
        self._chunks, self._buckets = chunks, buckets
        self.bytes_gathered = self.grad_bytes_gathered = self.rounds = 0
        self.bytes_reduced = sum(bucket.local_grads().nbytes for bucket in buckets)
        # Assume gradients, because Megatron's hooks do not report whether a gradient arrived.
        self.has_gradients = True
        self.on_reduced: Callable[[int], None] | None = None

    def watch(self, index: int, entry: Entry) -> None:
        """Raise RuntimeError, because the hooks of Megatron's modules are on the parameter that was
        replaced."""
        raise RuntimeError(
            f"{entry.name} was replaced after Megatron's DistributedDataParallel registered its "
            "hooks; wrap the model again"
        )

    def look(self) -> None:
        """Do nothing, because the modules' hooks find their parameters."""

    def start(self) -> None:
        """Gather the parameters now, unless a hook of the modules' forward gathers them."""
        self.bytes_gathered = sum(bucket.params.nbytes for bucket in self._buckets)
        for chunk in self._chunks:
            if not chunk.ddp_config.overlap_param_gather:
                chunk.start_param_sync()

    def finish(self) -> None:
        """Do nothing, because gradients are reduced before the step."""

    def zero(self) -> None:
        """Set the gradients in the modules' buffers to zero."""
        for chunk in self._chunks:
            chunk.zero_grad_buffer()

    def no_sync(self) -> AbstractContextManager[Any]:
        """Return a context that enters the ``no_sync()`` of every module."""
        stack = ExitStack()
        for chunk in self._chunks:
            stack.enter_context(chunk.no_sync())
        return stack


def _buckets_of(
    chunks: Sequence[nn.Module],
    named: Sequence[tuple[str, Tensor]],
    config: OptimizerConfig,
    group: ProcessGroup,
) -> list[FlatBucket]:
    """Return buckets over the buffers of Megatron's modules that have some parameters.

    Args:
        chunks: Megatron's modules.
        named: names and parameters.
        config: ``overlap_param_gather``, which must equal that of the modules.
        group: the ranks that share the buffers.

    Raises:
        ValueError: a module is not Megatron's, its ddp_config differs from the config or has no
            distributed optimizer, a parameter is in no buffer, or a buffer is not cut for these
            ranks.
    """
    name_of = {id(param): name for name, param in named}
    buckets: list[FlatBucket] = []
    bucketed: set[int] = set()
    for chunk in chunks:
        if not is_megatron_ddp(chunk):
            raise ValueError(
                "some model chunks are wrapped in Megatron's DistributedDataParallel, but a "
                f"{type(chunk).__name__} is not; wrap all chunks or none"
            )
        if chunk.ddp_config.overlap_param_gather != config.overlap_param_gather:  # type: ignore[union-attr]
            raise ValueError(
                f"overlap_param_gather={config.overlap_param_gather!r} differs from the model's "
                "ddp_config; set both to the same value"
            )
        if not getattr(chunk.ddp_config, "use_distributed_optimizer", False):
            raise ValueError(
                "the model's ddp_config has use_distributed_optimizer=False, so its buffers are "
                "not sharded; set use_distributed_optimizer=True in the ddp_config, too"
            )
        kinds = (getattr(chunk, kind, None) or [] for kind in _BUFFERS)
        for buffer in chain.from_iterable(kinds):
            for megatron_bucket in buffer.buckets:
                members = [param for param in megatron_bucket.params_list if id(param) in name_of]
                if members:
                    buckets.append(_bucket(buffer, megatron_bucket, members, name_of, group))
                    bucketed.update(map(id, members))
    missing = [name for key, name in name_of.items() if key not in bucketed]
    if missing:
        raise ValueError(
            f"{missing[0]} is in no buffer of the model's DistributedDataParallel; wrap the "
            "module that holds the parameter, or freeze the parameter"
        )
    return buckets


def _bucket(
    buffer: Any,
    megatron_bucket: Any,
    members: Sequence[Tensor],
    name_of: Mapping[int, str],
    group: ProcessGroup,
) -> FlatBucket:
    ranks, rank = group.size(), group.rank()
    if megatron_bucket.param_data is None:
        raise ValueError(
            f"{name_of[id(members[0])]}: Megatron's buffer for this parameter has only gradients "
            "and is not laid out by rank; with Muon set --use-layer-wise-param-layout, or leave "
            "out --use-distributed-optimizer"
        )
    if buffer.data_parallel_group.size() != ranks or megatron_bucket.param_data.numel() % ranks:
        raise ValueError(
            f"{name_of[id(members[0])]}: Megatron's buffer is sharded over "
            f"{buffer.data_parallel_group.size()} ranks, but process_groups has {ranks}; pass the "
            "groups that the model was wrapped with"
        )
    placed = []
    for index, param in enumerate(members):
        start = buffer.param_index_map[param][0] - megatron_bucket.offset
        placed.append(ParamRange(index, start, param.numel()))
    numel = megatron_bucket.param_data.numel()
    plan = FlatBucketPlan(tuple(placed), tuple(range(0, numel + 1, numel // ranks)))
    grads = megatron_bucket.grad_data
    bucket = FlatBucket(plan, rank, megatron_bucket.param_data, grads.dtype, grads)
    for item, param in zip(placed, members, strict=True):
        entry = bucket.add(name_of[id(param)], param, item)
        if entry.data.data_ptr() != param.data_ptr():
            raise ValueError(
                f"{name_of[id(param)]} is no longer a view of its buffer; wrap the model again"
            )
    return bucket


# -- choice of one of the two ways


Reducer = GradReducer | MegatronHooks
Transport = tuple[list[FlatBucket], Reducer, ParamGatherer | MegatronHooks]
"""Buckets, the object that reduces their gradients, and the object that gathers their
parameters."""


def make_transport(
    named: Sequence[tuple[str, Tensor]],
    places: Sequence[int],
    config: OptimizerConfig,
    group: ProcessGroup,
    chunks: Sequence[nn.Module],
    divisor: int,
    guard: Callable[[str], Any],
) -> Transport:
    """Move trainable parameters into buckets. Collective.

    Args:
        named: names and parameters, in the order in which forward uses them.
        places: position of each parameter in the whole model.
        config: settings of buckets and reductions.
        group: the ranks that share the buckets.
        chunks: modules that hold the parameters.
        divisor: divisor of averages.
        guard: takes the name of an action and returns a context for its collectives, in which
            errors name the missing ranks.

    Raises:
        ValueError: a parameter or a setting is not supported.
    """
    if any(map(is_megatron_ddp, chunks)):
        default_of = {spec.name: spec.default for spec in fields(config)}
        for name in _DDP_DECIDES:
            if getattr(config, name) != default_of[name]:
                raise ValueError(
                    f"{name}={getattr(config, name)!r}: the ddp_config of Megatron's "
                    f"DistributedDataParallel decides this setting; leave {name} at its default, "
                    "or pass the bare module"
                )
        buckets = _buckets_of(chunks, named, config, group)
        hooks = MegatronHooks(chunks, buckets)
        return buckets, hooks, hooks
    check_shardable(named)
    buckets = make_buckets(named, config, group.rank(), group.size())
    with guard("sending the first rank's parameters to the others"):
        for bucket in buckets:
            broadcast(bucket.params, group)
    gatherer = ParamGatherer(buckets, group, chunks if config.overlap_param_gather else [], guard)
    place_of = {id(param): place for (_, param), place in zip(named, places, strict=True)}
    first_used = [min(place_of[id(entry.param)] for entry in bucket.entries) for bucket in buckets]
    reducer = GradReducer(buckets, first_used, config, group, divisor, guard, gatherer.check_use)
    return buckets, reducer, gatherer
