"""How a model is spread over ranks, and what one of them holds of each parameter."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Literal, get_args

from mp_optim.planner.params import ParamSpec

Sharding = Literal["no_shard", "fsdp2"]
"""What is spread over the data-parallel ranks: nothing but what the config's distributed optimizer
spreads, or parameters, gradients and state (FSDP2)."""


@dataclass(frozen=True)
class Layout:
    """Sizes of the parallel groups.

    Attributes:
        dp: data-parallel ranks of the dense parameters; the experts' are dp // ep.
        tp: tensor-parallel ranks. Every matrix is split along its first dimension that tp
            divides (Megatron splits some along the other one: the bytes are the same); vectors are
            held by all.
        ep: expert-parallel ranks, taken out of dp, as Megatron does.
        sharding: what dp shards: "no_shard" nothing but what the config's distributed optimizer
            does, "fsdp2" parameters, gradients and state.

    Raises:
        ValueError: a size that cannot be, naming it.
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

    def ranks_with_copies(self, spec: ParamSpec) -> int:
        """How many ranks a parameter is data-parallel over."""
        return self.dp // self.ep if spec.is_expert else self.dp


def model_shard(specs: Iterable[ParamSpec], layout: Layout) -> list[ParamSpec]:
    """The parameters that the first rank of a model copy holds, in the shapes it holds them in.

    Raises:
        ValueError: experts that ``ep`` does not divide.
    """
    specs = list(specs)
    kept = [
        spec for spec in specs if not spec.is_expert or _is_mine(spec, specs, layout.ep)
    ]
    return [
        replace(
            spec,
            shape=_split(_expert_shape(spec, layout.ep), layout.tp, spec.vector_like),
        )
        for spec in kept
    ]


def state_shard(spec: ParamSpec, layout: Layout) -> tuple[int, ...]:
    """Shape of what the first data-parallel rank keeps of a parameter as :func:`model_shard`
    returned it."""
    ranks = layout.ranks_with_copies(spec)
    if layout.sharding == "fsdp2" and spec.shape:
        return (math.ceil(spec.shape[0] / ranks), *spec.shape[1:])
    return spec.shape


def _expert_number(spec: ParamSpec) -> int | None:
    """The expert of a parameter that is one expert's own; None for a stack of all."""
    found = re.search(r"experts\.(\d+)\.", spec.name)
    return int(found.group(1)) if found else None


def _is_mine(spec: ParamSpec, specs: list[ParamSpec], ep: int) -> bool:
    number = _expert_number(spec)
    if ep == 1 or number is None:
        return True
    count = 1 + max(
        n
        for other in specs
        if other.is_expert and (n := _expert_number(other)) is not None
    )
    if count % ep:
        raise ValueError(f"ep={ep}: does not divide the {count} experts of {spec.name}")
    return number < count // ep


def _expert_shape(spec: ParamSpec, ep: int) -> tuple[int, ...]:
    if ep == 1 or not spec.is_expert or _expert_number(spec) is not None:
        return spec.shape
    if not spec.shape or spec.shape[0] % ep:
        raise ValueError(
            f"ep={ep}: does not divide the experts of {spec.name}, shape {spec.shape}"
        )
    return (spec.shape[0] // ep, *spec.shape[1:])


def _split(shape: tuple[int, ...], tp: int, whole: bool) -> tuple[int, ...]:
    if tp == 1 or whole or len(shape) < 2:
        return shape
    for dim in range(len(shape) - 2, len(shape)):  # of a stack, the matrices
        if shape[dim] % tp == 0:
            return (*shape[:dim], shape[dim] // tp, *shape[dim + 1 :])
    return shape
