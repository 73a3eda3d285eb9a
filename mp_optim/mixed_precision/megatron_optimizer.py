"""MegatronOptimizer: the face of every stack, and its step: collect, measure, agree, decide, apply.

The way of one step from here to the kernel is told, function by function, in ``docs/design.md``.
How steps are counted, and what becomes of the counts of one that is skipped, is said in
:mod:`mp_optim.mixed_precision.clip_and_skip`.
"""

from __future__ import annotations

import math
import uuid
from abc import abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor
from torch._compile import _disable_dynamo
from torch.distributed import ProcessGroup

from mp_optim.config import OptimizerConfig
from mp_optim.core import Slot, iter_slots, local_tensor, param_at
from mp_optim.core.identity import has_names
from mp_optim.core.keyed_optimizer import Closure, SlotKeyedOptimizer
from mp_optim.core.model_parallel import ModelParallel
from mp_optim.core.names import ModelParams
from mp_optim.core.param_attributes import clear_decoupled_grad
from mp_optim.core.slot_state import SlotState
from mp_optim.core.weight_delta import WeightDelta, WeightPatch
from mp_optim.host.calls import in_own_modes, weak_method
from mp_optim.mixed_precision.averaged_weights import AveragedWeights, scale_rows_
from mp_optim.mixed_precision.backward_overlap import EarlyWork
from mp_optim.mixed_precision.changed_weights import ChangedPart, ChangedWeights
from mp_optim.mixed_precision.clip_and_skip import (
    DeviceVerdict,
    StepCounts,
    StepResult,
    Verdict,
    decide,
    decide_on_device,
)
from mp_optim.mixed_precision.description import Description
from mp_optim.mixed_precision.grad_norm import MAIN_NORM, NormKey, StepGrads
from mp_optim.mixed_precision.grad_scaler import MegatronGradScaler, scaling_of
from mp_optim.mixed_precision.health import GradientHealth
from mp_optim.mixed_precision.main_params import MainParams
from mp_optim.mixed_precision.settings_agreement import check_write, disagreement
from mp_optim.mixed_precision.skip_rule import RollingRule
from mp_optim.mixed_precision.step_warnings import StandstillWatch
from mp_optim.param_groups.tables import Tables, choice_notes

_HOST = torch.device("cpu")


