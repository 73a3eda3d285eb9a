"""Plan of one rank's memory: the sizes of the tensors of a stack built on the meta device."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from operator import attrgetter
from typing import Any

import torch
from torch import nn

from mp_optim.config import OptimizerConfig
from mp_optim.core import param_at
from mp_optim.core.param_attributes import ShardInfo, set_shard_info
from mp_optim.core.slot_state import AVERAGE, REMAINDER
from mp_optim.core.tensor_layout import region_of
from mp_optim.factory.build import StackRequest, build
from mp_optim.host.host_memory import page_locked_bytes
from mp_optim.mixed_precision import MegatronOptimizer, WrappedOptimizer
from mp_optim.offload.hybrid_executor import PlacedExecutor, stepper_of
from mp_optim.param_groups.overrides import ParamKey
from mp_optim.zero.buckets import make_buckets


@dataclass(frozen=True)
class Memory:
    """Bytes in one kind of memory, by purpose.

    Attributes:
        model_params: model parameters.
        grads: gradients.
        main_params: main params and remainders.
        moments: moments and other state of the rule.
        averages: moving averages of the main params.
        staging: staging buffers for transfers.
        double_buffers: back buffers of speculative steps.
    """

    model_params: int = 0
    grads: int = 0
    main_params: int = 0
    moments: int = 0
    averages: int = 0
    staging: int = 0
    double_buffers: int = 0

    @property
    def total(self) -> int:
        """Sum of the bytes of all purposes."""
        return sum(dataclasses.astuple(self))


@dataclass(frozen=True)
class MemoryPlan:
    """Memory that one rank needs, in bytes. Pinned memory includes its allocator's rounding.

    The plan leaves out activations, temporary tensors, scales of float8 parameters, and rounding by
    the accelerator's allocator.

    Attributes:
        accelerator: memory of the device with the model.
        pinned_host: pinned (page-locked) host memory.
        pageable_host: other host memory.
        disk: size of the file in ``optimizer_state_path``.
        fraction: share of the optimizer that is offloaded, 0.0 to 1.0.
        params: number of trainable elements of the whole model.
    """

    accelerator: Memory = field(default_factory=Memory)
    pinned_host: Memory = field(default_factory=Memory)
    pageable_host: Memory = field(default_factory=Memory)
    disk: Memory = field(default_factory=Memory)
    fraction: float = 0.0
    params: int = 0

    @property
    def host_total(self) -> int:
        """Bytes of host memory, pinned and pageable."""
        return self.pinned_host.total + self.pageable_host.total

    @property
    def _places(self) -> tuple[Memory, ...]:
        return self.accelerator, self.pinned_host, self.pageable_host, self.disk

    @property
    def background_save(self) -> int:
        """Upper bound of the additional host bytes during ``save(asynchronous=True)``: one copy of
        all saved tensors."""
        return sum(
            place.model_params + place.main_params + place.moments + place.averages
            for place in self._places
        )

    def rows(self) -> list[tuple[str, int, int, int, int]]:
        """Return one row for each purpose: (purpose, accelerator, pinned host, pageable host,
        disk), in bytes.

        The last row has the totals.
        """
        names = [*(spec.name for spec in dataclasses.fields(Memory)), "total"]
        return [(name.replace("_", " "), *map(attrgetter(name), self._places)) for name in names]

    def __str__(self) -> str:
        text = f"{'GiB per rank':16}{'accelerator':>14}{'pinned host':>14}{'pageable host':>15}"
        text += f"{'disk':>10}" if self.disk.total else ""
        for name, a, p, h, d in self.rows():
            text += f"\n{name:16}{a / 2**30:14.3f}{p / 2**30:14.3f}{h / 2**30:15.3f}"
            text += f"{d / 2**30:10.3f}" if self.disk.total else ""
        saving = self.background_save / 2**30
        return f"{text}\na save in the background: at most {saving:.3f} more on the host"


NamedParams = list[tuple[str, nn.Parameter]]


def plan_rank(
    named: NamedParams,
    experts: Collection[str],
    config: OptimizerConfig,
    ranks: int,
    expert_ranks: int,
    config_overrides: Mapping[ParamKey, Any] | None = None,
    param_groups: Sequence[Mapping[str, Any]] | None = None,
) -> MemoryPlan:
    """Plan the memory of one rank, without allocating tensors.

    Args:
        named: meta parameters of the rank with names, before data-parallel sharding.
        experts: names of the expert parameters.
        config: config with a number as offload fraction.
        ranks: number of data-parallel ranks of the dense parameters.
        expert_ranks: number of data-parallel ranks of the expert parameters.
        config_overrides: settings by :class:`ParamKey`; None for the standard overrides.
        param_groups: groups of these parameters; None to make groups from the overrides.

    Raises:
        ValueError: the config is not valid, or its fraction is ``"auto"``.
    """
    config.check()
    if config.optimizer_offload_fraction == "auto":
        raise ValueError(
            "optimizer_offload_fraction='auto': a plan needs a number; set 0.5, for example, or "
            "call smallest_fraction"
        )
    if config.is_distributed:
        stepped, model_params, grads = _sharded(named, experts, config, ranks, expert_ranks)
    else:
        stepped, model_params = named, sum(param.nbytes for _, param in named)
        trained = [param for _, param in named if param.requires_grad]
        # Gradients have the parameter's dtype. Gradients of 8-bit parameters have 16 bits.
        grads = sum(param.numel() * max(param.itemsize, 2) for param in trained)
    model = nn.Module()
    # Write to ``_parameters``, because register_parameter() refuses names with dots.
    model._parameters.update(stepped)
    groups = None
    if param_groups is not None:
        by_id = {id(param): part for (_, param), (_, part) in zip(named, stepped, strict=True)}
        groups = [
            {**group, "params": [by_id[id(param)] for param in group["params"]]}
            for group in param_groups
        ]
    optimizer = build(
        StackRequest(
            with_defaults(config, _SHARDING),
            [model],
            config_overrides,
            expert_predicate=lambda _, name: name in experts,
            param_groups=groups,
        )
    )
    memory = memory_of(optimizer, config)
    if config.release_gradients:
        parts = [
            each for each in optimizer.chained_optimizers if isinstance(each, WrappedOptimizer)
        ]
        steppers = [stepper_of(part.executor) for part in parts]
        grads -= sum(each.released_bytes for each in steppers if each is not None)
    return replace(
        memory,
        accelerator=replace(memory.accelerator, model_params=model_params, grads=grads),
        fraction=float(config.optimizer_offload_fraction),
        params=sum(param.numel() for _, param in named if param.requires_grad),
    )


_SHARDING = (
    *("use_distributed_optimizer", "use_layer_wise_distributed_optimizer", "overlap_grad_reduce"),
    *("data_parallel_sharding_strategy", "overlap_param_gather", "grad_reduce_in_fp32"),
    *("grad_reduce_op", "reduce_scatter_with_fp32_accumulation", "bucket_size"),
)
"""Fields of distributed optimizers. The planner resets these fields, because it builds only one
rank's shard."""


