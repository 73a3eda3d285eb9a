"""Memory plan of a whole model under a parallel layout, and the search for the smallest offload
fraction that fits."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

import torch
from torch import nn

from mp_optim.config import OptimizerConfig
from mp_optim.core.names import named_params
from mp_optim.core.param_attributes import ShardInfo, is_expert_param, set_shard_info
from mp_optim.core.quantized import FLOAT8_DTYPES
from mp_optim.factory.memory_plan import MemoryPlan, plan_rank
from mp_optim.factory.offload_fraction import in_words, least


@dataclass(frozen=True)
class ParamSpec:
    """One parameter of the whole model.

    Attributes:
        name: FQN.
        shape: shape of the whole parameter, before any sharding.
        dtype: dtype of the model's parameter.
        is_expert: True for a parameter of a routed expert.
        trainable: True if the parameter has gradients and state.
        vector_like: True if tensor parallelism never shards the parameter.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype = torch.bfloat16
    is_expert: bool = False
    trainable: bool = True
    vector_like: bool = False

    @property
    def numel(self) -> int:
        """Number of elements of the whole parameter."""
        return torch.Size(self.shape).numel()


def specs_of(source: Any, dtype: torch.dtype | None = None) -> list[ParamSpec]:
    """Return the parameters of a model. A tied parameter appears once, under its first name.

    Args:
        source: a module (on any device, also meta), a list of modules, a ``transformers`` config
            (its model is built on the meta device), or parameter specs.
        dtype: dtype that replaces the source's dtypes; None keeps the source's dtypes. A config
            without a dtype is taken as bfloat16.

    Raises:
        TypeError: the source has another type.
    """
    if hasattr(source, "to_diff_dict") and hasattr(source, "model_type"):
        import transformers

        dtype = dtype or getattr(source, "dtype", None) or torch.bfloat16
        with torch.device("meta"):
            auto: Any = transformers.AutoModelForCausalLM
            return specs_of(auto.from_config(source, dtype=dtype))
    items: list[Any] = [source] if isinstance(source, nn.Module) else []
    if not items and isinstance(source, Iterable):
        items = list(source)
    if items and all(isinstance(item, ParamSpec) for item in items):
        return items
    if not items or not all(isinstance(item, nn.Module) for item in items):
        raise TypeError(
            f"source is a {type(source).__name__}; pass a module, a list of modules, a "
            "transformers config or a list of ParamSpec"
        )
    specs: dict[int, ParamSpec] = {}
    for name, param in named_params(items):
        specs.setdefault(
            id(param),
            ParamSpec(
                name,
                tuple(param.shape),
                dtype or param.dtype,
                is_expert_param(param, name),
                param.requires_grad,
                getattr(param, "tensor_model_parallel", True) is False,
            ),
        )
    return list(specs.values())


Sharding = Literal["no_shard", "fsdp2"]
"""Tensors that data-parallel ranks shard. ``no_shard``: only the tensors that the config's
distributed optimizer shards. ``fsdp2``: parameters, gradients and state."""


@dataclass(frozen=True)
class Layout:
    """Sizes of the parallel groups.

    Attributes:
        dp: data-parallel ranks of the dense parameters; expert parameters have dp // ep
            data-parallel ranks.
        tp: tensor-parallel ranks. Every matrix is split along its first dimension that tp divides.
            Megatron splits some matrices along the second dimension, with equal bytes. All ranks
            hold vectors.
        ep: expert-parallel ranks, taken out of dp, as in Megatron.
        sharding: "no_shard" for the config's distributed optimizer alone, "fsdp2" for parameters,
            gradients and state over dp.

    Raises:
        ValueError: a size is not possible; the message names it.
    """

    dp: int = 1
    tp: int = 1
    ep: int = 1
    sharding: Sharding = "no_shard"

    def __post_init__(self) -> None:
        for name in ("dp", "tp", "ep"):
            value = getattr(self, name)
            if not isinstance(value, int) or value < 1:
                raise ValueError(f"{name}={value!r}: must be a whole number >= 1")
        if self.dp % self.ep:
            raise ValueError(f"ep={self.ep}: must divide dp={self.dp}")
        if self.sharding not in get_args(Sharding):
            raise ValueError(
                f"sharding={self.sharding!r}: must be one of {list(get_args(Sharding))}"
            )


_EXPERT = re.compile(r"experts\.(\d+)\.")


