"""A step of a stack, phase by phase: collect, measure, agree, decide, apply; and what follows.

The way of one step, from here to the kernel (FSDP2, offload and fp16 take no other):

<<<<<<< HEAD
1. :func:`take_step` here; ``_by_graph`` is the same with a CUDA graph.
2. ``precision/wrapped_optimizer.py``: ``WrappedOptimizer.collect_grads`` makes settings the same
   above and below, checks them, follows the model and takes the gradients, of a DTensor what this
   rank has (``local_grad`` in ``slots/tensors.py``). ``AgreedSums.measure`` takes sums of squares
   (those of gradients in host memory were taken in backward with ``overlap``) and adds them up over
   the ranks that share the DTensors. Back here, ``_decide`` makes a verdict of them, which holds
   the inverse loss scale times the clip coefficient. ``WrappedGrads.step`` hands each slot's
   gradient with this multiplier to ``step_slots`` of the executor.
3. With offload that is ``PlacedExecutor.step_slots`` in ``placement/placed.py``. What is stepped on
   the host goes to ``Stepper.step_buckets`` in ``placement/stepper.py``: gradients down, step,
   parameters up. The rest goes on as in 4.
4. ``RuleExecutor.step_slots`` in ``update/executor.py``, of either place, forms launches, or uses
   those of the last step again; ``carry_out`` has the rule call the kernel of its backend:
   ``AdamRule.apply`` in ``update/adam.py``, say, ``NativeBackend.adam``.
=======
1. :func:`take_step` here: ``_eagerly`` is the step, ``_by_graph`` the same with a CUDA graph.
2. ``precision/wrapped_optimizer.py``: ``WrappedOptimizer.collect_grads`` follows the model and
   takes the gradients, of a DTensor what this rank has (``local_grad`` in ``slots/tensors.py``);
   ``AgreedSums.measure`` in ``agreed_sums.py`` takes sums of squares (those of gradients in host
   memory were taken in backward with ``overlap``) and adds them up over the ranks that share the
   DTensors. Back here, ``_decide`` makes a verdict of them, which holds the inverse loss scale
   times the clip coefficient. ``WrappedGrads.apply`` in ``wrapped_grads.py`` hands each slot's
   gradient with this multiplier to ``step_slots`` of the inner optimizer.
3. With offload that is ``HybridDeviceOptimizer.step_slots`` in ``placement/hybrid.py``. What is
   stepped on the host goes to ``Stepper.step_buckets`` in ``placement/stepper.py`` (its
   subclasses do in backward what they can): gradients down, step, parameters up. The rest goes on
   as in 4.
4. ``RuleOptimizer.step_slots`` in ``update/executor.py``, of either place, forms launches, and
   ``carry_out`` calls the kernel of its backend: ``FusedAdam.apply`` in ``update/adam.py``, say,
   ``NativeBackend.adam``.
>>>>>>> f7580cd (Documents: stepping by composition, and what each mode means where)

How steps are counted, and what becomes of the counts of one that is skipped, is said in
:mod:`mp_optim.precision.step_grads`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import NoReturn, Protocol

import torch

from mp_optim.config import OptimizerConfig
from mp_optim.precision.backward_overlap import EarlyWork
from mp_optim.precision.device_verdict import DeviceVerdict, Formed, decide_on_device, form
from mp_optim.precision.grad_scaler import inverse_of, trackers_of
from mp_optim.precision.graph_step import GraphedStep, StepToCapture
from mp_optim.precision.settings_agreement import SettingsAlike, disagreement
from mp_optim.precision.skip_rule import RollingRule
from mp_optim.precision.standstill import StandstillWatch, Watched
from mp_optim.precision.step_grads import StepGrads
from mp_optim.precision.verdict import Verdict, decide
from mp_optim.slots.interrupted_step import StepMark
from mp_optim.update import choose_backend

_HOST = torch.device("cpu")


class Stepped(Watched, Protocol):
    """What is asked of a stack that is stepped."""

    early_work: EarlyWork
    graphed: GraphedStep | None
    skip_rule: RollingRule
    step_mark: StepMark
    watch: StandstillWatch

    def collect_grads(self) -> StepGrads: ...
    def record(self, verdict: Verdict | DeviceVerdict) -> None: ...
    def settings_alike(self) -> list[SettingsAlike]: ...
    def verdict_device(self) -> torch.device | None: ...
    def zero_grad(self) -> None: ...


def take_step(stack: Stepped) -> Verdict | DeviceVerdict:
    """Step, or skip, by a verdict on the gradients that there are."""
    config = stack.config
    if config.optimizer_cuda_graph and (device := _graph_device(stack)) is not None:
        return _by_graph(stack, device)
    if config.timers is not None:
        return _timed_step(stack)
    grads = stack.collect_grads()
    verdict = _decide(stack, grads)
    apply_verdict(stack, grads, verdict)
    return verdict


def _timed_step(stack: Stepped) -> Verdict | DeviceVerdict:
    """The same, for Megatron's timers."""
    with _timed(stack.config, "optimizer-clip-main-grad"):
        grads = stack.collect_grads()
        verdict = _decide(stack, grads)
    with _timed(stack.config, "optimizer-inner-step"):
        apply_verdict(stack, grads, verdict)
    return verdict