def with_defaults(
    config: OptimizerConfig, names: Collection[str], **others: Any
) -> OptimizerConfig:
    """Return a config with the default values of some fields and given values of other fields.

    Args:
        config: config to change.
        names: fields to reset.
        others: values of other fields, by name.
    """
    specs = [spec for spec in dataclasses.fields(config) if spec.name in names]
    defaults: dict[str, Any] = {spec.name: spec.default for spec in specs}
    return replace(config, **{**defaults, **others})


def _sharded(
    named: NamedParams,
    experts: Collection[str],
    config: OptimizerConfig,
    ranks: int,
    expert_ranks: int,
) -> tuple[NamedParams, int, int]:
    """Return the parameter shards of the first data-parallel rank, the bytes of the rank's
    parameters, and the bytes of its gradients.

    Only gradients that stay allocated between steps are counted.
    """
    trained = [(name, param) for name, param in named if param.requires_grad]
    dense = [(name, param) for name, param in trained if name not in experts]
    expert = [(name, param) for name, param in trained if name in experts]
    buckets = [
        *make_buckets(dense, config, 0, ranks),
        *make_buckets(expert, config, 0, expert_ranks),
    ]
    owned = dict[str, torch.Size]()
    if config.data_parallel_sharding_strategy != "no_shard":
        entries = [entry for bucket in buckets for entry in bucket.entries]
        owned = {entry.name: torch.Size([entry.stop - entry.start]) for entry in entries}
    stepped: NamedParams = []
    for name, param in named:
        values = torch.empty(owned.get(name, param.shape), dtype=param.dtype, device="meta")
        part = nn.Parameter(values, requires_grad=param.requires_grad)
        set_shard_info(part, ShardInfo(whole_shape=region_of(param).shape))
        stepped.append((name, part))
    model_params = sum(param.nbytes for _, param in named if not param.requires_grad)
    model_params += sum(bucket.params.nbytes for bucket in buckets)
    grads = [bucket.owned_grads if bucket.grads is None else bucket.grads for bucket in buckets]
    return stepped, model_params, sum(grad.nbytes for grad in grads)


