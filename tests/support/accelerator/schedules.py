"""Random training runs on a simulated device, and the same runs on the host."""

from __future__ import annotations

import contextlib
import gc
import math
import tempfile
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from mp_optim import FusedAdam, HybridDeviceOptimizer, get_megatron_optimizer
from mp_optim.host.transfer import transfer_for
from support.accelerator.disk import simulated_disk
from support.accelerator.simulation import Simulation, device_at
from support.accelerator.stand_in import simulated_accelerator
from support.accelerator.streams import Pace
from support.models import DTYPES, TinyMoE, config_for, is_expert, tokens_of
from support.offload import delays, differing, hybrids, params_of, state_of

DEVICE = 1
EVENTS = ("", "offload", "abandon", "overflow", "read", "wider", "write", "touch")
WRITES_GRADIENTS = ("overflow", "wider", "write", "touch")
"""Events that need a gradient, so they cannot follow its release."""


@dataclass(frozen=True)
class Round:
    """One backward pass and one step.

    Attributes:
        micro: number of micro-batches.
        says_last: True if all micro-batches but the last are in ``no_sync()``.
        scale: factor of the loss.
        event: ``offload``: main params leave the accelerator and return after backward.
            ``abandon``: as ``offload``, after the gradients of another backward were dropped.
            ``overflow``: a gradient becomes infinite after backward. ``read``: parameters and state
            are read after backward. ``wider``: the gradient is FP32, in ``main_grad``. ``write``:
            gradients are doubled after backward. ``touch``: gradients are multiplied by 1.
    """

    micro: int = 1
    scale: float = 1.0
    event: str = ""
    says_last: bool = True


@dataclass(frozen=True)
class Schedule:
    """Settings of a training run.

    Attributes:
        owner: ``stack``, ``zero`` (a DistributedOptimizer of one rank) or ``hybrid`` (a
            HybridDeviceOptimizer alone, which never waits for the device).
        pauses: delays of the worker's jobs in seconds, in turn.
        sets_device: True if the caller's current device is the model's device.
        releases: ``release_gradients``, for an owner that steps during backward.
        place: ``offload_place``.
        is_on_disk: True if the state is in a file.
        averages: True if averages of main params are kept.
        audits: True if each step is repeated on the host.
    """

    owner: str = "stack"
    mode: str = "overlap"
    precision: str = "bf16"
    fraction: float = 0.7
    clip: float = 1.0
    bucket_bytes: int = 256
    pipelined: bool = True
    rounds: tuple[Round, ...] = (Round(),) * 4
    pauses: tuple[float, ...] = ()
    pace: Pace = Pace.LAZY
    seed: int = 0
    sets_device: bool = True
    releases: bool = False
    place: str = "host"
    is_on_disk: bool = False
    averages: bool = False
    audits: bool = False

    @property
    def placing(self) -> dict[str, Any]:
        if self.is_on_disk:
            return {
                "offload_place": self.place,
                "stream_window_bytes": 65536,
                "optimizer_state_path": tempfile.gettempdir(),
            }
        host = {"overlap_cpu_optimizer_d2h_h2d": self.pipelined}
        streamed = {"offload_place": self.place, "stream_window_bytes": 4096}
        return host if self.place == "host" else streamed

    @property
    def tears(self) -> bool:
        """True if gradients are written while their download may still run. A DistributedOptimizer
        clears gradients in place."""
        return any(
            round.event in ("overflow", "write", "touch")
            or (round.event == "abandon" and self.owner == "zero")
            or (round.micro > 1 and not round.says_last and not self.releases)
            for round in self.rounds
        )

    @property
    def plain(self) -> Schedule:
        return replace(
            self,
            mode="sync",
            bucket_bytes=1 << 20,
            pauses=(),
            pace=Pace.LAZY,
            seed=0,
            releases=False,
            place="host",
            is_on_disk=False,
        )


@dataclass(frozen=True)
class Outcome:
    """The result of a run.

    Attributes:
        reports: faults that the simulation reports.
        bits: parameters and state.
    """

    reports: tuple[str, ...]
    bits: dict[str, Tensor]

    def wrong_bits(self, other: Outcome) -> list[str]:
        return differing(self.bits, other.bits)


