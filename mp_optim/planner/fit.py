"""Whether training fits a machine: activations from a trace, the rest from a plan, and the first
of some settings that fits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torch import nn

from mp_optim.config import OptimizerConfig
from mp_optim.planner.activations import Moment, Timeline
from mp_optim.planner.memory import Layout, MemoryPlan
from mp_optim.planner.step_time import GB, MACHINES, Form, Machine, on_host, streamed


@dataclass(frozen=True)
class Limits:
    """What a rank may take.

    Attributes:
        device: bytes of its accelerator.
        host, disk: bytes of its share of the host's memory, and of its disk.
        reserve: bytes of the accelerator for the driver's context, libraries and what the
            allocator cannot use.
        host_reserve: bytes of the host for the process, its libraries and the system.
    """

    device: int
    host: int
    disk: int = 0
    reserve: int = 1 << 30
    host_reserve: int = 4 << 30


@dataclass(frozen=True)
class Blocks:
    """Bytes of parameters that FSDP2 gathers: of the largest block, and of what is in no block."""

    largest: int = 0
    root: int = 0


def blocks_of(model: nn.Module) -> Blocks:
    """Of a ``transformers`` model, whose ``_no_split_modules`` names its blocks; a model that names
    none is one block."""
    names = set(getattr(model, "_no_split_modules", None) or ())
    found = [module for module in model.modules() if type(module).__name__ in names]
    sizes = [sum(param.nbytes for param in block.parameters()) for block in found]
    everything = sum(param.nbytes for param in model.parameters())
    return Blocks(max(sizes, default=0), everything - sum(sizes))


@dataclass(frozen=True)
class Candidate:
    """Settings to try.

    Attributes:
        words: as :class:`mp_optim.AdamW` takes them.
        config: the same, with the settings of ranks.
        layout: how the model is spread.
    """

    words: Mapping[str, Any]
    config: OptimizerConfig
    layout: Layout = field(default_factory=Layout)


@dataclass(frozen=True)
class Estimate:
    """Bytes of one rank, with some settings.

    Attributes:
        candidate: the settings.
        checkpointing: whether blocks run forward again in backward.
        loss: "model" or "fused".
        plan: parameters, gradients and optimizer.
        moments: by moment ("forward or backward", "step"), bytes of the accelerator by purpose.
        seconds: of the optimizer's step by a model, nothing hidden; None where there is no model.
    """

    candidate: Candidate
    checkpointing: bool
    loss: str
    plan: MemoryPlan
    moments: Mapping[str, Mapping[str, int]]
    seconds: float | None = None

    @property
    def moment(self) -> str:
        """When the accelerator holds most."""
        return max(self.moments, key=lambda name: sum(self.moments[name].values()))

    @property
    def device(self) -> int:
        """Bytes of the accelerator then, with the reserve."""
        return sum(self.moments[self.moment].values())

    def missing(self, limits: Limits) -> dict[str, int]:
        """Bytes beyond each limit; empty if it fits."""
        taken = {
            "accelerator": (self.device, limits.device),
            "host": (self.plan.host_total + limits.host_reserve, limits.host),
            "disk": (self.plan.disk.total, limits.disk),
        }
        return {name: used - limit for name, (used, limit) in taken.items() if used > limit}


def gradients_held(
    plan: MemoryPlan, config: OptimizerConfig, layout: Layout, accumulates: bool
) -> Callable[[int], int]:
    """Bytes of gradients on the accelerator when backward has made so many."""
    planned = plan.accelerator.grads
    if config.release_gradients:
        return lambda made: min(made, planned)
    if config.is_distributed or accumulates:  # a buffer, or those of the micro-batches before
        return lambda made: planned
    if layout.sharding == "fsdp2":
        return lambda made: made // layout.dp
    return lambda made: made


def estimate(
    candidate: Candidate,
    plan: MemoryPlan,
    timeline: Timeline,
    *,
    checkpointing: bool,
    loss: str,
    limits: Limits,
    blocks: Blocks,
    accumulates: bool = False,
) -> Estimate:
    """Add up a plan and a trace.

    With FSDP2 two blocks' parameters are whole at a time (one is computed, the next comes), one
    block's gradients, and what is in no block.
    """
    config, layout = candidate.config, candidate.layout
    held = gradients_held(plan, config, layout, accumulates)
    peak = timeline.peak(held)
    device = plan.accelerator
    resting = {
        "parameters": device.model_params,
        "buffers": timeline.buffers,
        "main params": device.main_params,
        "moments and averages": device.moments + device.averages,
        "reserve": limits.reserve,
    }
    gathers = layout.sharding == "fsdp2"
    working = {
        "gradients": peak.grads,
        "activations": peak.activations - peak.logits,
        "logits and loss": peak.logits,
        "gathered blocks": 3 * blocks.largest + blocks.root if gathers else 0,
    }
    stepping = {"gradients": device.grads, "windows": device.staging + device.double_buffers}
    moments = {peak.phase: resting | working, "step": resting | stepping}
    return Estimate(candidate, checkpointing, loss, plan, moments)


Traced = Callable[[bool, str], Timeline]
"""The timeline with blocks checkpointed or not, and with a loss."""


def search(
    candidates: Iterable[Candidate],
    plan_of: Callable[[Candidate], MemoryPlan],
    traced: Traced,
    *,
    ways: Sequence[tuple[bool, str]],
    limits: Limits,
    blocks: Blocks,
    accumulates: bool = False,
) -> Estimate:
    """The first candidate that fits, in the first of the ways (checkpointing, loss); if none does,
    the one of which least is missing.

    A trace takes seconds. So nothing is traced for a candidate that is too much without
    activations, and of the others the last way, which takes least, before the rest.
    """

    def estimated(candidate: Candidate, plan: MemoryPlan, way: tuple[bool, str] | None) -> Estimate:
        checkpointing, loss = way or ways[-1]
        timeline = traced(checkpointing, loss) if way else Timeline([Moment("forward", 0, 0, 0)])
        return estimate(
            *(candidate, plan, timeline),
            checkpointing=checkpointing,
            loss=loss,
            limits=limits,
            blocks=blocks,
            accumulates=accumulates,
        )

    def lacks(found: Estimate) -> int:
        return sum(found.missing(limits).values())

    hopeless: list[Estimate] = []
    too_much: list[Estimate] = []
    for candidate in candidates:
        without = estimated(candidate, plan_of(candidate), None)
        if lacks(without):
            hopeless.append(without)
            continue
        leanest = estimated(candidate, without.plan, ways[-1])
        if lacks(leanest):
            too_much.append(leanest)
            continue
        tried = (estimated(candidate, without.plan, way) for way in ways)
        return next(found for found in tried if not lacks(found))
    if too_much:
        return min(too_much, key=lacks)
    closest = min(hopeless, key=lacks)
    return estimated(closest.candidate, closest.plan, ways[-1])


@dataclass(frozen=True)
class Rates:
    """Bytes a second of one rank, for the model of a step's time: what is assumed of a machine.

    Attributes:
        machine: bus, host memory and device memory.
        disk: reading or writing.
    """

    machine: Machine = MACHINES[0]
    disk: float = 3 * GB


def step_seconds(found: Estimate, rates: Rates) -> Estimate:
    """The estimate with seconds of the optimizer's step, nothing of it hidden behind backward, by
    ``planner/step_time.py``: the device steps its share at the rate of its memory, then the host's
    share is stepped there or streamed; state on a disk is read and written once."""
    plan, config = found.plan, found.candidate.config
    ranks = found.candidate.layout.dp if _is_sharded(found.candidate) else 1
    params = plan.params / ranks
    away = int(params * plan.fraction)
    places = (plan.accelerator, plan.pinned_host, plan.pageable_host, plan.disk)
    state = sum(place.main_params + place.moments for place in places) / max(params, 1)
    form = Form("as planned", state, reads_param=False)
    seconds = (params - away) * (form.measure + form.update) / rates.machine.device
    if away and config.offload_place == "streamed":
        comes_too = 2 if config.release_gradients else 0  # the gradient, which waits on the host
        carried = replace(form, state=form.state + comes_too)
        seconds += streamed(rates.machine, carried, away).seconds
    elif away:
        seconds += on_host(rates.machine, form, away).seconds
    if plan.disk.total:
        seconds = max(seconds, 2 * plan.disk.total / rates.disk)
    return replace(found, seconds=seconds)


def _is_sharded(candidate: Candidate) -> bool:
    return candidate.config.is_distributed or candidate.layout.sharding == "fsdp2"