class MegatronOptimizer(SlotKeyedOptimizer):
    """What every stack is to its caller: a torch optimizer over the model's parameters, with a loss
    scale, that measures gradients, agrees on the norm, decides, and steps or skips.

    A :class:`~mp_optim.mixed_precision.wrapped_optimizer.WrappedOptimizer` has one inner
    optimizer and
    does the work; a :class:`~mp_optim.zero.composite.CompositeOptimizer` has members and
    delegates. They provide what is abstract here.

    Args:
        params: groups of the model's parameters.
        defaults: of settings.
        config: see :class:`mp_optim.OptimizerConfig`.
        grad_scaler: loss scale, or None for 1.

    Attributes:
        model_params: the whole model's, if it was built for one; names are looked up there.
        watch: notices steps that cannot have trained anything.
        early_work: what was begun during backward.
        counts: of its steps, and the verdict on the last one.
        skip_rule: the rolling rule of ``skip_step_sigma_factor``.
        health: takes the loss for it, and tells norms and updates of single parameters.
        averages: puts averages of main params in the place of the weights.
        publications: of weights that changed: whose, and how many so far; None if that is off.
    """

    model_params: ModelParams | None = None

    def __init__(
        self,
        params: Iterable[Any],
        defaults: dict[str, Any],
        config: OptimizerConfig,
        grad_scaler: MegatronGradScaler | None,
    ) -> None:
        self.grad_scaler: MegatronGradScaler | None = grad_scaler
        self._live_groups, self._sizes = [], []
        self._begin(config)
        super().__init__(params, defaults)

    def _begin(self, config: OptimizerConfig) -> None:
        """Have no history."""
        self.config = config
        self.watch = StandstillWatch()
        self.early_work = EarlyWork()
        self.counts = StepCounts(weak_method(self.refuse_disagreement))
        self.averages = AveragedWeights()
        self.publications: tuple[str, int] | None = None
        self.skip_rule = RollingRule(config)
        self.health = GradientHealth(self._live_groups, self._sizes, self.skip_rule, config)

    def judge_step(self, verdict: Verdict) -> None:
        """Warn about a step that trained nothing, or was skipped like the ones before it."""
        self.watch.judge(self, verdict)

    # -- what a step is made of -------------------------------------------------------------------

    @abstractmethod
    def collect_grads(self) -> StepGrads:
        """Find this step's gradients; nothing here asks the device.

        Raises:
            TypeError, ValueError: a gradient or a hyperparameter cannot be stepped with, naming it.
        """

    @abstractmethod
    def verdict_device(self) -> torch.device | None:
        """The one device on which every slot is stepped by kernels that read multipliers there;
        None if the verdict is needed as numbers."""

    @abstractmethod
    def all_mains(self) -> list[MainParams]:
        """The main params of the wrappers, member by member."""

    def norm_ranks(self) -> list[ProcessGroup]:
        """The ranks that agree on one gradient norm, member by member."""
        of_members = (mains.process_groups.grad_stats for mains in self.all_mains())
        return [ranks for ranks in of_members if ranks is not None]

    # -- the step ---------------------------------------------------------------------------------

    @_disable_dynamo  # what is made in the first step outlives a trace
    def step(self, closure: Closure | None = None) -> Any:
        """One step: returns :class:`~mp_optim.mixed_precision.clip_and_skip.StepResult`, or the
        closure's loss
        if one is given.

        A step whose gradients hold an inf or nan, or whose norm exceeds
        ``config.grad_norm_skip_threshold`` or the limit of the rolling rule, changes nothing but
        the loss scale; it is logged, and ``StepResult.reason`` says why. Warns of a step without
        any gradient, and of steps skipped in a row.

        Raises:
            ValueError: a hyperparameter is out of range, naming it; nothing was stepped.
            BrokenOffError: the step before was broken off half-way (by a signal, or an error in a
                kernel).
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        result = self.unhooked_step()
        return result if closure is None else loss

    @in_own_modes
    def unhooked_step(self) -> StepResult:
        """:meth:`step` without torch's hooks around it, for an optimizer above that has them."""
        self.check_lists()
        with self.step_mark.step(self):
            if self.early_work.overlaps:
                self.early_work.collect()
            config = self.config
            with _timed(config, "optimizer-clip-main-grad"):
                grads = self.collect_grads()
                verdict = self._decide(grads)
            with _timed(config, "optimizer-inner-step"):
                self.apply_verdict(grads, verdict)
            self.update_scale(verdict)
        self.conclude_step(verdict)
        return verdict.result

    def _decide(self, grads: StepGrads) -> Verdict | DeviceVerdict:
        config, device = self.config, self.verdict_device()
        measurement = grads.sums(on_host=device is None)
        if not grads.has_any():
            self.watch.see_gradients(self, False)
        scaling = () if self.grad_scaler is None else scaling_of(self.grad_scaler)
        if device is not None:
            scalars = [*measurement.sums.values(), *scaling]
            if any(value.device != device for value in scalars):
                device = None
        rule: RollingRule | None = None
        if self.skip_rule.reported is not None or math.isfinite(config.skip_step_sigma_factor):
            rule = self.skip_rule.begun(device or _HOST)
        if device is not None:
            # whatever reads the verdict is on the device: nothing waits for it
            return DeviceVerdict(decide_on_device(measurement, scaling, config, rule))
        verdict = decide(measurement, scaling, config, rule)
        if verdict.disagrees:
            self.refuse_disagreement()
        if rule is not None:
            rule.take_on_host(verdict.norms)
        return verdict

    def apply_verdict(self, grads: StepGrads, verdict: Verdict | DeviceVerdict) -> None:
        """Count the step, and take it unless the verdict is to skip it."""
        self.counts.record(verdict)
        interval = self.config.log_update_ratios_interval
        watches = interval > 0 and self.counts.steps % interval == 0
        with self.health.watching(grads, self.counts.steps) if watches else nullcontext():
            if verdict.skip:
                grads.skip()
                return
            norm, limit = verdict.norms.get(MAIN_NORM), self.config.clip_grad
            clipped = min(norm, limit) if norm is not None and limit > 0 else norm
            grads.step(verdict.multipliers, clipped)

    def update_scale(self, verdict: Verdict | DeviceVerdict) -> None:
        """Let the loss scale grow or back off, as the last write within the step's mark."""
        if self.grad_scaler is not None:
            self.step_mark.touch()
            self.grad_scaler.update(verdict.found_inf)
            self.early_work.remember_scale()

    def conclude_step(self, verdict: Verdict | DeviceVerdict) -> None:
        """Warn about skipped steps, keep the verdict for metrics, and with ``release_gradients``
        drop the gradients that were not offloaded. Called after the step and its mark."""
        if isinstance(verdict, DeviceVerdict):
            verdict.when_settled(weak_method(self.judge_step))
        elif verdict.skip or self.watch.skips:
            self.judge_step(verdict)
        self.watch.see_untrained(self)
        self.health.verdict = verdict
        if self.config.release_gradients:
            self.zero_grad()  # released gradients are None; the others must not differ from them

    def refuse_disagreement(self) -> NoReturn:
        """Raise because ranks that share parameters would step them differently.

        Raises:
            ValueError: naming what they differ in.
        """
        self.early_work.discard()
        raise disagreement([mains.table.common for mains in self.all_mains()])

    # -- loss scale, gradients --------------------------------------------------------------------

    def get_loss_scale(self) -> Tensor:
        """Return the loss scale, FP32, shape (1,), on the parameters' device. Gradients have to be
        those of the loss times this scale."""
        if self.grad_scaler is None:
            return torch.ones(1, dtype=torch.float32, device=self.device)
        return self.grad_scaler.scale

    def scale_loss(self, loss: Tensor) -> Tensor:
        """The loss times the loss scale; call ``backward`` on the result."""
        if self.grad_scaler is None:
            return loss
        return loss * self.grad_scaler.scale.to(loss.device).reshape(())

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear ``grad`` and ``decoupled_grad``, and forget gradients that were released.
        ``main_grad`` belongs to what made it and is left alone."""
        self.early_work.forget_released()
        super().zero_grad(set_to_none=set_to_none)
        for _, param in iter_slots(self.param_groups):
            clear_decoupled_grad(param)

    @abstractmethod
    def named_gradients(self) -> Iterator[tuple[str, Tensor]]:
        """The local gradients there are now, by name."""

    def finish_grad_sync(self) -> None:
        """Reduce what has not been reduced over the ranks, and wait; :meth:`step` does so
        itself."""

    def finish_param_sync(self) -> None:
        """Wait until all parameters have their new values, which forward otherwise does module by
        module."""

    # -- work during backward ---------------------------------------------------------------------

    @property
    def is_last_microbatch(self) -> bool:
        """Whether gradients that get ready are complete, so that ``offload_mode`` may begin to work
        on them. Otherwise that work is done again after the micro-batches that follow: right, but
        not hidden."""
        return all(each.schedule.is_last_microbatch for each in self.early_work.steppers)

    @is_last_microbatch.setter
    def is_last_microbatch(self, value: bool) -> None:
        for each in self.early_work.steppers:
            each.schedule.is_last_microbatch = value

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """For all micro-batches but the last: nothing is begun during backward."""
        before, self.is_last_microbatch = self.is_last_microbatch, False
        try:
            yield
        finally:
            self.is_last_microbatch = before

    def gradients_ready(self, params: Iterable[Tensor] | None = None) -> None:
        """The gradients of these parameters (by default all) are what will be stepped:
        ``offload_mode`` may begin.

        To be called by the loop that reduces gradients over ranks; in a job of one rank, and with
        FSDP2, backward itself says it.
        """
        chosen = None if params is None else list(params)
        for overlap in self.early_work.overlaps:
            overlap.ready(chosen)

    def discard_early_work(self) -> None:
        """Forget what was done during backward; ``step()`` does it again.

        Whatever writes to gradients is noticed by itself, but for rows on an accelerator that
        change places without a trace: see ``docs/outside_writes.md``.
        """
        self.early_work.discard()

    # -- parameters and main params ---------------------------------------------------------------

    @property
    def chained_optimizers(self) -> list[MegatronOptimizer]:
        """The members of a chain; any other optimizer is its own only member."""
        return [self]

    @property
    @abstractmethod
    def optimizer(self) -> torch.optim.Optimizer:
        """The inner optimizer, as it was given."""

    @property
    def is_stub_optimizer(self) -> bool:
        """Whether there is nothing to step on this rank."""
        return not any(group["params"] for group in self.param_groups)

    def get_parameters(self) -> list[Tensor]:
        """The model's parameters in slot order."""
        return [param for _, param in iter_slots(self.param_groups)]

    @property
    def has_quantized_params(self) -> bool:
        """Whether some of the model's parameters are in 8 bits, with scales."""
        return any(any(mains.table.quantized) for mains in self.all_mains())

    @abstractmethod
    def leaf(self, slot: Slot) -> tuple[MainParams, Slot]:
        """Return the main params of the wrapper that steps a slot, and the slot's number there."""

    def state_of(self, slot: Slot) -> SlotState:
        mains, there = self.leaf(slot)
        return mains.state_of(there)

    def home(self, slot: Slot) -> torch.device:
        mains, there = self.leaf(slot)
        return mains.home(there)

    def has_state(self, slot: Slot) -> bool:
        """Return whether a slot has ever been trainable; one that has not costs nothing."""
        mains, there = self.leaf(slot)
        return mains.is_bound(there)

    def has_separate_main(self, slot: Slot) -> bool:
        """Return whether a slot is stepped on a tensor other than the model's parameter."""
        mains, there = self.leaf(slot)
        return mains.is_separate(there)

    def norm_key(self, slot: Slot) -> NormKey:
        """Return the norm in which a slot's gradient counts."""
        mains, there = self.leaf(slot)
        return mains.table.keys[mains.table.index(there)]

    def main_param(self, slot: Slot) -> Tensor:
        """Return a slot's main param, as :meth:`named_main_params` has it."""
        self.step_mark.check("main_param")
        self.make_current(slot)
        mains, there = self.leaf(slot)
        return (
            mains.main_param(there) if mains.is_bound(there) else param_at(self.param_groups, slot)
        )

    def named_main_params(self) -> Iterator[tuple[str, Tensor]]:
        """(FQN, FP32 tensor of the parameter's shape), in slot order.

        A DTensor if the parameter is one; of a parameter that a
        :class:`~mp_optim.DistributedOptimizer` splits, what this rank owns, as a flat shard of the
        parameter's shape. The tensor is the live one, or a copy if the main param is stored as a
        remainder.

        Raises:
            BrokenOffError: the last step or load was broken off half-way.
        """
        self.step_mark.check("named_main_params")
        self.make_current()
        for slot in self.slots():
            yield self.slot_name(slot), self.main_param(slot)

    @contextmanager
    def averaged_weights(self) -> Iterator[None]:
        """For the length of a ``with`` block the model's parameters have the values of their
        averages (``ema_decay``), rounded to their dtypes; afterwards their own bits, whatever
        happened. Collective if the optimizer is distributed.

        The block evaluates, or saves the model alone. In it a copy of this rank's share of the
        weights is kept in their dtype. A parameter that was never stepped keeps its value.

        Raises:
            ValueError: no averages are kept.
            RuntimeError: in the block, from what steps, saves or loads the optimizer.
        """
        self.make_current()
        with self.averages.swapped_in(self.all_mains(), self.step_mark):
            yield

    def scale_rows_(self, factors: Mapping[str, Tensor]) -> None:
        """Multiply rows of parameters by factors, between two steps: of main params in FP32, each
        product rounded once; model parameters, remainders and shards follow from them. Moments and
        averages stay. Collective if ranks share parameters: one that has nothing to scale gives no
        factors.

        Args:
            factors: by FQN, for each row one: shape (rows,) of the whole parameter, of a part that
                plain tensor parallelism gives a rank of that part. The same on all ranks that
                hold it.

        Raises:
            ValueError: a name is not trained here or has another number of rows, or a factor is
                not finite; or ranks that share parameters give other factors, naming them; nothing
                is changed.
            BrokenOffError: the last step, load or scaling was broken off half-way.
        """
        self.step_mark.check("scale_rows_")
        self.finish_param_sync()
        self.make_current()
        check_write(self.sharers(), "scale_rows_", factors, self.device)
        with self.step_mark.step(self):
            wrappers = self.all_mains()
            scale_rows_(wrappers, factors, self.step_mark)
            self.averages.share(wrappers)

    def reload_model_params(self, state_dict: dict[str, Any] | None = None) -> None:
        """Continue from the model's present values now, as the next step would by itself.
        Collective if ranks share parameters.

        For programs written for Megatron. Loaded remainders that belong to other weights are
        dropped.

        Args:
            state_dict: full-precision values by FQN, which main params and the model's parameters
                take where given.

        Raises:
            ValueError: ranks that share parameters are given other values, naming them; nothing is
                changed.
        """
        self.step_mark.check_lent("reload_model_params")
        values = state_dict or {}
        check_write(self.sharers(), "reload_model_params", values, self.device)
        self.take_model_params(values)

    def take_model_params(self, values: Mapping[str, Any]) -> None:
        """What :meth:`reload_model_params` does, with nothing compared."""
        for mains in self.all_mains():
            mains.reload(values)

    def sharers(self) -> Iterator[tuple[str, tuple[ProcessGroup, ...]]]:
        """The name of each trained parameter, and the groups of ranks that have copies or other
        parts of it: what one of them writes, all have to."""
        for mains in self.all_mains():
            for slot in mains.trained_slots():
                yield mains.name(slot), mains.sharers(slot)

    def offload_to_cpu(self) -> None:
        """Move main params and moments off the accelerator, until :meth:`restore_from_cpu`; a step
        before that raises RuntimeError. Gradients are the caller's to clear."""
        self.discard_early_work()  # it holds gradients
        super().offload_to_cpu()

    # -- what changed -----------------------------------------------------------------------------

    def track_changes(self, on: bool = True) -> None:
        """From now on remember which weights change, for :meth:`changed_weights`; or forget it.
        What it costs is in ``docs/deltas.md``; switched off, nothing.

        Raises:
            ValueError: parameters have no names, or are in 8 bits.
            RuntimeError: inside of ``averaged_weights()``.
        """
        self.step_mark.check_lent("track_changes")
        self.make_current()
        if on:
            _check_trackable(self)
        for mains in self.all_mains():
            mains.track_changes(on)
        self.publications = (uuid.uuid4().hex, 0) if on else None

    def changed_weights(self, *, full: bool = False) -> WeightDelta:
        """Publish this rank's part of the elements of weights that have another value than at the
        last publication (at first: than at :meth:`track_changes`), with these values: 16-bit and
        FP32 parameters that this optimizer has, in coordinates of the whole model. The ranks' parts
        together are the delta; no element is in two of them.

        An element that returned to its old value may be listed; one that differs is never missed.
        Of what something other than a step wrote (with a trace, see ``docs/outside_writes.md``),
        all elements may be.

        Args:
            full: all elements, for a receiver that has other weights than those of the last
                publication.

        Raises:
            RuntimeError: :meth:`track_changes` was not called, or inside of
                ``averaged_weights()``.
            BrokenOffError: the last step or load was broken off half-way.
        """
        if self.publications is None:
            raise RuntimeError("changed_weights: call track_changes() first")
        self.step_mark.check("changed_weights")
        self.step_mark.check_lent("changed_weights")
        self.make_current()
        run, number = self.publications
        parallel, patches, watched = self.model_parallel, [], 0
        for mains in self.all_mains():
            watched += sum(local_tensor(param).numel() for param in mains.table.params)
            for part in mains.changed_parts(full):
                name = mains.name(part.slot)
                if name not in parallel.copies:
                    patches.append(patch_of(name, part, parallel))
        tracked = [mains.changes for mains in self.all_mains() if mains.changes is not None]
        with _publication(tracked):
            self.publications = run, number + 1
        ranks, rank = (dist.get_world_size(), dist.get_rank()) if dist.is_initialized() else (1, 0)
        return WeightDelta(run, number + 1, full, rank, ranks, watched, tuple(patches))

    # -- state: a loss scale beside the slots' ----------------------------------------------------

    def state_dict(
        self, is_loading: bool = False, *, full_precision: bool = False
    ) -> dict[str, Any]:
        """Torch-shaped, plus ``grad_scaler`` if there is one. ``is_loading`` is accepted and not
        needed."""
        return super().state_dict(full_precision=full_precision)

    def param_checksums(self) -> list[int | None]:
        return [checksum for mains in self.all_mains() for checksum in mains.checksums()]

    def saved_beside(self) -> dict[str, Any]:
        beside = {}
        if self.grad_scaler is not None:
            beside["grad_scaler"] = self.grad_scaler.state_dict()
        if self.skip_rule.is_on:
            beside["skip_step"] = self.skip_rule.state_dict()
        return beside

    def load_beside(self, state_dict: Mapping[str, Any]) -> None:
        if self.grad_scaler is not None and state_dict.get("grad_scaler"):
            self.grad_scaler.load_state_dict(state_dict["grad_scaler"])
            self.early_work.remember_scale()
        self.skip_rule.load_state_dict(state_dict.get("skip_step"))

    # -- what is going on -------------------------------------------------------------------------

    def choice_notes(self) -> tuple[str, ...]:
        """With Muon, lines that list the parameters of each rule, and the reasons; else none."""
        if self.config.optimizer != "muon":
            return ()
        chunks = [] if self.model_params is None else self.model_params.chunks()
        return choice_notes(self.param_groups, Tables(chunks))

    @abstractmethod
    def describe(self) -> Description:
        """Per group, place and dtype: count, bytes, backend and why; ``print`` it."""

    @abstractmethod
    def metrics(self) -> dict[str, float]:
        """Numbers about the last step and the run so far."""


