"""One step of a stack, from top to bottom.

1. Collect: finish the work that began during backward (``offload/backward_scheduler.py``), refresh
main params whose parameters were replaced or written since the last step, and collect the
gradients.
2. Measure and agree: read each gradient once (``measure`` in ``grad_norm.py``), and reduce a few
scalars over the ranks (``agree`` in ``grad_norm.py``).
3. Decide: form multipliers, or skip the step (``clip_and_skip.py``), and count the step. If no host
needs the verdict, the device decides.
4. Run: the executor steps the slots that have a gradient.
5. Record: update the loss scale, and call the observers.

A stack is one precision wrapper (:class:`WrappedGrads`), or a composite of stacks
(:class:`GradsOfMembers`). ``clip_and_skip.py`` describes how a skipped step is counted.
"""

from __future__ import annotations

import functools
import operator
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from mp_optim.config import OptimizerConfig
from mp_optim.core import CachedTensorList, ParamGroups, SlotUpdates, all_params
from mp_optim.core.executor import Executor
from mp_optim.core.quantized import quantize_
from mp_optim.host.calls import in_own_modes
from mp_optim.mixed_precision.clip_and_skip import (
    DISAGREEMENT,
    DeviceVerdict,
    StepResult,
    Verdict,
    decide,
    decide_on_device,
)
from mp_optim.mixed_precision.grad_norm import (
    EXCLUDED,
    MAIN_NORM,
    Measurement,
    NormKey,
    agree,
    count_zeros,
    measure,
    measure_rest,
    of_parameters,
    pairwise_sum_on_host,
    total_by_key,
)
from mp_optim.mixed_precision.main_params import MainParams
from mp_optim.mixed_precision.observer import Observer
from mp_optim.mixed_precision.slot_table import SlotTable
from mp_optim.offload.backward_scheduler import BackwardScheduler, CollectedGrads, WorkerError
from mp_optim.process_groups.missing_ranks import all_gather
from mp_optim.process_groups.process_groups import ProcessGroups

_HOST = torch.device("cpu")
_UNTIMED = nullcontext()
AnyVerdict = Verdict | DeviceVerdict
"""A verdict that the host knows, or a verdict that only the device knows yet."""


@in_own_modes
def take_step(
    stack: Any, prepared: tuple[StepGrads, AnyVerdict, Observer | None] | None = None
) -> StepResult:
    """Take one step of a stack, or skip it.

    Args:
        stack: the outermost optimizer, a :class:`mp_optim.MegatronOptimizer`.
        prepared: gradients, verdict, and the observer that judged the step, from a caller that
            collects, measures and decides itself. None to do all three here.

    Raises:
        TypeError, ValueError: a gradient or a hyperparameter is not supported; the message has its
            name. Nothing was stepped.
        BrokenOffError: the previous step was interrupted.
    """
    config = stack.config
    with stack.step_mark.step(stack):
        if prepared is None:
            with _UNTIMED if config.timers is None else _timed(config, "optimizer-clip-main-grad"):
                try:
                    grads = stack.grads_of(stack)
                # If the worker of one wrapper fails, discard the jobs of all wrappers. The next
                # step() repeats these jobs.
                except WorkerError:
                    stack.discard_backward_work()
                    raise
                verdict, judge = _decide(stack, grads)
        else:
            grads, verdict, judge = prepared
        # Count outside the timer, because counting waits for the device's verdict on the last step.
        stack.counts.record(verdict, stack.observers, judge)
        with _UNTIMED if config.timers is None else _timed(config, "optimizer-inner-step"):
            # Phase 4. RuleExecutor builds all launches in plan(), so an error there leaves all
            # parameters unstepped. Executors of offloaded slots and of foreign optimizers build
            # launches in run(), when other slots may have been stepped.
            grads.plan(verdict)
            grads.run(verdict)
        if stack.grad_scaler is not None:
            _update_scale(stack, verdict)
    return _record(stack, grads, verdict)