def _model_shard(specs: Sequence[ParamSpec], layout: Layout) -> list[ParamSpec]:
    """Return the parameters of the first tensor- and expert-parallel rank, with their local shapes.
    Data-parallel ranks do not shard these shapes yet."""
    # The number of the expert, for parameters of a single expert. A parameter that stacks all
    # experts has no number.
    numbers: dict[str, int] = {}
    for spec in specs:
        if spec.is_expert and (match := _EXPERT.search(spec.name)):
            numbers[spec.name] = int(match[1])
    count = 1 + max(numbers.values(), default=-1)
    held = []
    for spec in specs:
        shape, number = spec.shape, numbers.get(spec.name)
        if number is not None and count % layout.ep:
            raise ValueError(f"ep={layout.ep}: must divide the {count} experts of {spec.name}")
        if number is not None and number >= count // layout.ep:
            continue
        # A parameter that stacks all experts is split along its first dimension.
        if spec.is_expert and number is None and layout.ep > 1:
            if not shape or shape[0] % layout.ep:
                raise ValueError(
                    f"ep={layout.ep}: must divide the experts of {spec.name}, shape {shape}"
                )
            shape = (shape[0] // layout.ep, *shape[1:])
        # Only the last two dimensions belong to a matrix; other dimensions number the matrices of a
        # stack.
        matrix = (
            range(len(shape) - 2, len(shape)) if len(shape) > 1 and not spec.vector_like else ()
        )
        for dim in matrix:
            if shape[dim] % layout.tp == 0:
                shape = (*shape[:dim], shape[dim] // layout.tp, *shape[dim + 1 :])
                break
        held.append(replace(spec, shape=shape))
    return held


def plan(source: Any, config: OptimizerConfig, layout: Layout | None = None) -> MemoryPlan:
    """Return the bytes per rank of a model and its optimizer, without allocating memory.

    Args:
        source: a module (also on the meta device), a ``transformers`` config, or a list of
            :class:`ParamSpec`.
        config: the config of :func:`mp_optim.get_megatron_optimizer`.
        layout: sizes of the parallel groups; None for one rank. With ``use_distributed_optimizer``
            the ``dp`` ranks shard as the config sets.

    Raises:
        ValueError, TypeError: the config, the source or the layout is not valid.
    """
    layout = layout or Layout()
    dtype = torch.bfloat16 if config.bf16 else torch.float16 if config.fp16 else None
    specs = specs_of(source) if isinstance(source, nn.Module) else specs_of(source, dtype)
    mine = _model_shard(specs, layout)
    if config.is_distributed and layout.sharding != "no_shard":
        raise ValueError(
            f"sharding={layout.sharding!r} with use_distributed_optimizer=True: both settings "
            "shard the state; set one of them to its default"
        )
    params = []
    for spec in mine:
        shape = spec.shape
        if layout.sharding == "fsdp2" and shape:
            ranks = layout.dp // layout.ep if spec.is_expert else layout.dp
            shape = (math.ceil(shape[0] / ranks), *shape[1:])
        values = torch.empty(shape, dtype=spec.dtype, device="meta")
        param = nn.Parameter(values, requires_grad=spec.trainable)
        set_shard_info(param, ShardInfo(whole_shape=torch.Size(spec.shape)))
        if spec.dtype in FLOAT8_DTYPES:
            param.fp8_scale = torch.empty((), dtype=torch.float32, device="meta")  # type: ignore[attr-defined]
        params.append((spec.name, param))
    of_rank = plan_rank(
        params,
        {spec.name for spec in mine if spec.is_expert},
        config,
        layout.dp,
        layout.dp // layout.ep,
    )
    return replace(of_rank, params=sum(spec.numel for spec in specs if spec.trainable))


def smallest_fraction(
    source: Any,
    config: OptimizerConfig,
    layout: Layout | None = None,
    *,
    gpu_memory: int,
    host_memory: int | None = None,
) -> MemoryPlan:
    """Return the plan with the smallest offload fraction, in 64ths, that fits.

    Args:
        source: model, as for :func:`plan`.
        config: config to change the fraction of.
        layout: sizes of the parallel groups; None for one rank.
        gpu_memory: bytes on the accelerator for parameters, gradients and optimizer.
        host_memory: bytes on the host; None for no limit.

    Raises:
        ValueError: no fraction fits; the message has the missing bytes.
    """
    specs = specs_of(source)
    best = least(lambda chosen: plan(specs, chosen, layout), config, gpu_memory)
    if host_memory is not None and best.host_total > host_memory:
        raise ValueError(
            f"host_memory={in_words(host_memory)}: the smallest offload fraction that fits "
            f"{in_words(gpu_memory)} of accelerator memory is {best.fraction:g}, which needs "
            f"{in_words(best.host_total)} on the host; set use_precision_aware_optimizer=True "
            "(compact state) or optimizer_state_path (state on a disk), or use more ranks"
        )
    return best
