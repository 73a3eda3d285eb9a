"""One step of a stack, from top to bottom.

1. Finish the work that backward began (``offload/backward_scheduler.py``).
2. Refresh what was replaced, written or edited since the last step, and collect the gradients.
3. Measure the gradients: one read of each (``measure`` in ``grad_norm.py``).
4. Agree with the other ranks: one reduction of a few scalars (``agree`` in ``grad_norm.py``).
5. Decide: multipliers, or a skip (``clip_and_skip.py``); on the device where no host must know.
6. Run: the executor steps the slots that have a gradient.
7. Record: counts, loss scale, observers.

A stack is one precision wrapper (:class:`WrappedGrads`), or a composite of stacks
(:class:`GradsOfMembers`). How a skipped step is counted is written in ``clip_and_skip.py``.
"""

from __future__ import annotations

import functools
import operator
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from mp_optim.config import OptimizerConfig
from mp_optim.core import Multiplier, ParamGroups, SlotUpdates
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
    norm_groups,
    of_parameters,
    pairwise_sum_on_host,
    total_by_key,
)
from mp_optim.mixed_precision.main_params import MainParams
from mp_optim.mixed_precision.observer import Observer
from mp_optim.mixed_precision.slot_table import SlotTable
from mp_optim.offload.backward_scheduler import BackwardScheduler, CollectedGrads, WorkerError
from mp_optim.process_groups.process_groups import ProcessGroups

_HOST = torch.device("cpu")
_UNTIMED = nullcontext()


@in_own_modes
def take_step(
    stack: Any, prepared: tuple[StepGrads, Verdict, Observer | None] | None = None
) -> StepResult:
    """Take one step of a stack, or skip it.

    Args:
        stack: the outermost optimizer, a :class:`mp_optim.MegatronOptimizer`.
        prepared: gradients, verdict and judge of a caller that collects, measures and decides
            itself.

    Raises:
        TypeError, ValueError: a gradient or a hyperparameter is not supported, naming it; nothing
            was stepped.
        BrokenOffError: the previous step was interrupted.
    """
    config, observers = stack.config, stack.observers
    with stack.step_mark.step(stack):
        if prepared is None:
            with _UNTIMED if config.timers is None else _timed(config, "optimizer-clip-main-grad"):
                # finish the work of backward, refresh, collect
                try:
                    grads = stack.grads_of(stack)
                except WorkerError:  # every worker's job runs again in this process
                    stack.discard_backward_work()
                    raise
                # measure, agree
                device = grads.verdict_device
                measurement = grads.sums(on_host=device is None)
                # decide
                verdict, judge = _decide(stack, measurement, device)
        else:
            grads, verdict, judge = prepared
        for before_step in observers.before_step:
            before_step()
        if judge is not None and MAIN_NORM in verdict.norms:
            judge.take(torch.tensor(verdict.norms[MAIN_NORM], dtype=torch.float64, device=_HOST))
        stack.counts.record(verdict)
        # run
        with _UNTIMED if config.timers is None else _timed(config, "optimizer-inner-step"):
            if verdict.cause:
                grads.skip()
            else:
                norm, limit = verdict.norms.get(MAIN_NORM), config.clip_grad
                clipped = min(norm, limit) if norm is not None and limit > 0 else norm
                grads.step(verdict.multipliers, clipped)
        # record; the loss scale is the last write within the mark
        if stack.grad_scaler is not None:
            stack.step_mark.touch()
            stack.grad_scaler.update(verdict.found_inf)
            stack.remember_scale()
    for after_step in observers.after_step:
        after_step(grads, verdict)
    if config.release_gradients:
        stack.zero_grad()  # released gradients are None; set the others to None, too
    return verdict.result


def _decide(
    stack: Any, measurement: Measurement, device: torch.device | None
) -> tuple[Verdict | DeviceVerdict, Observer | None]:
    """Return the verdict, and the observer that judged it on the host.

    Args:
        device: the device on which kernels read the verdict, or None. The verdict is formed there
            if the measurement and the loss scale are there, so that no host waits for it.
    """
    config = stack.config
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


@contextmanager
def _timed(config: OptimizerConfig, name: str) -> Iterator[None]:
    """Time a phase of a step with Megatron's timers."""
    assert config.timers is not None
    timer = config.timers(name, log_level=1)
    timer.start(barrier=config.barrier_with_L1_time)
    try:
        yield
    finally:
        timer.stop()


# -- gradients of one step ------------------------------------------------------------------------


class StepGrads(ABC):
    """Gradients that a stack's optimizers collect for one step, freed with this object.

    Raises:
        WorkerError: work during backward failed; the caller discards the work of all workers.
        TypeError, ValueError: a gradient or a hyperparameter is not supported, naming it.

    Attributes:
        has_any: True if any parameter has a gradient.
        has_slots: True if there is any parameter.
        verdict_device: the one device on which every slot is stepped by kernels that read
            multipliers there; None if the verdict is needed as numbers.
    """

    has_any: bool
    has_slots: bool
    verdict_device: torch.device | None

    @abstractmethod
    def sums(self, on_host: bool = False) -> Measurement:
        """Return the sums of squares, agreed with the other ranks.

        Args:
            on_host: the verdict is formed on the host, so sums may be numbers.
        """

    @abstractmethod
    def skip(self) -> None:
        """Step nothing, as the host decided."""

    @abstractmethod
    def step(self, multipliers: Mapping[str, Multiplier], grad_norm: float | None = None) -> None:
        """Step the slots that have a gradient.

        Args:
            multipliers: by norm group.
            grad_norm: after clipping, for rules that clip by it themselves; None if it is not known
                on the host.
        """


