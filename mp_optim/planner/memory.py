"""The memory of one rank: the very stack that would be built, built on the meta device and added
up."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any

import torch
from torch import nn

from mp_optim.config import OptimizerConfig
from mp_optim.factory import build
from mp_optim.groups.overrides import ParamKey
from mp_optim.placement import HybridDeviceOptimizer
from mp_optim.planner.layout import Layout, model_shard, state_shard
from mp_optim.planner.params import ParamSpec, specs_of
from mp_optim.planner.sharded import of_one_rank, without_sharding
from mp_optim.precision import MegatronOptimizer, WrappedOptimizer
from mp_optim.process.page_locked import page_locked_bytes
from mp_optim.quantized import FLOAT8_DTYPES
from mp_optim.slots import param_at
from mp_optim.slots.param_attributes import ShardInfo, set_shard_info
from mp_optim.slots.state_keys import AVERAGE, REMAINDER

_WHAT = {REMAINDER: "main_params", AVERAGE: "averages"}
"""What state is, if it is no moment."""


@dataclass(frozen=True)
class Memory:
    """Bytes in one kind of memory, by what they are for."""

    model_params: int = 0
    grads: int = 0
    main_params: int = 0
    moments: int = 0
    averages: int = 0
    staging: int = 0
    double_buffers: int = 0  # the back buffer of placement/host_bytes.py

    @property
    def total(self) -> int:
        """All of it, in bytes."""
        return sum(dataclasses.astuple(self))


@dataclass(frozen=True)
class MemoryPlan:
    """Bytes that one rank needs, page-locked memory as it is charged. Activations, temporary
    tensors, scales of float8 parameters and the accelerator's rounding are not in it.

    Attributes:
        accelerator: memory of the device that holds the model.
        pinned_host: host memory, page-locked.
        pageable_host: other host memory.
        disk: of a file in ``optimizer_state_path``.
        fraction: share of the optimizer on the host.
        params: trainable elements of the whole model.
    """

    accelerator: Memory = field(default_factory=Memory)
    pinned_host: Memory = field(default_factory=Memory)
    pageable_host: Memory = field(default_factory=Memory)
    disk: Memory = field(default_factory=Memory)
    fraction: float = 0.0
    params: int = 0

    @property
    def host_total(self) -> int:
        """Host bytes, page-locked or not."""
        return self.pinned_host.total + self.pageable_host.total

    @property
    def background_save(self) -> int:
        """Host bytes beside these that ``save(asynchronous=True)`` may hold while it lasts: at most
        one copy of what it writes."""
        places = (self.accelerator, self.pinned_host, self.pageable_host, self.disk)
        return sum(
            place.model_params + place.main_params + place.moments + place.averages
            for place in places
        )

    def rows(self) -> list[tuple[str, int, int, int, int]]:
        """(what for, accelerator, pinned host, pageable host, disk) in bytes, and the totals."""
        places = (self.accelerator, self.pinned_host, self.pageable_host, self.disk)
        names = [spec.name for spec in dataclasses.fields(Memory)]
        return [
            (name.replace("_", " "), *map(attrgetter(name), places))
            for name in [*names, "total"]
        ]

    def __str__(self) -> str:
        text = f"{'GiB per rank':16}{'accelerator':>14}{'pinned host':>14}{'pageable host':>15}"
        text += f"{'disk':>10}" if self.disk.total else ""
        for name, a, p, h, d in self.rows():
            text += f"\n{name:16}{a / 2**30:14.3f}{p / 2**30:14.3f}{h / 2**30:15.3f}"
            text += f"{d / 2**30:10.3f}" if self.disk.total else ""
        saving = self.background_save / 2**30
        return (
            f"{text}\na save in the background: at most {saving:.3f} more on the host"
        )


class _Held(nn.Module):
    """Parameters under given names, which may have dots."""

    def __init__(self, named: list[tuple[str, nn.Parameter]]) -> None:
        super().__init__()
        self._named = named

    def named_parameters(
        self, *_: Any, **__: Any
    ) -> Iterator[tuple[str, nn.Parameter]]:
        return iter(self._named)


def plan(
    source: Any, config: OptimizerConfig, layout: Layout | None = None
) -> MemoryPlan:
    """Bytes per rank of a model and its optimizer, allocating nothing.

    Args:
        source: a module (also on the meta device), a ``transformers`` config, or a list of
            :class:`~mp_optim.planner.ParamSpec`.
        config: what :func:`mp_optim.get_megatron_optimizer` would be given.
        layout: how the model is spread; by default over one rank. With
            ``use_distributed_optimizer`` its ``dp`` ranks share what the config says.

    Raises:
        ValueError, TypeError: whatever the config, the source or the layout would raise when built.
    """
    layout = layout or Layout()
    dtype = torch.bfloat16 if config.bf16 else torch.float16 if config.fp16 else None
    specs = (
        specs_of(source) if isinstance(source, nn.Module) else specs_of(source, dtype)
    )
    mine = model_shard(specs, layout)
    if config.is_distributed and layout.sharding != "no_shard":
        raise ValueError(
            f"sharding={layout.sharding!r} with use_distributed_optimizer=True: only one of them "
            "shards"
        )
    found = plan_rank(
        [(spec.name, _meta(spec, layout)) for spec in mine],
        {spec.name for spec in mine if spec.is_expert},
        config,
        layout.dp,
        layout.dp // layout.ep,
    )
    return dataclasses.replace(
        found, params=sum(spec.numel for spec in specs if spec.trainable)
    )


def plan_rank(
    named: list[tuple[str, nn.Parameter]],
    experts: Collection[str],
    config: OptimizerConfig,
    ranks: int,
    expert_ranks: int,
    config_overrides: Mapping[ParamKey, Any] | None = None,
) -> MemoryPlan:
    """The same, of meta parameters as one rank holds them before data parallelism.

    Args:
        experts: names of those that are data-parallel over ``expert_ranks``, not ``ranks``.
        config_overrides: as for :func:`mp_optim.get_megatron_optimizer`.
    """
    config.check()
    if config.optimizer_offload_fraction == "auto":
        raise ValueError(
            "optimizer_offload_fraction='auto': a plan is of a number; smallest_fraction finds it"
        )
    rank = of_one_rank(named, experts, config, ranks, expert_ranks)
    optimizer = build(
        without_sharding(config),
        [_Held(rank.stepped)],
        config_overrides,
        expert_predicate=lambda _, name: name in experts,
    )
    held = memory_of(optimizer, config)
    grads = rank.grads - (_released(optimizer) if config.release_gradients else 0)
    accelerator = dataclasses.replace(
        held.accelerator, model_params=rank.params, grads=grads
    )
    return dataclasses.replace(
        held,
        accelerator=accelerator,
        fraction=float(config.optimizer_offload_fraction),
        params=sum(param.numel() for _, param in named if param.requires_grad),
    )


def _released(optimizer: MegatronOptimizer) -> int:
    """Bytes of gradients that the accelerator does without where they are released."""
    parts = [
        part
        for part in optimizer.chained_optimizers
        if isinstance(part, WrappedOptimizer)
    ]
    hosts = [part.inner.host for part in parts]
    return sum(host.released_bytes for host in hosts if host is not None)


def _meta(spec: ParamSpec, layout: Layout) -> nn.Parameter:
    values = torch.empty(state_shard(spec, layout), dtype=spec.dtype, device="meta")
    param = nn.Parameter(values, requires_grad=spec.trainable)
    set_shard_info(param, ShardInfo(whole_shape=torch.Size(spec.shape)))
    if spec.dtype in FLOAT8_DTYPES:
        param.fp8_scale = torch.empty((), dtype=torch.float32, device="meta")  # type: ignore[attr-defined]
    return param


def memory_of(optimizer: MegatronOptimizer, config: OptimizerConfig) -> MemoryPlan:
    """Bytes of an optimizer's tensors; allocates its state if it had none."""
    optimizer.init_state()
    kinds = ("accelerator", "pinned_host", "pageable_host", "disk")
    sizes: dict[str, Counter[str]] = {kind: Counter() for kind in kinds}
    for part in optimizer.chained_optimizers:
        assert isinstance(part, WrappedOptimizer)  # nothing is distributed here
        for kind, what, size in (*_reserves(part, config), *_tensors(part, config)):
            sizes[kind][what] += size
    device, pinned, pageable, disk = (Memory(**of_kind) for of_kind in sizes.values())
    return MemoryPlan(device, pinned, pageable, disk)


