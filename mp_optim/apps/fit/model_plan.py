"""Memory plans for a whole model that a parallel layout spreads over ranks.

The module has one plan, a sweep over offload fractions and storage formats of state, and a search
for the smallest fraction that fits.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

import torch
from torch import nn

from mp_optim.config import OptimizerConfig
from mp_optim.config.state_forms import MOMENT_WORDS, REMAINDERS
from mp_optim.core.names import named_params
from mp_optim.core.param_attributes import (
    ShardInfo,
    is_copied_in_tensor_parallel,
    is_expert_param,
    set_shard_info,
)
from mp_optim.core.quantized import FLOAT8_DTYPES
from mp_optim.factory.memory_plan import MemoryPlan, plan_rank, with_defaults
from mp_optim.factory.offload_fraction import in_words, least, with_fraction

# -- what is planned for --------------------------------------------------------------------------


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
        return specs_of(_meta_model(source, dtype))
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
                is_copied_in_tensor_parallel(param),
            ),
        )
    return list(specs.values())


def _meta_model(config: Any, dtype: torch.dtype | None) -> Any:
    import transformers

    dtype = dtype or getattr(config, "dtype", None) or torch.bfloat16
    with torch.device("meta"):
        return transformers.AutoModelForCausalLM.from_config(config, dtype=dtype)  # type: ignore[no-untyped-call]


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
    """Return the parameters on the first rank of a model copy, with their local shapes."""
    # Numbers of experts whose parameters are separate. Stacks of all experts have no number.
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
        # A stack of all experts is split along its first dimension.
        if spec.is_expert and number is None and layout.ep > 1:
            if not shape or shape[0] % layout.ep:
                raise ValueError(
                    f"ep={layout.ep}: must divide the experts of {spec.name}, shape {shape}"
                )
            shape = (shape[0] // layout.ep, *shape[1:])
        held.append(replace(spec, shape=_split(shape, layout.tp, spec.vector_like)))
    return held


def _split(shape: tuple[int, ...], tp: int, whole: bool) -> tuple[int, ...]:
    if tp == 1 or whole or len(shape) < 2:
        return shape
    # Only the last two dimensions belong to a matrix; other dimensions number the matrices of a
    # stack.
    for dim in range(len(shape) - 2, len(shape)):
        if shape[dim] % tp == 0:
            return (*shape[:dim], shape[dim] // tp, *shape[dim + 1 :])
    return shape


def _meta_param(spec: ParamSpec, layout: Layout) -> nn.Parameter:
    """Return the first data-parallel rank's shard of a parameter of :func:`_model_shard`."""
    shape = spec.shape
    if layout.sharding == "fsdp2" and shape:
        ranks = layout.dp // layout.ep if spec.is_expert else layout.dp
        shape = (math.ceil(shape[0] / ranks), *shape[1:])
    values = torch.empty(shape, dtype=spec.dtype, device="meta")
    param = nn.Parameter(values, requires_grad=spec.trainable)
    set_shard_info(param, ShardInfo(whole_shape=torch.Size(spec.shape)))
    if spec.dtype in FLOAT8_DTYPES:
        param.fp8_scale = torch.empty((), dtype=torch.float32, device="meta")  # type: ignore[attr-defined]
    return param


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
            f"sharding={layout.sharding!r} with use_distributed_optimizer=True: both shard; set "
            "one of them to its default"
        )
    of_rank = plan_rank(
        [(spec.name, _meta_param(spec, layout)) for spec in mine],
        {spec.name for spec in mine if spec.is_expert},
        config,
        layout.dp,
        layout.dp // layout.ep,
    )
    return replace(of_rank, params=sum(spec.numel for spec in specs if spec.trainable))


# -- several plans --------------------------------------------------------------------------------

FORMS: Mapping[str, Mapping[str, Any]] = {
    "FP32": {},
    **{
        f"{words} moments, remainders": {
            "use_precision_aware_optimizer": True,
            "exp_avg_dtype": dtype,
            "exp_avg_sq_dtype": dtype,
        }
        for words, dtype in (("bf16", "bfloat16"), ("8-bit", "uint8"))
    },
}
"""Storage formats of optimizer state by name, as fields of the config."""

_FORM = (
    "use_precision_aware_optimizer",
    "exp_avg_dtype",
    "exp_avg_sq_dtype",
    "fp32_state_below",
    "store_param_remainders",
    "param_remainder_bits",
)


def form_of(config: OptimizerConfig) -> str:
    """Return the name of a config's storage format of optimizer state in a sweep."""
    dtypes = dict.fromkeys((config.exp_avg_dtype, config.exp_avg_sq_dtype))
    moments = " and ".join(MOMENT_WORDS[dtype] for dtype in dtypes)
    if config.keeps_remainders:
        return f"{moments} moments, {REMAINDERS[config.param_remainder_bits].words}"
    return "FP32" if moments == "FP32" else f"{moments} moments"


def sweep(
    source: Any,
    config: OptimizerConfig,
    layout: Layout | None = None,
    *,
    fractions: Sequence[float] = (0.0, 0.25, 0.5, 0.75, 1.0),
    forms: Mapping[str, Mapping[str, Any]] = FORMS,
) -> list[tuple[str, MemoryPlan]]:
    """Return (name of the storage format, plan) for every storage format of state and every
    fraction, in this order.

    The config's own format is first if it is not in ``forms``. Formats that the config's rule does
    not support are left out.

    Args:
        source: model, as for :func:`plan`.
        config: config to vary.
        layout: sizes of the parallel groups; None for one rank.
        fractions: offload fractions, 0.0 to 1.0.
        forms: storage formats by name, as fields of the config.
    """
    specs = specs_of(source)
    own = form_of(config)
    configs = {} if own in forms else {own: config}
    for name, form in forms.items():
        try:
            configs[name] = config if name == own else with_defaults(config, _FORM, **form)
        # The rule has no moments in this format, so the sweep leaves the format out.
        except ValueError:
            continue
    return [
        (name, plan(specs, with_fraction(in_form, fraction), layout))
        for name, in_form in configs.items()
        for fraction in fractions
    ]


def smallest_fraction(
    source: Any,
    config: OptimizerConfig,
    layout: Layout | None = None,
    *,
    gpu_memory: int,
    host_memory: int | None = None,
    steps: int = 64,
) -> MemoryPlan:
    """Return the plan with the smallest offload fraction, in ``steps``-ths, that fits.

    Args:
        source: model, as for :func:`plan`.
        config: config to change the fraction of.
        layout: sizes of the parallel groups; None for one rank.
        gpu_memory: bytes on the accelerator for parameters, gradients and optimizer.
        host_memory: bytes on the host; None for no limit.
        steps: number of equal intervals between the fractions 0 and 1 that are tried.

    Raises:
        ValueError: no fraction fits; the message has the missing bytes.
    """
    specs = specs_of(source)
    best = least(lambda chosen: plan(specs, chosen, layout), config, gpu_memory, steps)
    if host_memory is not None and best.host_total > host_memory:
        raise ValueError(
            f"host_memory={in_words(host_memory)}: offload fraction {best.fraction:g}, the "
            f"smallest that fits {in_words(gpu_memory)} of accelerator memory, needs "
            f"{in_words(best.host_total)} on the host; use compact state "
            "(use_precision_aware_optimizer), a disk (optimizer_state_path), or more ranks"
        )
    return best