@in_own_modes
def take_steps(
    stacks: Mapping[str, Any], errors: dict[str, Exception], results: dict[str, StepResult]
) -> None:
    """Step several precision wrappers. Each phase runs for all wrappers before the next phase
    begins.

    One pass reads the gradients of all wrappers. An error of one wrapper does not stop the others.

    Args:
        stacks: the wrappers by name. ``timers`` of their configs are not used.
        errors: dict to which errors are added, by name.
        results: dict to which results are added, by name, also before an interrupt is raised.
    """
    collected: dict[str, WrappedGrads] = {}
    decided: dict[str, tuple[AnyVerdict, Observer | None]] = {}
    running: dict[str, Iterator[None]] = {}
    for name, stack in stacks.items():
        with errors_kept(errors, name), stack.step_mark.step(stack):
            collected[name] = stack.grads_of(stack)
    _measure_together(list(collected.values()))
    for name, grads in collected.items():
        with errors_kept(errors, name), stacks[name].step_mark.step(stacks[name]):
            decided[name] = _decide(stacks[name], grads)
    for name, (verdict, judge) in decided.items():
        with errors_kept(errors, name), stacks[name].step_mark.step(stacks[name]):
            stacks[name].counts.record(verdict, stacks[name].observers, judge)
            collected[name].plan(verdict)
            running[name] = _running(name, stacks[name], collected[name], verdict, results)
    _run_together(running, errors)


def _running(
    name: str, stack: Any, grads: WrappedGrads, verdict: AnyVerdict, results: dict[str, StepResult]
) -> Iterator[None]:
    """Run phases 4 and 5 of one wrapper in four parts: prepare kernels, call kernels, finish, and
    record. Yield between the parts, so that the caller can run each part for several wrappers."""
    with stack.step_mark.step(stack):
        kernels: list[Callable[[], None]] = []
        grads.launch(verdict, kernels)
        yield
        for kernel in kernels:
            kernel()
        yield
        grads.finish(verdict)
        if stack.grad_scaler is not None:
            _update_scale(stack, verdict)
    yield
    results[name] = _record(stack, grads, verdict)


def _run_together(running: Mapping[str, Iterator[None]], errors: dict[str, Exception]) -> None:
    """Run phases 4 and 5 of several wrappers, each part for all wrappers before the next part.

    The kernels of all wrappers run one after another. A kernel evicts the interpreter's data from
    the CPU's caches, so Python code between two kernels would take several times as long.

    An interrupt, such as KeyboardInterrupt, ends only the wrapper that runs. No other wrapper
    begins after it; those that have begun are completed, and then the interrupt is raised.

    Args:
        running: a result of :func:`_running` for each wrapper, by name.
        errors: dict to which errors are added, by name.
    """
    names, interrupt = list(running), None
    try:
        for part in range(4):
            begun = []
            for name in names:
                if part == 0 and interrupt is not None:
                    break
                try:
                    next(running[name], None)
                    begun.append(name)
                except Exception as error:
                    errors[name] = error
                except BaseException as error:
                    interrupt = error
            names = begun
    finally:
        # Wrappers are unfinished only if an interrupt came between two calls of next().
        for each in running.values():
            each.close()  # type: ignore[attr-defined]
    if interrupt is not None:
        raise interrupt


@contextmanager
def errors_kept(errors: dict[str, Exception], name: str) -> Iterator[None]:
    """Store an exception of the ``with`` block in ``errors`` instead of raising the exception."""
    try:
        yield
    except Exception as error:
        errors[name] = error


# -- phases ---------------------------------------------------------------------------------------


def _decide(stack: Any, grads: StepGrads) -> tuple[AnyVerdict, Observer | None]:
    """Return the verdict on a step (phases 2 and 3), and the observer that judged the step on the
    host, if any."""
    config, device = stack.config, grads.verdict_device
    measurement = grads.sums(on_host=device is None)
    # ``device`` is where kernels can read the verdict (None: nowhere). If the measurement and the
    # loss scale are there, too, form the verdict there, so that the host does not wait.
    scaling = () if stack.grad_scaler is None else (stack.grad_scaler.inv_scale,)
    if device is not None:
        scalars = [*measurement.sums.values(), *scaling]
        if all(value.device == device for value in scalars):
            judge = stack.observers.judge_on(device) if stack.observers.judges else None
            return decide_on_device(measurement, scaling, config, judge), None
    judge = stack.observers.judge_on(_HOST) if stack.observers.judges else None
    verdict = decide(measurement, scaling, config, judge)
    if verdict.cause == DISAGREEMENT:
        stack.refuse_disagreement()
    return verdict, judge


