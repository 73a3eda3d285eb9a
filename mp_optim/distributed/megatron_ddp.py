"""Megatron's DistributedDataParallel: its buffers are flat already, its hooks reduce and gather;
here they are taken as they are. Recognised by attributes, so that Megatron need not be installed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from typing import Any

from torch import Tensor, nn
from torch.distributed import ProcessGroup

from mp_optim.distributed.bucket_plan import BucketPlan, ParamRange
from mp_optim.distributed.buckets import Bucket, Entry

_BUFFERS = ("buffers", "expert_parallel_buffers")


def is_megatron_ddp(chunk: nn.Module) -> bool:
    """Whether a module has Megatron's parameter and gradient buffers (``buffers`` of other modules
    is a method)."""
    return isinstance(getattr(chunk, "buffers", None), list) and hasattr(
        chunk, "start_param_sync"
    )


def buckets_of(
    chunks: Sequence[nn.Module],
    named: Sequence[tuple[str, Tensor]],
    group: ProcessGroup,
) -> list[Bucket]:
    """The buckets that hold some parameters of Megatron's modules.

    Raises:
        ValueError: a parameter is in no buffer, a buffer is not cut for these ranks, or its
            optimizer is not to be distributed; naming it.
    """
    name_of = {id(param): name for name, param in named}
    buckets: list[Bucket] = []
    bucketed: set[int] = set()
    for chunk in chunks:
        if not getattr(chunk.ddp_config, "use_distributed_optimizer", False):
            raise ValueError(
                "the model's ddp_config has use_distributed_optimizer=False, its buffers are not "
                "cut for ranks; set it as in OptimizerConfig"
            )
        for buffer in _buffers(chunk):
            for megatron_bucket in buffer.buckets:
                members = [
                    param
                    for param in megatron_bucket.params_list
                    if id(param) in name_of
                ]
                if members:
                    buckets.append(
                        _bucket(buffer, megatron_bucket, members, name_of, group)
                    )
                    bucketed.update(map(id, members))
    missing = [name for key, name in name_of.items() if key not in bucketed]
    if missing:
        raise ValueError(
            f"{missing[0]} is in no buffer of the model's DistributedDataParallel; wrap the module "
            "that holds it, or freeze it"
        )
    return buckets


def _buffers(chunk: nn.Module) -> Iterator[Any]:
    for attribute in _BUFFERS:
        yield from getattr(chunk, attribute, None) or []


def _bucket(
    buffer: Any,
    megatron_bucket: Any,
    members: Sequence[Tensor],
    name_of: Mapping[int, str],
    group: ProcessGroup,
) -> Bucket:
    ranks, rank = group.size(), group.rank()
    if megatron_bucket.param_data is None:
        raise ValueError(
            f"{name_of[id(members[0])]}: its buffer holds gradients alone and is not laid out by "
            "rank; with Muon set --use-layer-wise-param-layout, or leave out "
            "--use-distributed-optimizer"
        )
    if (
        buffer.data_parallel_group.size() != ranks
        or megatron_bucket.param_data.numel() % ranks
    ):
        raise ValueError(
            f"{name_of[id(members[0])]}: its buffer is cut for {buffer.data_parallel_group.size()} "
            f"ranks, process_groups has {ranks}; pass the groups that the model was wrapped with"
        )
    starts = {
        id(param): buffer.param_index_map[param][0] - megatron_bucket.offset
        for param in members
    }
    placed = [
        ParamRange(index, starts[id(param)], param.numel())
        for index, param in enumerate(members)
    ]
    plan = BucketPlan.even(placed, megatron_bucket.param_data.numel() // ranks, ranks)
    grads = megatron_bucket.grad_data
    bucket = Bucket(plan, rank, megatron_bucket.param_data, grads.dtype, grads)
    for item, param in zip(placed, members, strict=True):
        entry = bucket.add(name_of[id(param)], param, item)
        if entry.data.data_ptr() != param.data_ptr():
            raise ValueError(
                f"{name_of[id(param)]} does not look into its buffer any more; wrap the model again"
            )
    return bucket


class MegatronReducer:
    """Gradients as the modules' own hooks reduce them: ``finish_grad_sync`` is the training loop's
    to call."""

    def __init__(self, chunks: Sequence[Any], buckets: Sequence[Bucket]) -> None:
        self._chunks, self._buckets = chunks, buckets
        self.bytes_gathered = self.rounds = 0
        self.has_gradients = True  # Megatron's hooks tell no one
        self.on_reduced: Callable[[int], None] | None = None

    @property
    def bytes_reduced(self) -> int:
        """Bytes of the buckets."""
        return sum(bucket.local_grads().nbytes for bucket in self._buckets)

    def watch(self, index: int, entry: Entry) -> None:
        """Raises RuntimeError: the modules' hooks are on the parameter that was there before."""
        raise RuntimeError(
            f"{entry.name} was replaced after Megatron's DistributedDataParallel put its hooks on "
            "it; wrap the model again"
        )

    def finish(self) -> None:
        """Nothing: reduced by the time of the step."""

    def zero(self) -> None:
        """Clear the buffers."""
        for chunk in self._chunks:
            chunk.zero_grad_buffer()

    def no_sync(self) -> AbstractContextManager[Any]:
        """The modules' own."""
        stack = ExitStack()
        for chunk in self._chunks:
            stack.enter_context(chunk.no_sync())
        return stack


class MegatronGatherer:
    """Parameters as the modules gather them: here after the step, or by their own hooks with
    overlap."""

    def __init__(self, chunks: Sequence[Any], buckets: Sequence[Bucket]) -> None:
        self._chunks, self._buckets = chunks, buckets
        self.bytes_gathered = 0

    def look(self) -> None:
        """Nothing to take note of."""

    def start(self) -> None:
        """Gather now, unless the modules' forward hooks do."""
        self.bytes_gathered = sum(bucket.params.nbytes for bucket in self._buckets)
        for chunk in self._chunks:
            if not chunk.ddp_config.overlap_param_gather:
                chunk.start_param_sync()

    def finish(self) -> None:
        """Nothing under way that is known here."""
