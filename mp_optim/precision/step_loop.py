"""The steps of a stack, one after the other: measure, agree, decide, apply; eagerly or by a CUDA
graph. And what has become of them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import NoReturn, Protocol

import torch
from torch import Tensor

from mp_optim.config import OptimizerConfig
from mp_optim.precision.backward_overlap import EarlyWork
from mp_optim.precision.device_verdict import DeviceVerdict, decide_on_device, form
from mp_optim.precision.grad_scaler import MegatronGradScaler
from mp_optim.precision.graph_step import GraphedStep, StepToCapture
from mp_optim.precision.settings_agreement import SettingsAlike, disagreement
from mp_optim.precision.standstill import StandstillWatch, Watched
from mp_optim.precision.step_grads import StepGrads
from mp_optim.precision.verdict import Verdict, decide
from mp_optim.slots.interrupted_step import StepMark
from mp_optim.update import choose_backend


class Stepped(Watched, Protocol):
    """What is asked of the optimizer that is stepped."""

    config: OptimizerConfig
    grad_scaler: MegatronGradScaler | None
    step_mark: StepMark
    watch: StandstillWatch
    early_work: EarlyWork

    def collect_grads(self) -> StepGrads: ...
    def verdict_device(self) -> torch.device | None: ...
    def record(self, verdict: Verdict | DeviceVerdict) -> None: ...
    def settings_alike(self) -> list[SettingsAlike]: ...


class StepLoop:
    """Takes the steps of one optimizer.

    Attributes:
        counts: of steps, and of those that were skipped.
    """

    def __init__(self, stack: Stepped) -> None:
        self._stack = stack
        self._last: Verdict | DeviceVerdict = Verdict()
        self._graphed: GraphedStep | None = None
        self.counts = {"steps": 0, "skipped_steps": 0}

    # -- what has become of them ------------------------------------------------------------------

    def record(self, verdict: Verdict | DeviceVerdict) -> None:
        """Take a verdict as the last one, after the one before it is settled, and count its
        step.

        NOTE: these are the counters of a stack, and who has them. Here: ``steps``, and
        ``skipped_steps`` (of a device verdict only when it is settled); each part of a composite
        counts its own, and ``metrics`` shows the first's. The step numbers of slots are the rule's:
        a step that the host skips never reaches it; one that the device may skip is counted as
        taken, and ``RuleOptimizer.settle`` takes it back; a speculated one is counted when it is
        published; the rehearsal of a CUDA graph, in ``_Attempt``, only if it comes to a replay.
        Loss scale, growth and hysteresis are the grad scaler's, for which a step that was skipped
        for a threshold is clean; skips in a row the ``StandstillWatch``'s; outcomes of predictions
        ``SpeculativeHostStepper``'s; captures and replays, skipped or not, ``GraphedStep``'s.
        """
        self.settle()
        self._last = verdict
        self.counts["steps"] += 1
        if isinstance(verdict, Verdict):
            self.counts["skipped_steps"] += verdict.skip

    def settle(self) -> Verdict:
        """The last verdict, and its step in the counts; waits for the device, once.

        Raises:
            ValueError: the ranks disagreed, saying about what; nothing was stepped.
        """
        if isinstance(self._last, DeviceVerdict):
            self._last = self._last.settle()
            self.counts["skipped_steps"] += self._last.skip
            if self._last.disagrees:
                self._raise_disagreement()
        return self._last

    def _raise_disagreement(self) -> NoReturn:
        self._stack.early_work.discard()
        raise disagreement(self._stack.settings_alike())

    def graph_notes(self) -> tuple[str, ...]:
        """How CUDA graphs do, in words."""
        return () if self._graphed is None else (self._graphed.note,)

    def graph_metrics(self) -> dict[str, float]:
        """How often they were captured and replayed."""
        graphed = self._graphed
        if graphed is None:
            return {}
        return {"graph_captures": graphed.captures, "graph_replays": graphed.replays}

    # -- the step ---------------------------------------------------------------------------------

    def take(self) -> Verdict | DeviceVerdict:
        """One step."""
        return (
            self._by_graph()
            if self._stack.config.optimizer_cuda_graph
            else self._eagerly()
        )

    def _eagerly(self) -> Verdict | DeviceVerdict:
        with self._timed("optimizer-clip-main-grad"):
            grads = self._stack.collect_grads()
            verdict = self._decide(grads)
        with self._timed("optimizer-inner-step"):
            self._stack.record(verdict)
            grads.apply(verdict)
        return verdict

    def _decide(self, grads: StepGrads) -> Verdict | DeviceVerdict:
        stack, inv_scale = self._stack, self._inv_scale
        measurement, device = grads.sums(), stack.verdict_device()
        stack.watch.see_gradients(stack, grads.has_any())
        scalars = [
            *measurement.sums.values(),
            *([] if inv_scale is None else [inv_scale]),
        ]
        if device is not None and all(value.device == device for value in scalars):
            # whatever reads the verdict is on the device: nothing waits for it
            return decide_on_device(measurement, inv_scale, stack.config)
        verdict = decide(measurement, inv_scale, stack.config)
        if verdict.disagrees:
            self._raise_disagreement()
        return verdict

    def _by_graph(self) -> Verdict | DeviceVerdict:
        self.settle()
        stack, device, scaler = (
            self._stack,
            self._stack.verdict_device(),
            self._stack.grad_scaler,
        )
        if device is None or (
            scaler is not None and scaler.present_scale.device != device
        ):
            # a group was added that is stepped elsewhere, or the scaler was replaced
            return self._eagerly()
        if self._graphed is None:
            backend, _ = choose_backend(stack.config.fused_backend, device)
            self._graphed = GraphedStep(device, backend)
        grads = stack.collect_grads()
        stack.watch.see_gradients(stack, grads.has_any())
        return self._graphed.step(
            StepToCapture(
                grads,
                lambda: form(grads.sums(), self._inv_scale, stack.config),
                stack.record,
                stack.step_mark,
            )
        )

    @property
    def _inv_scale(self) -> Tensor | None:
        scaler = self._stack.grad_scaler
        return None if scaler is None else scaler.inv_scale

    @contextmanager
    def _timed(self, name: str) -> Iterator[None]:
        config = self._stack.config
        if config.timers is None:
            yield
            return
        timer = config.timers(name, log_level=1)
        timer.start(barrier=config.barrier_with_L1_time)
        try:
            yield
        finally:
            timer.stop()
