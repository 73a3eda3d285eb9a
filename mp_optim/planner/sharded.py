"""What the first data-parallel rank holds under a distributed optimizer: its buckets, made on the
meta device."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from mp_optim.config import OptimizerConfig
from mp_optim.distributed.buckets import Bucket, make_buckets
from mp_optim.distributed.transport import bucket_elements
from mp_optim.quantized import FLOAT8_DTYPES
from mp_optim.slots.tensor_layout import part_of

Named = list[tuple[str, nn.Parameter]]


@dataclass(frozen=True)
class Held:
    """What there is of a model on a rank.

    Attributes:
        stepped: what its optimizer steps, under the parameters' names.
        params, grads: bytes of the model's parameters, and of gradients that stay between steps.
    """

    stepped: Named
    params: int
    grads: int


def of_one_rank(
    named: Named,
    experts: Collection[str],
    config: OptimizerConfig,
    ranks: int,
    expert_ranks: int,
) -> Held:
    """A model's parameters as the config shares them out.

    Args:
        named: meta parameters as a rank holds them before data parallelism.
        experts: names of those that are data-parallel over ``expert_ranks``, not ``ranks``.
    """
    if not config.is_distributed:
        grads = sum(_grad_size(param) for _, param in named if param.requires_grad)
        return Held(named, sum(param.nbytes for _, param in named), grads)
    shapes = {name: param.shape for name, param in named}
    dense = [(name, param) for name, param in named if name not in experts]
    expert = [(name, param) for name, param in named if name in experts]
    buckets = [*_buckets(dense, config, ranks), *_buckets(expert, config, expert_ranks)]
    owned = {
        entry.name: _stepped(entry.stop - entry.start, shapes[entry.name], config)
        for bucket in buckets
        for entry in bucket.entries
    }
    stepped = [
        (name, _like(param, owned.get(name, param.shape))) for name, param in named
    ]
    frozen = sum(param.nbytes for _, param in named if not param.requires_grad)
    return Held(
        stepped,
        frozen + sum(bucket.params.nbytes for bucket in buckets),
        sum(map(_grad_bytes, buckets)),
    )


def without_sharding(config: OptimizerConfig) -> OptimizerConfig:
    """The config of the optimizer over what one rank owns."""
    defaults = {spec.name: spec.default for spec in dataclasses.fields(config)}
    settings = {name: getattr(config, name) for name in defaults}
    for name in (
        "use_distributed_optimizer",
        "use_layer_wise_distributed_optimizer",
        "overlap_grad_reduce",
        "data_parallel_sharding_strategy",
        "overlap_param_gather",
        "grad_reduce_in_fp32",
        "grad_reduce_op",
        "reduce_scatter_with_fp32_accumulation",
        "bucket_size",
    ):
        settings[name] = defaults[name]
    return OptimizerConfig(**settings)


def _buckets(
    named: Sequence[tuple[str, Tensor]], config: OptimizerConfig, ranks: int
) -> list[Bucket]:
    trained = [(name, param) for name, param in named if param.requires_grad]
    names = [name for name, _ in trained]
    return make_buckets(
        [param for _, param in trained],
        names,
        rank=0,
        ranks=ranks,
        bucket_size=bucket_elements(config, ranks),
        grads_in_fp32=config.grad_reduce_in_fp32,
        keep_grads=config.data_parallel_sharding_strategy != "optim_grads",
        whole=config.use_layer_wise_distributed_optimizer,
    )


def _stepped(numel: int, whole: torch.Size, config: OptimizerConfig) -> torch.Size:
    return (
        whole
        if config.data_parallel_sharding_strategy == "no_shard"
        else torch.Size([numel])
    )


def _grad_size(param: Tensor) -> int:
    """Bytes of a parameter's gradient, which has its dtype, or 16 bits if the parameter has 8."""
    return 2 * param.numel() if param.dtype in FLOAT8_DTYPES else param.nbytes


def _like(param: Tensor, shape: torch.Size) -> nn.Parameter:
    """A rank's part of a parameter, which says what it is a part of."""
    part = nn.Parameter(
        torch.empty(shape, dtype=param.dtype, device="meta"),
        requires_grad=param.requires_grad,
    )
    part.whole_shape = part_of(param).shape  # type: ignore[attr-defined]
    return part


def _grad_bytes(bucket: Bucket) -> int:
    return bucket.owned_grads.nbytes if bucket.grads is None else bucket.grads.nbytes