_WHAT = {REMAINDER: "main_params", AVERAGE: "averages"}
"""Purpose in :class:`Memory`, by state key. State with other keys counts as moments."""


def memory_of(optimizer: MegatronOptimizer, config: OptimizerConfig) -> MemoryPlan:
    """Allocate the missing state of an optimizer, and return the bytes of its tensors.

    Args:
        optimizer: optimizer, usually on the meta device.
        config: config of the optimizer.
    """
    optimizer.init_state()
    kinds = ("accelerator", "pinned_host", "pageable_host", "disk")
    sizes: dict[str, Counter[str]] = {kind: Counter() for kind in kinds}
    for member in optimizer.chained_optimizers:
        # The planner turns distributed optimizers off, so each member is a WrappedOptimizer, which
        # has an executor.
        assert isinstance(member, WrappedOptimizer)
        for kind, purpose, size in (*_reserves(member, config), *_tensors(member, config)):
            sizes[kind][purpose] += size
    device, pinned, pageable, disk = (Memory(**of_kind) for of_kind in sizes.values())
    return MemoryPlan(device, pinned, pageable, disk)


def _reserves(member: WrappedOptimizer, config: OptimizerConfig) -> Iterator[tuple[str, str, int]]:
    """Yield (kind of memory, purpose, bytes) of the memory that the first step reserves."""
    if not isinstance(member.executor, PlacedExecutor):
        return
    held, pins_mains = member.executor.stepper.host_bytes(), config.pin_cpu_params
    for purpose, pieces, is_pinned in (
        ("main_params", [member.executor.main_memory.capacity], pins_mains),
        ("staging", held.staging, config.pin_cpu_grads),
        ("double_buffers", held.back_mains, pins_mains),
        ("double_buffers", held.back_state, False),
        ("moments", held.moments, pins_mains),
        ("averages", held.averages, pins_mains),
        ("main_params", held.remainders, pins_mains),
        ("staging", held.windows, pins_mains),
    ):
        if is_pinned:
            yield "pinned_host", purpose, sum(map(page_locked_bytes, pieces))
        else:
            yield "pageable_host", purpose, sum(pieces)
    on_disk = member.executor.stepper.disk_bytes()
    yield "disk", "main_params", on_disk.main_params
    yield "disk", "moments", on_disk.moments
    yield "disk", "averages", on_disk.averages
    yield "accelerator", "staging", member.executor.stepper.device_bytes


def _tensors(member: WrappedOptimizer, config: OptimizerConfig) -> Iterator[tuple[str, str, int]]:
    """Yield (kind of memory, purpose, bytes) of main params on the accelerator and of all state."""
    for slot in filter(member.has_state, member.slots()):
        on_device = member.executor.place(slot) == "device"
        may_stream = config.offload_place != "host" or config.optimizer_state_path is not None
        is_reserved = not on_device and may_stream
        if on_device and member.engine.mains.has_own_main(slot):
            main = param_at(member.executor.param_groups, slot)
            yield "accelerator", "main_params", main.nbytes
        for key, value in member.executor.state_of(slot).live().items():
            if is_reserved and key != "step":
                continue
            is_here = on_device and key != "step"
            where = "accelerator" if is_here else "pageable_host"
            yield where, _WHAT.get(key, "moments"), value.nbytes
