"""The step as two CUDA graphs: measure and decide, then apply. Captured when nothing moves any
more, then replayed.

Two, so that the verdict can leave for the host before the stepping kernels run. A replay is
preceded by a rehearsal: the stack goes through its step as ever, but launches nothing; so whatever
differs from the captured step is seen (a replaced tensor, a new group, other flags), and rates,
bias corrections and seeds are formed on the host in double, as in any step. They are copied into
the table that the captured kernels read.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor

from mp_optim.precision.measure import StepGrads
from mp_optim.precision.verdict import DeviceVerdict, VerdictNumbers
from mp_optim.process.accelerator import CUDA, Accelerator, accelerator_of
from mp_optim.slots import DeviceMultiplier
from mp_optim.slots.interrupted_step import StepMark

_Result = TypeVar("_Result")
WARM = 2
"""Steps with the same gradient memory before one is captured."""
MOST_CHANGES = 8
"""Steps in a row with other gradient memory or another selection, after which no more is
captured."""


@contextmanager
def _uncollected() -> Iterator[None]:
    """Switch automatic garbage collection off inside of the context."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


class CudaGraph:
    """A CUDA graph with a memory pool of its own. Its tensors, also those it made, are at the same
    addresses in every replay. Other threads may use the device while it is captured."""

    def __init__(self, device: torch.device, accelerator: Accelerator = CUDA) -> None:
        self._accelerator, self._device = accelerator, device
        self._graph = accelerator.new_graph()
        # NOTE: torch's own stream for captures belongs to the device that was current when any
        # graph was first captured; on another device nothing would be captured, in silence.
        self._stream = accelerator.stream(device)

    def capture(self, work: Callable[[], _Result]) -> _Result:
        """Let ``work`` queue what it does into the graph; nothing happens on the device before
        :meth:`replay`.

        NOTE: the garbage collector is off meanwhile. It could free an object whose finalizer waits
        for the device, and a wait in the thread that captures breaks the capture.
        """
        with (
            _uncollected(),
            self._accelerator.on(self._device),
            self._accelerator.capture(self._graph, self._stream),
        ):
            return work()

    def replay(self) -> None:
        """Queue the captured work once; nothing waits."""
        self._graph.replay()


def graph_for(device: torch.device) -> Callable[[], CudaGraph]:
    """What makes graphs on a device.

    Raises:
        ValueError: there are none on this type of device.
    """
    accelerator = accelerator_of(device)
    if accelerator is None or not accelerator.has_graphs:
        raise ValueError(
            f"optimizer_cuda_graph=True: the model's parameters are on {device.type}, where there "
            "are no CUDA graphs; move the model to a GPU, or set optimizer_cuda_graph=False"
        )
    return partial(CudaGraph, device, accelerator)


@dataclass(frozen=True)
class StepToCapture:
    """The step at hand; the verdict before it is settled: replays write to its place.

    Attributes:
        grads: that were collected for it.
        decide: measures them and decides, on the device.
        record: takes a verdict as the last one.
        mark: is touched before anything is written.
    """

    grads: StepGrads
    decide: Callable[[], VerdictNumbers]
    record: Callable[[DeviceVerdict], None]
    mark: StepMark


@dataclass(frozen=True)
class _Captured:
    """Graphs, and what they were made of.

    Attributes:
        key: gradients and settings that ``measure`` holds. rehearsal: the launches that ``apply``
            holds.
        table: their numbers. decided: where ``measure`` leaves the verdict.
    """

    key: Any
    measure: CudaGraph
    apply: CudaGraph
    decided: VerdictNumbers
    rehearsal: Any
    table: Tensor


class _Attempt:
    """A pass through the step that may come to nothing: until ``happened``, its counts are ones to
    take back."""

    def __init__(self, verdict: DeviceVerdict) -> None:
        self._verdict = verdict
        self.happened = False
        self.multipliers: Mapping[str, DeviceMultiplier] = {
            name: DeviceMultiplier(given.values, self._skipped)
            for name, given in verdict.multipliers.items()
        }

    def _skipped(self) -> bool:
        return not self.happened or self._verdict.settle().skip


