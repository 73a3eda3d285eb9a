"""A case: a model, a schedule, and one or two layouts, as plain data."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Any

Settings = tuple[tuple[str, Any], ...]


@dataclass(frozen=True)
class Param:
    name: str
    shape: tuple[int, ...]
    frozen: bool = False
    splits: int | None = None


@dataclass(frozen=True)
class Layer:
    """A module that holds parameters and is called by itself.

    Attributes:
        fp32: its parameters are FP32 in a 16-bit model.
        skips: for each step (repeating), the streams of data that do not use it.
        tied_to: an earlier layer that shares its first parameter.
    """

    name: str
    params: tuple[Param, ...]
    fp32: bool = False
    skips: tuple[tuple[int, ...], ...] = ((),)
    tied_to: str = ""

    @property
    def is_expert(self) -> bool:
        return self.name.startswith("experts.")

    def used(self, step: int, stream: int) -> bool:
        return stream not in self.skips[step % len(self.skips)]


@dataclass(frozen=True)
class Layout:
    """A distribution of the model over ranks.

    Attributes:
        kind: alone (one process); copies (plain tensors: a DistributedOptimizer over ``dp`` and
            ``ep``, Megatron's attributes over ``tp``); fsdp (FSDP2, over ``tp`` and ``ep`` before);
            placed (DTensors placed by hand).
        mesh: (name, size) of each dimension.
        placements: kind placed: seed of the placements. fsdp: whether units are cut by their last
            dimension.
        settings: fields of the config.
        place: of the part on the host: host, streamed or disk.
    """

    kind: str
    mesh: tuple[tuple[str, int], ...] = ()
    fraction: float = 0.0
    mode: str = "sync"
    place: str = "host"
    settings: Settings = ()
    placements: int = 0

    @property
    def ranks(self) -> int:
        return math.prod(size for _, size in self.mesh)

    def size(self, *names: str) -> int:
        return math.prod(size for name, size in self.mesh if name in names)

    @property
    def data_ranks(self) -> int:
        return (
            self.size("dp", "dp_replicate", "dp_shard", "ep")
            if self.kind in ("copies", "fsdp")
            else 1
        )

    @property
    def has_whole_model(self) -> bool:
        """Whether each rank computes the loss of a whole model, which can be compared."""
        return self.kind == "copies" and [name for name, _ in self.mesh] == ["dp"]

    def setting(self, name: str, default: Any = None) -> Any:
        return dict(self.settings).get(name, default)


@dataclass(frozen=True)
class BadGradient:
    """One element of one stream's gradient is no number."""

    step: int
    stream: int
    layer: str
    value: float


@dataclass(frozen=True)
class Disagreement:
    what: str
    rank: int
    step: int


@dataclass(frozen=True)
class Case:
    """A run: model, schedule and layouts.

    Attributes:
        world: threads (ranks are threads of one process) or processes (gloo).
        precision: as in ``bf16-8bit``: of the model, and the form of the state.
        streams: number of data streams; each data-parallel rank has an equal number.
        parts: micro-batches of a step.
        rough: True for gradients that add up differently in another order.
        deferred: all but the last micro-batch under ``no_sync``.
        clip: limit of the gradient norm.
        threshold: gradient norm above which a step is skipped.
        scales: powers of two that the gradients of each step are multiplied by.
        halve_lr: steps before which the learning rate is halved.
        scaled: steps before which every second row of all parameters is halved.
        written: steps before which other code halves all parameters through ``.data``.
        averaged: steps before which the model has its averages for a moment.
        publishes: steps after which it is published which weights changed.
        late: after each step a backward pass gives gradients that ``zero_grad`` clears, as the
            generator of a GAN gives its discriminator.
        shrinks: some of the ranks save alone before all do, as if the others had ended.
        overrides: settings by pattern of names. Ranks give the overrides to an optimizer class, one
            process steps param groups that are written by hand.
        tenants: after training, ranks step their layers as tenants of one optimizer.
        layouts: the first trains until ``change``, saves a checkpoint, and the second loads it and
            goes on.
    """

    seed: int
    world: str
    rule: str
    precision: str
    layers: tuple[Layer, ...]
    layouts: tuple[Layout, ...]
    steps: int = 3
    change: int = 3
    streams: int = 1
    parts: int = 1
    rough: bool = False
    deferred: bool = False
    clip: float = 0.0
    threshold: float = math.inf
    zeros: bool = False
    scales: tuple[int, ...] = (0,)
    halve_lr: tuple[int, ...] = ()
    scaled: tuple[int, ...] = ()
    written: tuple[int, ...] = ()
    averaged: tuple[int, ...] = ()
    publishes: tuple[int, ...] = ()
    late: bool = False
    shrinks: bool = False
    overrides: tuple[tuple[str, Settings], ...] = ()
    tenants: bool = False
    background: bool = False
    settings: Settings = ()
    bad: BadGradient | None = None
    disagreement: Disagreement | None = None

    def phase(self, index: int) -> range:
        return range(self.change) if index == 0 else range(self.change, self.steps)

    def with_(self, **changes: Any) -> Case:
        return dataclasses.replace(self, **changes)


def grouped(case: Case) -> str:
    layouts = " -> ".join(
        " ".join(
            filter(
                None,
                (
                    layout.kind,
                    "x".join(f"{name}{size}" for name, size in layout.mesh),
                    layout.setting("data_parallel_sharding_strategy", ""),
                    "layer-wise" if layout.setting("use_layer_wise_distributed_optimizer") else "",
                    "overlap"
                    if layout.setting("overlap_grad_reduce")
                    or layout.setting("overlap_param_gather")
                    else "",
                    f"{layout.place} {layout.fraction} {layout.mode}" if layout.fraction else "",
                ),
            )
        )
        for layout in case.layouts
    )
    trouble = (
        case.disagreement.what if case.disagreement else str(case.bad.value) if case.bad else ""
    )
    return f"{case.seed} {case.world} {case.rule} {case.precision} {layouts} {trouble}".rstrip()
