"""How gradients get to the ranks that own them and parameters back: buckets of our own, or
Megatron's."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor, nn
from torch.distributed import ProcessGroup

from mp_optim.config import OptimizerConfig
from mp_optim.distributed.buckets import Bucket, Entry, check_shardable, make_buckets
from mp_optim.distributed.collectives import broadcast
from mp_optim.distributed.grad_reducer import GradReducer
from mp_optim.distributed.megatron_ddp import (
    MegatronGatherer,
    MegatronReducer,
    buckets_of,
    is_megatron_ddp,
)
from mp_optim.distributed.param_gatherer import ParamGatherer

_DDP_DECIDES = (
    "overlap_grad_reduce",
    "grad_reduce_in_fp32",
    "reduce_scatter_with_fp32_accumulation",
    "bucket_size",
    "use_layer_wise_distributed_optimizer",
)


class Reducer(Protocol):
    """See :class:`~mp_optim.distributed.grad_reducer.GradReducer`."""

    bytes_gathered: int
    has_gradients: bool
    rounds: int
    on_reduced: Callable[[int], None] | None

    @property
    def bytes_reduced(self) -> int: ...
    def watch(self, index: int, entry: Entry) -> None: ...
    def finish(self) -> None: ...
    def zero(self) -> None: ...
    def no_sync(self) -> AbstractContextManager[Any]: ...


class Gatherer(Protocol):
    """See :class:`~mp_optim.distributed.param_gatherer.ParamGatherer`."""

    bytes_gathered: int

    def look(self) -> None: ...
    def start(self) -> None: ...
    def finish(self) -> None: ...


@dataclass(frozen=True)
class Transport:
    """Buckets, and what moves their contents between ranks."""

    buckets: list[Bucket]
    reducer: Reducer
    gatherer: Gatherer


def make_transport(
    named: Sequence[tuple[str, Tensor]],
    places: Sequence[int],
    config: OptimizerConfig,
    group: ProcessGroup,
    chunks: Sequence[nn.Module],
    divisor: int,
    guard: Callable[[str], Any],
) -> Transport:
    """Put trainable parameters into buckets. Collective.

    Args:
        named: in the order in which forward uses them. places: their numbers in that order, in the
            whole model.
        chunks: modules that hold them.
        divisor: what averages are divided by.
        guard: context in which communication happens.

    Raises:
        ValueError: a parameter or the config does not fit.
    """
    if any(map(is_megatron_ddp, chunks)):
        return _megatrons(named, config, group, chunks)
    check_shardable(named)
    buckets = make_buckets(named, config, group.rank(), group.size())
    with guard("sending the first rank's parameters to the others"):
        for bucket in buckets:
            broadcast(bucket.params, group)
    gatherer = ParamGatherer(
        buckets, group, chunks if config.overlap_param_gather else [], guard
    )
    place_of = {
        id(param): place for (_, param), place in zip(named, places, strict=True)
    }
    first_used = [
        min(place_of[id(entry.param)] for entry in bucket.entries) for bucket in buckets
    ]
    reducer = GradReducer(
        buckets, first_used, config, group, divisor, guard, gatherer.check_use
    )
    return Transport(buckets, reducer, gatherer)


def _megatrons(
    named: Sequence[tuple[str, Tensor]],
    config: OptimizerConfig,
    group: ProcessGroup,
    chunks: Sequence[nn.Module],
) -> Transport:
    defaults = {"overlap_grad_reduce": False, "bucket_size": None}
    for name in _DDP_DECIDES:
        if getattr(config, name) != defaults.get(name, False):
            raise ValueError(
                f"{name}={getattr(config, name)!r}: the model is wrapped in Megatron's "
                "DistributedDataParallel, whose ddp_config decides that; leave it at its default "
                "here"
            )
    if (
        config.data_parallel_sharding_strategy != "optim"
        or config.grad_reduce_op != "avg"
    ):
        raise ValueError(
            f"data_parallel_sharding_strategy={config.data_parallel_sharding_strategy!r}, "
            f"grad_reduce_op={config.grad_reduce_op!r}: Megatron's DistributedDataParallel keeps "
            "gradients and scales them itself; leave both at their defaults, or pass the bare "
            "module"
        )
    for chunk in chunks:
        if not is_megatron_ddp(chunk):
            raise ValueError(
                f"some model chunks are wrapped in Megatron's DistributedDataParallel, a "
                f"{type(chunk).__name__} is not; wrap all or none"
            )
        if chunk.ddp_config.overlap_param_gather != config.overlap_param_gather:  # type: ignore[union-attr]
            raise ValueError(
                f"overlap_param_gather={config.overlap_param_gather!r} differs from the model's "
                "ddp_config; set both alike"
            )
    buckets = buckets_of(chunks, named, group)
    return Transport(
        buckets, MegatronReducer(chunks, buckets), MegatronGatherer(chunks, buckets)
    )
