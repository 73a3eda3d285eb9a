"""Estimates of training memory, and search for the first settings that fit.

A trace gives the activations, and a plan gives the other memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

from torch import nn

from mp_optim.apps.fit.activations import Moment, Timeline
from mp_optim.apps.fit.model_plan import Layout
from mp_optim.apps.fit.step_time import GRAD, Form, Machine, on_host, streamed
from mp_optim.config import OptimizerConfig
from mp_optim.factory.memory_plan import MemoryPlan

ERROR = 0.05
"""Largest share by which published peaks exceed the estimate, rounded up to a percent
(``tools/fit_published.py`` prints the comparison)."""
SOLD = 0.98
"""Share of a card's nominal memory that torch reports as its total: 23.5 to 23.7 GiB of an RTX 4090
that is sold with 24 GB, 79.1 GiB of an H100 that is sold with 80 GB."""


@dataclass(frozen=True)
class Limits:
    """Memory that one rank can use.

    Attributes:
        device: bytes of the rank's accelerator, as torch reports them.
        host: bytes of the rank's share of the host's memory.
        disk: bytes of the rank's share of the disk.
        reserve: bytes of the accelerator outside torch's allocator, or unusable in it: CUDA context
            (0.45 to 0.5 GiB in torch's out-of-memory messages), workspaces of cuBLAS and cuBLASLt
            for two threads (4 times 32 MiB from Hopper on, less before), rounding of segments. NCCL
            is not included.
        host_reserve: bytes of the host for the process, its libraries and the system.
    """

    device: int
    host: int
    disk: int = 0
    reserve: int = 1 << 30
    host_reserve: int = 4 << 30


RESERVE = "CUDA and libraries"


def gathered_bytes(model: nn.Module) -> int:
    """Return the bytes that FSDP2 adds on a rank in backward.

    The bytes are the parameters of two blocks (FSDP2 gathers a block while it computes the block
    before), the gradients of one block, and all parameters outside blocks. ``_no_split_modules`` of
    a ``transformers`` model names the blocks. A model without this attribute is gathered whole.
    """
    names = set(getattr(model, "_no_split_modules", None) or ())
    found = [module for module in model.modules() if type(module).__name__ in names]
    sizes = [sum(param.nbytes for param in block.parameters()) for block in found]
    everything = sum(param.nbytes for param in model.parameters())
    return 3 * max(sizes, default=0) + everything - sum(sizes)


@dataclass(frozen=True)
class Candidate:
    """Settings to try.

    Attributes:
        words: settings as arguments of :class:`mp_optim.AdamW`.
        config: config made from ``words``, with the settings for several ranks.
        layout: parallel layout of the model.
    """

    words: Mapping[str, Any]
    config: OptimizerConfig
    layout: Layout = field(default_factory=Layout)


@dataclass(frozen=True)
class Estimate:
    """Bytes of one rank with some settings.

    Attributes:
        candidate: the settings.
        checkpointing: True if blocks run forward again in backward.
        loss: "model" or "chunked".
        plan: parameters, gradients and optimizer.
        moments: bytes of the accelerator by purpose, for "forward" or "backward", and for "step".
    """

    candidate: Candidate
    checkpointing: bool
    loss: str
    plan: MemoryPlan
    moments: Mapping[str, Mapping[str, int]]

    @property
    def moment(self) -> str:
        """The moment at which the accelerator holds most bytes: "forward", "backward" or
        "step"."""
        return max(self.moments, key=lambda name: sum(self.moments[name].values()))

    @property
    def device(self) -> int:
        """Largest bytes of the accelerator, with the reserve."""
        return sum(self.moments[self.moment].values())

    def slack(self, limits: Limits) -> float:
        """Return the share by which the accelerator's estimate may be too low while the settings
        still fit the accelerator. The share is negative if the estimate exceeds the
        accelerator's memory."""
        return (limits.device - self.device) / max(self.device - limits.reserve, 1)

    def missing(self, limits: Limits, error: float = 0.0) -> dict[str, int]:
        """Return the missing bytes by kind of memory; empty if the estimate fits.

        Args:
            limits: memory that the rank can use.
            error: share by which the estimate of the accelerator may be too low.
        """
        device = self.device + int(error * (self.device - limits.reserve))
        taken = {
            "accelerator": (device, limits.device),
            "host": (self.plan.host_total + limits.host_reserve, limits.host),
            "disk": (self.plan.disk.total, limits.disk),
        }
        return {name: used - limit for name, (used, limit) in taken.items() if used > limit}


def estimate(
    candidate: Candidate,
    plan: MemoryPlan,
    timeline: Timeline,
    *,
    checkpointing: bool,
    loss: str,
    limits: Limits,
    gathered: int,
    accumulates: bool = False,
) -> Estimate:
    """Return the memory of one rank: the sum of a plan and of a trace.

    Args:
        candidate: the settings.
        plan: parameters, gradients and optimizer.
        timeline: activations and gradients of a forward and backward.
        checkpointing: True if blocks run forward again in backward.
        loss: "model" or "chunked".
        limits: memory of the rank.
        gathered: result of :func:`gathered_bytes`; added only with FSDP2.
        accumulates: True if gradients of earlier micro-batches exist.
    """
    config, layout, device = candidate.config, candidate.layout, plan.accelerator
    gathers = layout.sharding == "fsdp2"

    def held(made: int) -> int:
        """Return the bytes of gradients on the accelerator when backward has computed ``made``
        bytes."""
        if config.release_gradients:
            return min(made, device.grads)
        # Buffers of buckets, or gradients of earlier micro-batches, exist before backward begins.
        if config.is_distributed or accumulates:
            return device.grads
        return made // layout.dp if gathers else made

    peak = timeline.peak(held)
    resting = {
        "parameters": device.model_params,
        "model's buffers": timeline.buffers,
        "main params": device.main_params,
        "moments and averages": device.moments + device.averages,
        RESERVE: limits.reserve,
    }
    working = {
        "gradients": peak.grads,
        "activations": peak.activations - peak.logits,
        "logits and loss": peak.logits,
        "gathered blocks": gathered if gathers else 0,
    }
    buffers = device.staging + device.double_buffers
    stepping = {"gradients": device.grads, "buffers of step()": buffers}
    moments = {peak.phase: resting | working, "step": resting | stepping}
    return Estimate(candidate, checkpointing, loss, plan, moments)


Traced = Callable[[bool, str], Timeline]
"""Function from (checkpointing, loss) to the timeline of a forward and backward."""


def search(
    candidates: Iterable[Candidate],
    plan_of: Callable[[Candidate], MemoryPlan],
    traced: Traced,
    *,
    ways: Sequence[tuple[bool, str]],
    limits: Limits,
    gathered: int,
    accumulates: bool = False,
) -> Estimate:
    """Return the estimate of the first candidate that fits, with the first pair (checkpointing,
    loss) that fits.

    The first pass accepts a candidate only if it fits even with an estimate that is too low by
    :data:`ERROR`. The second pass accepts a candidate that fits by the estimate. If no candidate
    fits, the candidate with the least missing memory is returned. Missing bytes of the accelerator
    count twice.

    A trace takes seconds. So a candidate that does not fit without activations is not traced, and
    the pair that needs least memory is traced before the other pairs.

    Args:
        candidates: settings in the order to try.
        plan_of: function from a candidate to its plan.
        traced: function from a pair to its timeline.
        ways: pairs in the order to try; the last pair needs least memory.
        limits: memory of the rank.
        gathered: result of :func:`gathered_bytes`.
        accumulates: True if gradients of earlier micro-batches exist.
    """
    listed = list(candidates)
    bare = Timeline([Moment("forward", 0, 0, 0)])

    @cache
    def planned(at: int) -> MemoryPlan:
        return plan_of(listed[at])

    @cache
    def estimated(at: int, way: tuple[bool, str] | None) -> Estimate:
        checkpointing, loss = way or ways[-1]
        return estimate(
            *(listed[at], planned(at), traced(checkpointing, loss) if way else bare),
            checkpointing=checkpointing,
            loss=loss,
            limits=limits,
            gathered=gathered,
            accumulates=accumulates,
        )

    def lacks(found: Estimate) -> int:
        # Missing host memory counts once and missing accelerator memory twice, because host memory
        # can be extended.
        missing = found.missing(limits)
        return sum(missing.values()) + missing.get("accelerator", 0)

    for error in (ERROR, 0.0):
        for at in range(len(listed)):
            # Test without activations first, and then the pair that needs least memory. If this
            # pair does not fit, no other pair fits.
            for way in (None, ways[-1]):
                if estimated(at, way).missing(limits, error):
                    break
            else:
                tried = (estimated(at, way) for way in ways)
                return next(found for found in tried if not found.missing(limits, error))
    possible = [at for at in range(len(listed)) if not lacks(estimated(at, None))]
    if possible:
        return min((estimated(at, ways[-1]) for at in possible), key=lacks)
    closest = min(range(len(listed)), key=lambda at: lacks(estimated(at, None)))
    return estimated(closest, ways[-1])


def step_seconds(found: Estimate, machine: Machine) -> float:
    """Return the estimated seconds of the optimizer's step. No part of the step overlaps with
    backward.

    ``apps/fit/step_time.py`` has the formulas. The device steps the parameters whose state it
    stores. Then the host steps the other parameters, or the device streams their state. State on a
    disk is read and written once, at the same time; the longer time counts.

    Args:
        found: the settings and their memory.
        machine: assumed rates of one rank.
    """
    plan, config, layout = found.plan, found.candidate.config, found.candidate.layout
    is_sharded = config.is_distributed or layout.sharding == "fsdp2"
    params = plan.params / (layout.dp if is_sharded else 1)
    away = int(params * plan.fraction)
    places = (plan.accelerator, plan.pinned_host, plan.pageable_host, plan.disk)
    state = sum(each.main_params + each.moments for each in places) / max(params, 1)
    form = Form("as planned", state, reads_param=False)
    seconds = (params - away) * (GRAD + form.update) / machine.device
    if away and config.offload_place == "streamed":
        # Released gradients are stored on the host, so they are copied with the state.
        released = 2 if config.release_gradients else 0
        carried = replace(form, state=form.state + released)
        seconds += streamed(machine, carried, away)
    elif away:
        seconds += on_host(machine, form, away)
    if plan.disk.total:
        seconds = max(seconds, 2 * plan.disk.total / machine.disk)
    return seconds