class Run:
    """A training run that executes a schedule round by round.

    Attributes:
        device: simulated device, or the host without a simulation.
        model: model on this device.
        optimizer: optimizer of the model.
    """

    def __init__(self, schedule: Schedule, simulation: Simulation | None) -> None:
        self.schedule, self.simulation = schedule, simulation
        self.device = torch.device("cpu") if simulation is None else device_at(DEVICE)
        self.model = TinyMoE(DTYPES[schedule.precision]).to(self.device)
        self.optimizer: Any = self._build()
        for part in self._hybrids():
            part.stepper.use_transfer(transfer_for(self.device), schedule.bucket_bytes)

    def _build(self) -> Any:
        schedule = self.schedule
        audit = {"audit_rate": 1.0, "audit_action": "raise"} if schedule.audits else {}
        if schedule.owner == "hybrid":
            return HybridDeviceOptimizer(
                list(self.model.parameters()),
                schedule.fraction,
                FusedAdam,
                FusedAdam,
                offload_mode=schedule.mode,
                sub_optimizer_kwargs=audit,
                lr=1e-2,
                **schedule.placing,
            )
        zero = {"use_distributed_optimizer": True, "overlap_grad_reduce": True, "bucket_size": 100}
        config = config_for(
            schedule.precision,
            schedule.fraction,
            offload_mode=schedule.mode,
            clip_grad=schedule.clip,
            release_gradients=schedule.releases,
            ema_decay=0.9 if schedule.averages else None,
            **schedule.placing,
            **audit,
            **(zero if schedule.owner == "zero" else {}),
        )
        predicate = None if schedule.owner == "zero" else is_expert
        return get_megatron_optimizer(config, self.model, expert_predicate=predicate)

    def _hybrids(self) -> list[HybridDeviceOptimizer]:
        if self.schedule.owner == "hybrid":
            return [self.optimizer]
        if self.schedule.owner == "zero":
            return [part.shards.optimizer for part in self.optimizer.chained_optimizers]
        return hybrids(self.optimizer)

    def _backward(
        self, number: int, micro: int = 1, scale: float = 1.0, says_last: bool = True
    ) -> None:
        is_bare = self.schedule.owner == "hybrid"
        for part in range(micro):
            tokens = tokens_of(10 * number + part).to(self.device)
            loss = self.model(tokens) * (scale / micro)
            if not is_bare:
                loss = self.optimizer.scale_loss(loss)
            is_ready = is_bare or part + 1 == micro or not says_last
            with contextlib.nullcontext() if is_ready else self.optimizer.no_sync():
                loss.backward()

    def _discard(self) -> None:
        if self.schedule.owner == "hybrid":
            self.optimizer.stepper.schedule.discard()
        else:
            self.optimizer.offload_to_cpu()
            self.optimizer.restore_from_cpu()

    def _after_backward(self, event: str) -> None:
        if event in ("offload", "abandon"):
            self._discard()
        elif event == "overflow":
            with torch.no_grad():
                self._grad(self.model.dense)[0, 0] = math.inf
        elif event in ("write", "touch"):
            with torch.no_grad():
                for param in self.model.parameters():
                    self._grad(param).mul_(2.0 if event == "write" else 1.0)
        elif event == "read":
            params_of(self.model), state_of(self.optimizer)
        elif event == "wider":
            for param in self.model.parameters():
                param.main_grad = param.grad.float()
                param.grad = None

    @staticmethod
    def _grad(param: nn.Parameter) -> Tensor:
        grad = getattr(param, "main_grad", None)
        return param.grad if grad is None else grad

    def round(self, number: int, what: Round) -> None:
        if what.event == "abandon":
            self.optimizer.zero_grad()
            self._backward(100 + number)
            self._discard()
        self.optimizer.zero_grad()
        self._backward(number, what.micro, what.scale, what.says_last)
        self._after_backward(what.event)
        self.optimizer.step()
        if what.event == "wider":
            for param in self.model.parameters():
                del param.main_grad

    def outcome(self) -> dict[str, Tensor]:
        bits = {**params_of(self.model), **state_of(self.optimizer)}
        return {name: getattr(value, "local", value) for name, value in bits.items()}


def plain_outcome(schedule: Schedule) -> Outcome:
    run = Run(schedule.plain, None)
    for number, what in enumerate(schedule.rounds):
        run.round(number, what)
    return Outcome((), run.outcome())


def outcome(schedule: Schedule) -> Outcome:
    with simulated_accelerator(schedule.pace, schedule.seed) as simulation:
        if not schedule.sets_device:
            simulation.thread.device = 0
        disk = simulated_disk(simulation) if schedule.is_on_disk else contextlib.nullcontext()
        with delays(schedule.pauses), disk:
            run = Run(schedule, simulation)
            for number, what in enumerate(schedule.rounds):
                run.round(number, what)
        simulation.synchronize()
        bits = run.outcome()
        del run
        gc.collect()  # Freeing the optimizer is part of the run.
    reports = simulation.reports if schedule.tears else {**simulation.reports, **simulation.torn}
    return Outcome(tuple(reports), bits)