def _update_scale(stack: Any, verdict: AnyVerdict) -> None:
    """Adapt the loss scale (beginning of phase 5)."""
    # The loss scale is the last write of a step, so an earlier interrupt leaves the stack marked as
    # inconsistent.
    stack.step_mark.touch()
    stack.grad_scaler.update(verdict.found_inf)
    stack.remember_scale()


def _record(stack: Any, grads: StepGrads, verdict: AnyVerdict) -> StepResult:
    """Call the observers, and return the result (end of phase 5)."""
    for after_step in stack.observers.after_step:
        after_step(grads, verdict)
    if stack.config.release_gradients:
        # No gradient may stay on the device after a step, so drop those that backward did not
        # release, too.
        stack.zero_grad()
    return verdict.result


@contextmanager
def _timed(config: OptimizerConfig, name: str) -> Iterator[None]:
    assert config.timers is not None
    timer = config.timers(name, log_level=1)
    timer.start(barrier=config.barrier_with_L1_time)
    try:
        yield
    finally:
        timer.stop()


# -- gradients of one step ------------------------------------------------------------------------


class StepGrads(ABC):
    """The gradients of one step, from all wrappers of a stack. This object frees the gradients when
    the step ends.

    Attributes:
        has_any: True if any parameter has a gradient.
        has_slots: True if the stack has any parameter.
        verdict_device: the device on which kernels step every slot and read multipliers; None if
            the host needs the multipliers as numbers.

    Raises:
        WorkerError: a job during backward failed; the caller discards the jobs of all workers.
        TypeError, ValueError: a gradient or a hyperparameter is not supported; the message names
            the parameter or the hyperparameter.
    """

    has_any: bool
    has_slots: bool
    verdict_device: torch.device | None

    @abstractmethod
    def sums(self, on_host: bool = False) -> Measurement:
        """Return the sums of squares of the gradients, summed over the ranks that agree on a norm.
        Collective.

        Args:
            on_host: True if the host forms the verdict. The sums may then be numbers instead of
                tensors.
        """

    @abstractmethod
    def plan(self, verdict: AnyVerdict) -> None:
        """Prepare the launches of :meth:`run`, if the executor supports that. No parameter is
        stepped."""

    @abstractmethod
    def run(self, verdict: AnyVerdict) -> None:
        """Step the slots that have a gradient. Do not step if the verdict has a cause of a skip."""


class GradsOfMembers(StepGrads):
    """The gradients of a composite's members, which share one measurement and one verdict.

    Args:
        composite: a :class:`~mp_optim.zero.composite.CompositeOptimizer`.
    """

    def __init__(self, composite: Any) -> None:
        members: list[StepGrads] = [member.grads_of(member) for member in composite.members]
        self._members = members
        self.has_any = any(member.has_any for member in members)
        self.has_slots = any(member.has_slots for member in members)
        devices = {member.verdict_device for member in members if member.has_slots}
        self.verdict_device = devices.pop() if len(devices) == 1 else None

    def sums(self, on_host: bool = False) -> Measurement:
        return functools.reduce(operator.add, (member.sums() for member in self._members))

    def plan(self, verdict: AnyVerdict) -> None:
        for member in self._members:
            member.plan(verdict)

    def run(self, verdict: AnyVerdict) -> None:
        for member in self._members:
            member.run(verdict)