def _reserves(
    part: WrappedOptimizer, config: OptimizerConfig
) -> Iterator[tuple[str, str, int]]:
    """Where, what for, and how much memory is taken when stepping begins."""
    if not isinstance(part.inner, HybridDeviceOptimizer):
        return
    held, pins_mains = part.inner.stepper.host_bytes(), config.pin_cpu_params
    yield _taken("main_params", [part.inner.host_main_bytes], pins_mains)
    yield _taken("staging", held.staging, config.pin_cpu_grads)
    yield _taken("double_buffers", held.back_mains, pins_mains)
    yield _taken("double_buffers", held.back_state, False)
    yield _taken("moments", held.moments, pins_mains)
    yield _taken("averages", held.averages, pins_mains)
    yield _taken("main_params", held.remainders, pins_mains)
    yield _taken("staging", held.windows, pins_mains)
    on_disk = part.inner.stepper.disk_bytes()
    yield "disk", "main_params", on_disk.main_params
    yield "disk", "moments", on_disk.moments
    yield "disk", "averages", on_disk.averages
    yield "accelerator", "staging", part.inner.stepper.device_bytes


def _taken(what: str, pieces: Sequence[int], is_pinned: bool) -> tuple[str, str, int]:
    if is_pinned:
        return "pinned_host", what, sum(map(page_locked_bytes, pieces))
    return "pageable_host", what, sum(pieces)


def _tensors(
    part: WrappedOptimizer, config: OptimizerConfig
) -> Iterator[tuple[str, str, int]]:
    """Where, what for, and bytes of main params on the accelerator and of all state."""
    for slot in filter(part.has_state, part.slots()):
        on_device = part.inner.place(slot) == "device"
        is_reserved = not on_device and config.has_windows
        if on_device and part.has_separate_main(slot):
            main = param_at(part.inner.param_groups, slot)
            yield "accelerator", "main_params", main.nbytes
        for key, value in part.inner.state_of(slot).tensors().items():
            if is_reserved and key != "step":
                continue
            is_here = on_device and key != "step"
            where = "accelerator" if is_here else "pageable_host"
            yield where, _WHAT.get(key, "moments"), value.nbytes
