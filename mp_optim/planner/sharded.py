"""What the first data-parallel rank holds under a distributed optimizer: its buckets, made on the
meta device."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from mp_optim.config import OptimizerConfig
from mp_optim.distributed.buckets import Bucket, make_buckets
from mp_optim.quantized import FLOAT8_DTYPES
from mp_optim.slots.param_attributes import ShardInfo, set_shard_info
from mp_optim.slots.tensor_layout import part_of

Named = list[tuple[str, nn.Parameter]]
_SHARDING = (
    "use_distributed_optimizer",
    "use_layer_wise_distributed_optimizer",
    "overlap_grad_reduce",
    "data_parallel_sharding_strategy",
    "overlap_param_gather",
    "grad_reduce_in_fp32",
    "grad_reduce_op",
    "reduce_scatter_with_fp32_accumulation",
    "bucket_size",
)


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
    owned: dict[str, torch.Size] = {}
    for entry in [entry for bucket in buckets for entry in bucket.entries]:
        flat = torch.Size([entry.stop - entry.start])
        is_whole = config.data_parallel_sharding_strategy == "no_shard"
        owned[entry.name] = shapes[entry.name] if is_whole else flat
    stepped = [(name, _like(param, owned.get(name))) for name, param in named]
    params = sum(param.nbytes for _, param in named if not param.requires_grad)
    params += sum(bucket.params.nbytes for bucket in buckets)
    return Held(stepped, params, sum(map(_grad_bytes, buckets)))


def without_sharding(config: OptimizerConfig) -> OptimizerConfig:
    """The config of the optimizer over what one rank owns."""
    return with_defaults(config, _SHARDING)


def with_defaults(config: OptimizerConfig, names: Collection[str]) -> OptimizerConfig:
    """The config with some fields as by default."""
    specs = [spec for spec in dataclasses.fields(config) if spec.name in names]
    defaults: dict[str, Any] = {spec.name: spec.default for spec in specs}
    return dataclasses.replace(config, **defaults)


def _buckets(
    named: Sequence[tuple[str, Tensor]], config: OptimizerConfig, ranks: int
) -> list[Bucket]:
    trained = [(name, param) for name, param in named if param.requires_grad]
    return make_buckets(trained, config, 0, ranks)


def _grad_size(param: Tensor) -> int:
    """Bytes of a parameter's gradient, which has its dtype, or 16 bits if the parameter has 8."""
    return 2 * param.numel() if param.dtype in FLOAT8_DTYPES else param.nbytes


def _like(param: Tensor, shape: torch.Size | None) -> nn.Parameter:
    """A rank's part of a parameter, which says what it is a part of; of a frozen one, all."""
    values = torch.empty(shape or param.shape, dtype=param.dtype, device="meta")
    part = nn.Parameter(values, requires_grad=param.requires_grad)
    set_shard_info(part, ShardInfo(whole_shape=part_of(param).shape))
    return part


def _grad_bytes(bucket: Bucket) -> int:
    return bucket.owned_grads.nbytes if bucket.grads is None else bucket.grads.nbytes