@dataclass(eq=False)
class Engine:
    """The objects with which a precision wrapper steps, for the wrapper's life.

    Attributes:
        optimizer: the inner optimizer that the caller gave.
        executor: the executor of that optimizer.
        mains: the main params.
        table: the slot table of ``mains``.
        overlap: scheduler of copies and steps during backward; None with ``offload_mode="sync"``.
        config: see :class:`mp_optim.OptimizerConfig`.
        param_groups: the wrapper's live groups.
        process_groups: the ranks that agree on the gradient norm.
        norm_names: names of the norm groups on all ranks; None until the ranks have exchanged them.
        has_compared: True if the ranks have compared their settings.
        keeps_param_sums: True if steps keep the sum of squares of each parameter. The first step
            decides.
        compared: lines, in addition to settings, that ranks with the same parameters compare in
            each step.
    """

    optimizer: torch.optim.Optimizer
    executor: Executor
    mains: MainParams
    table: SlotTable
    overlap: BackwardScheduler | None
    config: OptimizerConfig
    param_groups: ParamGroups
    process_groups: ProcessGroups
    norm_names: list[str] | None = None
    has_compared: bool = False
    keeps_param_sums: bool = False
    compared: Sequence[str] = ()

    def agreed_sums(
        self,
        grads: Sequence[Tensor],
        keys: Sequence[NormKey],
        indices: Sequence[int],
        *,
        all_keys: Sequence[NormKey] = (),
        over: tuple[ProcessGroup, ...] = (),
        known: Sequence[float | None] = (),
        held: Sequence[bool] = (),
        on_host: bool = False,
        measured: Tensor | None = None,
    ) -> Measurement:
        """Measure gradients, and agree with the other ranks on the sums of squares. Collective.

        Args:
            grads: local gradients.
            keys: norm key of each gradient.
            indices: index of each gradient's slot in the table.
            all_keys: every norm key of the model, also keys without a gradient now, so that all
                ranks reduce the same scalars; by default the keys of the table.
            over: ranks over which the gradients are split although the parameters are not.
            known: sum of squares of each gradient, or None for a gradient that is not measured yet;
                empty if no sum is known.
            held: for each gradient, True if it is a copy in host memory; empty without such copies.
            on_host: True if the result may have numbers instead of tensors.
            measured: sum of squares of each gradient, FP64, shape (gradients,); None to measure.
        """
        config, common = self.config, self.table.reuse("common", self.table.settings_alike)
        device, ranks = common.device, self.process_groups.grad_stats
        all_keys = all_keys or common.keys
        if not self.has_compared:
            common.check(config, self.param_groups)
            self.has_compared = True
            # Read the setting once. If one rank changed it later, the ranks would call different
            # collectives. The reduction of the norm reports such a change.
            self.keeps_param_sums = bool(config.log_param_grad_norms)
        if measured is not None:
            each = measured
        elif known:
            each = measure_rest(grads, known, held, config.fused_backend, device)
        else:
            each = measure(grads, config.fused_backend, device)
        is_alone = ranks is None and len(all_keys) == 1 and not all_keys[0].shard_groups
        are_more = config.log_num_zeros_in_grad or self.keeps_param_sums
        if on_host and is_alone and not are_more and each.device.type == "cpu":
            name = all_keys[0].group
            return Measurement(
                known={EXCLUDED: 0.0, MAIN_NORM: 0.0, name: pairwise_sum_on_host(each)}
            )
        sums = total_by_key(each, keys, all_keys, config.fused_backend)
        zeros = params = None
        if config.log_num_zeros_in_grad:
            zeros = count_zeros(grads, keys, all_keys, device)
        if self.norm_names is None or ranks is None:
            names = {MAIN_NORM, EXCLUDED, *(key.group for key in all_keys)}
            if ranks is not None:
                names.update(*all_gather(ranks, "comparing the names of norm groups", names))
            self.norm_names = sorted(names)
        numbers = common.numbers(config, self.param_groups, keys, all_keys, over, self.compared)
        if self.keeps_param_sums:
            split_over = [(*over, *split) for split in self.table.split_over]
            params = of_parameters(each, indices, split_over)
        return agree(sums, zeros, ranks, self.norm_names, numbers, common.copies, params)