class GraphedStep:
    """Steps a stack, by graphs where it can.

    Attributes:
        captures, replays: how often. eager: why the last step was not one of a graph; empty if it
            was.
    """

    def __init__(self, device: torch.device, backend: Any) -> None:
        self._device, self._backend = device, backend
        self._new_graph: Callable[[], CudaGraph] = graph_for(device)
        self._captured: _Captured | None = None
        self._last: Any = None
        self._steady = self._changes = 0
        self._given_up = ""
        self.captures = self.replays = 0
        self.eager = "no step yet"

    @property
    def note(self) -> str:
        """For people."""
        now = f"eager: {self.eager}" if self.eager else "replayed"
        return f"CUDA graph: {now}; captured {self.captures} times, replayed {self.replays} times"

    def step(self, step: StepToCapture) -> DeviceVerdict:
        """Take one step.

        Raises:
            RuntimeError: the step could not be captured.
        """
        key = step.grads.graph_key()
        if self._captured is not None and self._captured.key == key:
            return self._by_graph(step, self._captured)
        self._captured = None
        if self._is_time(key):
            self.eager = self._given_up = step.grads.obstacle()
            if not self.eager:
                return self._capture(step, key)
        verdict = DeviceVerdict(step.decide())
        step.record(verdict)
        step.grads.step(verdict.multipliers)
        return verdict

    def _is_time(self, key: Any) -> bool:
        """Whether enough steps were alike; says why if not."""
        if self._last is not None and key != self._last:
            self._steady, self._changes = 0, self._changes + 1
            if self._changes >= MOST_CHANGES:
                self._given_up = (
                    f"gradients lay elsewhere, or were others, in {self._changes} steps in a row; "
                    "keep their memory (zero_grad(set_to_none=False), or main_grad)"
                )
        self._last, self._steady = key, self._steady + 1
        self.eager = self._given_up or (
            "" if self._steady > WARM else f"{self._steady} of {WARM} steps alike"
        )
        return not self.eager

    def _by_graph(self, step: StepToCapture, captured: _Captured) -> DeviceVerdict:
        captured.measure.replay()
        verdict = DeviceVerdict(captured.decided)
        step.record(verdict)
        attempt = _Attempt(verdict)
        rehearsal = self._rehearse(step, attempt)
        if not rehearsal.matches(captured.rehearsal):
            self._captured, self._steady, self._changes = None, 1, self._changes + 1
            self.eager = "what is stepped has changed"
            step.grads.step(verdict.multipliers)
            return verdict
        captured.table.copy_(rehearsal.upload())
        step.mark.touch()
        captured.apply.replay()
        attempt.happened = True
        self.replays, self._changes = self.replays + 1, 0
        return verdict

    def _rehearse(self, step: StepToCapture, attempt: _Attempt) -> Any:
        with step.mark.rehearsal():
            return self._backend.rehearse(
                lambda: step.grads.step(attempt.multipliers), self._device
            )

    def _capture(self, step: StepToCapture, key: Any) -> DeviceVerdict:
        measure, apply = self._new_graph(), self._new_graph()
        decided = measure.capture(step.decide)
        measure.replay()
        verdict = DeviceVerdict(decided)
        step.record(verdict)
        rehearsal = self._rehearse(step, _Attempt(verdict))
        if rehearsal.unfit:
            self.eager = self._given_up = rehearsal.unfit
            step.grads.step(verdict.multipliers)
            return verdict
        attempt, table = _Attempt(verdict), rehearsal.upload()
        with step.mark.rehearsal():
            apply.capture(
                lambda: self._backend.record(lambda: step.grads.step(attempt.multipliers), table)
            )
        step.mark.touch()
        apply.replay()
        attempt.happened = True
        self.captures += 1
        self._captured = _Captured(key, measure, apply, decided, rehearsal, table)
        return verdict


def graph_notes(graphed: GraphedStep | None) -> tuple[str, ...]:
    """How CUDA graphs do, in words."""
    return () if graphed is None else (graphed.note,)


def graph_metrics(graphed: GraphedStep | None) -> dict[str, float]:
    """How often they were captured and replayed."""
    if graphed is None:
        return {}
    return {"graph_captures": graphed.captures, "graph_replays": graphed.replays}