class GradsOfMembers(StepGrads):
    """Gradients of a composite's members, which have one measurement and one verdict."""

    def __init__(self, composite: Any) -> None:
        members: list[StepGrads] = [member.grads_of(member) for member in composite.members]
        self._members = members
        self.has_any = any(member.has_any for member in members)
        self.has_slots = any(member.has_slots for member in members)
        devices = {member.verdict_device for member in members if member.has_slots}
        self.verdict_device = devices.pop() if len(devices) == 1 else None

    def sums(self, on_host: bool = False) -> Measurement:
        return functools.reduce(operator.add, (member.sums() for member in self._members))

    def skip(self) -> None:
        for member in self._members:
            member.skip()

    def step(self, multipliers: Mapping[str, Multiplier], grad_norm: float | None = None) -> None:
        for member in self._members:
            member.step(multipliers, grad_norm)


@dataclass(eq=False)
class Engine:
    """The parts with which a precision wrapper steps, for the wrapper's life.

    Attributes:
        optimizer: the inner optimizer, as it was given.
        executor: the executor of that optimizer.
        mains: main params.
        table: columns of all slots, as ``mains`` saw them last.
        overlap: work during backward; None without it.
        config: see :class:`mp_optim.OptimizerConfig`.
        param_groups: the wrapper's live groups.
        process_groups: ranks that agree on the norm.
        norm_names: norm groups that any rank has; None until ranks have exchanged them.
        has_compared: True if ranks have compared their settings.
        keeps_param_sums: True if steps keep the sums of single parameters, decided by the first.
        compared: lines that ranks which share parameters compare in each step, besides settings.
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
    ) -> Measurement:
        """Measure gradients, and agree with the other ranks on the sums of squares. Collective.

        Args:
            grads: local gradients.
            keys: norm key of each gradient.
            indices: index of each gradient's slot in the table.
            all_keys: every norm key of the model, also keys without a gradient now, so that all
                ranks reduce alike; by default those of the table.
            over: ranks over which the gradients are split although the parameters are not.
            known: see :func:`~mp_optim.mixed_precision.grad_norm.measure_rest`; empty if no sum is
                known.
            held: the same.
            on_host: numbers may be returned.
        """
        config, common = self.config, self.table.common
        device, ranks = common.device, self.process_groups.grad_stats
        all_keys = all_keys or common.keys
        if not self.has_compared:
            common.check(config, self.param_groups)
            self.has_compared = True
            # Later changes on one rank are named by the reduction of the norm. They must not change
            # which collectives this rank takes part in.
            self.keeps_param_sums = bool(config.log_param_grad_norms)
        if known:
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
            self.norm_names = norm_groups(all_keys, ranks)
        numbers = common.numbers(config, self.param_groups, keys, all_keys, over, self.compared)
        if self.keeps_param_sums:
            split_over = [(*over, *split) for split in self.table.split_over]
            params = of_parameters(each, indices, split_over)
        return agree(sums, zeros, ranks, self.norm_names, numbers, common.copies, params)


class WrappedGrads(StepGrads):
    """Gradients of one precision wrapper's parameters.

    Args:
        wrapper: the :class:`~mp_optim.mixed_precision.wrapped_optimizer.WrappedOptimizer`. Its
            settings and main params are refreshed first.

    Raises:
        TypeError, ValueError: a gradient or a hyperparameter is not supported, naming it.
    """

    def __init__(self, wrapper: Any) -> None:
        engine: Engine = wrapper.engine
        self._wrapper, self._engine = wrapper, engine
        overlap, mains, table = engine.overlap, engine.mains, engine.table
        self._in_backward = CollectedGrads({}, {}) if overlap is None else overlap.collect()
        wrapper.shared_settings.exchange(engine.param_groups, wrapper.groups_below)
        engine.executor.check_groups()
        engine.executor.follow_memory()
        mains.follow_for_step()
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
        )

    def skip(self) -> None:
        if self._engine.overlap is not None:
            self._engine.overlap.skip()

    def step(self, multipliers: Mapping[str, Multiplier], grad_norm: float | None = None) -> None:
        engine, some = self._engine, self._columns
        executor, mains, table = engine.executor, engine.mains, engine.table
        if some.group is None:
            factors = [multipliers[key.group] for key in some.keys]
        else:
            factors = [multipliers[some.group]] * len(some.keys)
        changed: Sequence[Tensor | None] = ()
        for observer in mains.observers:
            changed = observer.before_launch(some.slots, some.indices)
        updates = SlotUpdates(some.slots, self._grads, factors, some.outputs, changed)
        if executor.clips and grad_norm is not None:
            updates = executor.clipped(updates, grad_norm)
        executor.step_slots(updates)
        executor.finish_step()
        if executor.writes_settings:
            self._wrapper.share_settings()
        if any(table.quantized):
            self._wrapper.step_mark.touch()
            for index in some.indices:
                if table.quantized[index]:
                    quantize_(table.params[index], executor.main_param(table.slots[index]))
        if table.reuse("by_sums", mains.by_sums):
            mains.note_written(some.indices)
        for observer in mains.observers:
            observer.after_launch()