class WrappedGrads(StepGrads):
    """The gradients of one precision wrapper's parameters. The constructor first refreshes the
    wrapper's settings and main params.

    Args:
        wrapper: the :class:`~mp_optim.mixed_precision.wrapped_optimizer.WrappedOptimizer`.

    Raises:
        TypeError, ValueError: a gradient or a hyperparameter is not supported; the message has its
            name.
    """

    measured: Tensor | None = None
    """Sum of squares of each gradient, FP64, if :func:`take_steps` measured the gradients of
    several wrappers in one pass; else None."""

    def __init__(self, wrapper: Any) -> None:
        engine: Engine = wrapper.engine
        self._wrapper, self._engine, self._planned = wrapper, engine, None
        overlap, mains, table = engine.overlap, engine.mains, engine.table
        self._in_backward = CollectedGrads({}, {}) if overlap is None else overlap.collect()
        wrapper.shared_settings.exchange(engine.param_groups, wrapper.groups_below)
        engine.executor.check_groups()
        engine.executor.follow_memory()
        params = all_params(engine.param_groups)
        if changed := table.seen.changed(params):
            mains.follow_changed(changed, params)
        # Step kernels compare most weights with main params, so compare only the others here.
        if by_sums := table.reuse("by_sums", mains.by_sums):
            mains.take_values(sorted(by_sums))
        if mains.agreement.expected:
            # The weights were loaded after their remainders, so the remainders can be checked now.
            mains.follow()
            mains.check_remainders(None)
        self._columns, self._grads = table.grads(wrapper.slot_name, self._in_backward.held)
        if not all(table.has_main):
            mains.make_trainable(self._columns.indices)
            self._columns = table.select(self._columns.indices)
        self.has_any, self.has_slots = bool(self._columns.indices), bool(table.slots)
        self.verdict_device = engine.executor.verdict_device()

    def sums(self, on_host: bool = False) -> Measurement:
        some, (held, sums) = self._columns, self._in_backward
        return self._engine.agreed_sums(
            *(self._grads, some.keys, some.indices),
            known=list(map(sums.get, some.slots)) if sums or held else (),
            held=[slot in held for slot in some.slots] if sums or held else (),
            on_host=on_host,
            measured=self.measured,
        )

    def plan(self, verdict: AnyVerdict) -> None:
        if verdict.cause:
            return
        engine, some, multipliers = self._engine, self._columns, verdict.multipliers
        if some.group is None:
            factors = [multipliers[key.group] for key in some.keys]
        else:
            factors = [multipliers[some.group]] * len(some.keys)
        changed: Sequence[Tensor | None] = ()
        for observer in engine.mains.observers:
            changed = observer.before_launch(some.slots, some.indices)
        updates = SlotUpdates(some.slots, self._grads, factors, some.outputs, changed)
        if engine.executor.clips and (norm := verdict.norms.get(MAIN_NORM)) is not None:
            limit = engine.config.clip_grad
            updates = engine.executor.clipped(updates, min(norm, limit) if limit > 0 else norm)
        self._planned = engine.executor.plan_step(updates)

    def run(self, verdict: AnyVerdict) -> None:
        self.launch(verdict)
        self.finish(verdict)

    def launch(self, verdict: AnyVerdict, queue: list[Callable[[], None]] | None = None) -> None:
        """The first part of :meth:`run`: launch kernels, or append kernels to ``queue``."""
        if not verdict.cause:
            self._engine.executor.run_step(self._planned, queue)
        elif self._engine.overlap is not None:
            self._engine.overlap.skip()

    def finish(self, verdict: AnyVerdict) -> None:
        """The second part of :meth:`run`, after all kernels were called."""
        if verdict.cause:
            return
        engine, some = self._engine, self._columns
        executor, mains, table = engine.executor, engine.mains, engine.table
        executor.finish_step()
        if executor.writes_settings:
            self._wrapper.share_settings()
        if any(table.quantized):
            self._wrapper.step_mark.touch()
            for index in some.indices:
                if table.quantized[index]:
                    quantize_(table.params[index], executor.main_param(table.slots[index]))
        if by_sums := table.reuse("by_sums", mains.by_sums):
            chosen = [index for index in some.indices if index in by_sums]
            mains.written.note(chosen, [table.weight_at(index) for index in chosen])
        for observer in mains.observers:
            observer.after_launch()


def _measure_together(several: Sequence[WrappedGrads]) -> None:
    """Compute the sums of squares of several wrappers' gradients in one pass for each backend and
    device. The results are bitwise equal to those of one pass per wrapper.

    Leave out a wrapper if one of its gradients was handled during backward.
    """
    alike: dict[tuple[str, torch.device], list[tuple[WrappedGrads, CachedTensorList]]] = {}
    for each in several:
        engine, grads = each._engine, each._grads
        if grads and not any(each._in_backward):
            common = engine.table.reuse("common", engine.table.settings_alike)
            kind = engine.config.fused_backend, common.device
            alike.setdefault(kind, []).append((each, grads))
    for (backend, device), members in alike.items():
        every = CachedTensorList.joined([grads for _, grads in members])
        sizes = [len(grads) for _, grads in members]
        parts = torch.split(measure(every, backend, device), sizes)
        for (each, _), part in zip(members, parts, strict=True):
            each.measured = part