def _check_trackable(stack: MegatronOptimizer) -> None:
    """Raise ValueError if weights cannot be published, saying why."""
    if stack.has_quantized_params:
        raise ValueError(
            "track_changes: there are parameters in 8 bits, whose scales change with their "
            "values: publish the whole weights"
        )
    unnamed = [group for group in stack.param_groups if not has_names(group)]
    if any(group["params"] for group in unnamed):
        raise ValueError(
            "track_changes: parameters have no names to publish them by: build the optimizer "
            "over model.named_parameters()"
        )


@contextmanager
def _publication(tracked: Sequence[ChangedWeights]) -> Iterator[None]:
    """Publish all tracked changes or none; the body records the publication.

    An exception on the way, also a signal's, leaves the changes lost: the next publication has all
    elements.
    """
    for changes in tracked:
        changes.is_lost = True
    for changes in tracked:
        changes.published()
    yield
    for changes in tracked:
        changes.is_lost = False


def patch_of(name: str, part: ChangedPart, parallel: ModelParallel) -> WeightPatch:
    """What changed of a parameter here, in coordinates of the whole model."""
    partition, indices, shape = parallel.partitions.get(name), part.indices, part.shape
    if partition is not None:
        if indices is None:
            indices = torch.arange(part.values.numel(), device=part.values.device)
        indices = partition.whole_index(indices, shape)
        shape = partition.whole_shape(shape)
    return WeightPatch(parallel.names[name], shape, part.values.dtype, part.values, indices)


@contextmanager
def _timed(config: OptimizerConfig, name: str) -> Iterator[None]:
    """A phase of a step, for Megatron's timers, if there are any."""
    if config.timers is None:
        yield
        return
    timer = config.timers(name, log_level=1)
    timer.start(barrier=config.barrier_with_L1_time)
    try:
        yield
    finally:
        timer.stop()