def _decide(stack: Stepped, grads: StepGrads) -> Verdict | DeviceVerdict:
    device, scaler = stack.verdict_device(), stack.grad_scaler
    measurement = grads.sums(on_host=device is None)
    if not grads.has_any():
        stack.watch.see_gradients(stack, False)
    inv_scale = None if scaler is None else inverse_of(scaler)
    trackers = () if scaler is None else trackers_of(scaler)
    if device is not None:
        scalars = [*measurement.sums.values(), *trackers]
        if inv_scale is not None:
            scalars.append(inv_scale)
        if all(value.device == device for value in scalars):
            # whatever reads the verdict is on the device: nothing waits for it
            rule = stack.skip_rule.begun(device)
            return decide_on_device(measurement, inv_scale, stack.config, trackers, rule)
    rule = stack.skip_rule.begun(_HOST)
    verdict = decide(measurement, inv_scale, stack.config, trackers, rule)
    if verdict.disagrees:
        refuse_disagreement(stack)
    if rule is not None:
        rule.take_on_host(verdict.norms)
    return verdict


def _graph_device(stack: Stepped) -> torch.device | None:
    """Where a CUDA graph steps; None if a group was added that is stepped elsewhere, or the scaler
    was replaced."""
    stack.counts.settle()
    device, scaler = stack.verdict_device(), stack.grad_scaler
    scale = None if scaler is None else scaler.present_scale
    return None if scale is not None and scale.device != device else device


def _by_graph(stack: Stepped, device: torch.device) -> Verdict | DeviceVerdict:
    scaler = stack.grad_scaler
    if stack.graphed is None:
        backend, _ = choose_backend(stack.config.fused_backend, device)
        stack.graphed = GraphedStep(device, backend)
    grads = stack.collect_grads()
    stack.watch.see_gradients(stack, grads.has_any())
    rule = stack.skip_rule.begun(device)

    def decide_there() -> Formed:
        inv_scale, trackers = inverse_of(scaler), trackers_of(scaler)
        return form(grads.sums(), inv_scale, stack.config, trackers, rule)

    step = StepToCapture(grads, decide_there, stack.record, stack.step_mark)
    return stack.graphed.step(step)


def apply_verdict(stack: Stepped, grads: StepGrads, verdict: Verdict | DeviceVerdict) -> None:
    """Count the step, and take it unless the verdict says skip."""
    stack.record(verdict)
    interval = stack.config.log_update_ratios_interval
    if interval and stack.counts.steps % interval == 0:
        with stack.health.watching(grads, stack.counts.steps):
            grads.apply(verdict)
    else:
        grads.apply(verdict)


def scale_follows(stack: Stepped, verdict: Verdict | DeviceVerdict) -> None:
    """The loss scale grows or backs off: the last that is written within the step's mark."""
    if stack.grad_scaler is not None:
        stack.step_mark.touch()
        stack.grad_scaler.update(verdict.found_inf)
        stack.early_work.remember_scale()


def conclude(stack: Stepped, verdict: Verdict | DeviceVerdict) -> None:
    """The step is over, and its mark is off: say what is to be said of it."""
    stack.watch.see_verdict(stack, verdict)
    stack.health.see(verdict)
    if stack.config.release_gradients:
        stack.zero_grad()  # what is left, so that all of them are gone alike


def refuse_disagreement(stack: Stepped) -> NoReturn:
    """Ranks that share parameters would step them otherwise.

    Raises:
        ValueError: naming what they differ in.
    """
    stack.early_work.discard()
    raise disagreement(stack.settings_alike())


@contextmanager
def _timed(config: OptimizerConfig, name: str) -> Iterator[None]:
    assert config.timers is not None
    timer = config.timers(name, log_level=1)
    timer.start(barrier=config.barrier_with_L1_time)
    try:
        yield
    finally:
        timer.stop()
