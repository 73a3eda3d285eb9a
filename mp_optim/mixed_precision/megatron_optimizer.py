"""MegatronOptimizer: the methods that every stack offers to its caller.

:mod:`mp_optim.mixed_precision.step` is the step; ``docs/design.md`` follows it to the kernel.
"""

from __future__ import annotations

import itertools
from abc import abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, ClassVar, NoReturn

import torch
from torch import Tensor
from torch._compile import _disable_dynamo
from torch.distributed import ProcessGroup

from mp_optim.config import OptimizerConfig
from mp_optim.core import Slot, iter_slots, param_at
from mp_optim.core.keyed_optimizer import Closure, SlotKeyedOptimizer
from mp_optim.core.names import ModelParams
from mp_optim.core.param_attributes import clear_decoupled_grad
from mp_optim.core.slot_state import SlotState
from mp_optim.core.weight_delta import WeightDelta
from mp_optim.host.calls import in_own_modes, weak_method
from mp_optim.host.torch_types import is_dtensor
from mp_optim.mixed_precision.clip_and_skip import StepCounts
from mp_optim.mixed_precision.description import Description
from mp_optim.mixed_precision.grad_norm import NormKey
from mp_optim.mixed_precision.grad_scaler import MegatronGradScaler
from mp_optim.mixed_precision.main_params import MainParams
from mp_optim.mixed_precision.observer import Observer, Observers
from mp_optim.mixed_precision.scaled_rows import scale_rows_
from mp_optim.mixed_precision.settings_agreement import check_write, disagreement
from mp_optim.mixed_precision.step import take_step
from mp_optim.offload.backward_scheduler import BackwardScheduler
from mp_optim.param_groups.tables import Tables, choice_notes


class MegatronOptimizer(SlotKeyedOptimizer):
    """The interface of every stack: a torch optimizer over the model's parameters, with a loss
    scale, that measures gradients, agrees on the norm, decides, and steps or skips.

    A :class:`~mp_optim.mixed_precision.wrapped_optimizer.WrappedOptimizer` has one inner optimizer
    and does the work; a :class:`~mp_optim.zero.composite.CompositeOptimizer` has members and
    delegates. They implement the abstract methods.

    Args:
        params: groups of the model's parameters.
        defaults: defaults of settings.
        config: see :class:`mp_optim.OptimizerConfig`.
        grad_scaler: loss scale, or None for 1.

    Attributes:
        model_params: parameters of the whole model, if the stack was built for one; names are
            looked up in them.
        grads_of: class of the gradients of one step; its constructor collects them from a stack,
            without a wait for the device.
        observer_kinds: observers that every stack has, by name (:mod:`mp_optim.monitor`).
        observers: observers of this stack.
        backward_schedulers: schedulers of work during backward, one for each wrapper that has one.
        counts: counts of steps, and the last verdict.
    """

    model_params: ModelParams | None = None
    grads_of: ClassVar[type[Any]]
    observer_kinds: ClassVar[Mapping[str, type[Observer]]] = {}

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
        """Create empty counts, and the observers of this stack."""
        self.config = config
        self.backward_schedulers: list[BackwardScheduler] = []
        self.counts = StepCounts(weak_method(self.refuse_disagreement))
        self.observers = Observers(self.observer_kinds, self)

    def join(self, whole: MegatronOptimizer) -> None:
        """Become a member of a composite, whose steps are counted, scaled and watched as one."""
        self.grad_scaler, self.counts, self.observers = (
            whole.grad_scaler,
            whole.counts,
            whole.observers,
        )

    @property
    def health(self) -> Any:
        """:class:`~mp_optim.monitor.health.GradientHealth` of the stack: norms of single gradients,
        and the loss for the rolling rule."""
        return self.observers["health"]

    # -- what a step is made of -------------------------------------------------------------------

    @abstractmethod
    def all_mains(self) -> list[MainParams]:
        """Yield the main params of the wrappers, member by member."""

    def norm_ranks(self) -> list[ProcessGroup]:
        """Yield the ranks that agree on one gradient norm, member by member."""
        of_members = (mains.process_groups.grad_stats for mains in self.all_mains())
        return [ranks for ranks in of_members if ranks is not None]

    # -- the step ---------------------------------------------------------------------------------

    @_disable_dynamo  # objects built in the first step must not be part of a trace
    def step(self, closure: Closure | None = None) -> Any:
        """Take one step. Return a :class:`~mp_optim.mixed_precision.clip_and_skip.StepResult`, or
        the loss of the closure if one is given.

        A step changes nothing but the loss scale if its gradients hold an inf or nan, or if its
        norm exceeds ``config.grad_norm_skip_threshold`` or the limit of the rolling rule. It is
        logged, and ``StepResult.reason`` has the reason. Warns of a step without any gradient, and
        of steps skipped in a row.

        Args:
            closure: computes the loss and the gradients, or None.

        Raises:
            ValueError: a hyperparameter is out of range, naming it; nothing was stepped.
            BrokenOffError: the previous step was interrupted (by a signal, or an error in a
                kernel).
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self.check_lists()
        result = take_step(self)
        return result if closure is None else loss

    def refuse_disagreement(self) -> NoReturn:
        """Raise because ranks that share parameters would step them differently.

        Raises:
            ValueError: naming what they differ in.
        """
        self.discard_backward_work()
        raise disagreement([mains.table.common for mains in self.all_mains()])

    # -- loss scale, gradients --------------------------------------------------------------------

    def get_loss_scale(self) -> Tensor:
        """Return the loss scale, FP32, shape (1,), on the parameters' device. Gradients have to be
        those of the loss times this scale."""
        if self.grad_scaler is None:
            return torch.ones(1, dtype=torch.float32, device=self.device)
        return self.grad_scaler.scale

    def remember_scale(self) -> None:
        """Predict the multiplier of the next backward from the current loss scale."""
        if self.grad_scaler is not None:
            for scheduler in self.backward_schedulers:
                scheduler.expect_multiplier(self.grad_scaler.inv_scale)

    def scale_loss(self, loss: Tensor) -> Tensor:
        """Return the loss times the loss scale; call ``backward`` on the result."""
        if self.grad_scaler is None:
            return loss
        return loss * self.grad_scaler.scale.to(loss.device).reshape(())

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear ``grad`` and ``decoupled_grad``, and forget released gradients. ``main_grad``
        belongs to the code that made it and stays."""
        for scheduler in self.backward_schedulers:
            scheduler.forget_released()
        super().zero_grad(set_to_none=set_to_none)
        for _, param in iter_slots(self.param_groups):
            clear_decoupled_grad(param)

    @abstractmethod
    def named_gradients(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the current local gradients, by name."""

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
        return all(scheduler.is_last_microbatch for scheduler in self.backward_schedulers)

    @is_last_microbatch.setter
    def is_last_microbatch(self, value: bool) -> None:
        for scheduler in self.backward_schedulers:
            scheduler.is_last_microbatch = value

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Open a context for all micro-batches except the last: no work starts during backward."""
        before, self.is_last_microbatch = self.is_last_microbatch, False
        try:
            yield
        finally:
            self.is_last_microbatch = before

    def gradients_ready(self, params: Iterable[Tensor] | None = None) -> None:
        """Register that the gradients of these parameters (by default all) are final, so that the
        work of ``offload_mode`` may begin.

        Call it from the loop that reduces gradients over ranks. In a job of one rank, and with
        FSDP2, backward calls it.
        """
        chosen = None if params is None else list(params)
        for scheduler in self.backward_schedulers:
            scheduler.grads.ready(chosen)

    def discard_backward_work(self) -> None:
        """Discard the work that ``offload_mode`` did during backward; ``step()`` does it again.

        Writes to gradients are detected, except for rows on an accelerator that are exchanged
        without a trace: see ``docs/outside_writes.md``.
        """
        for scheduler in self.backward_schedulers:
            scheduler.discard()

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
        """Return the model's parameters in slot order."""
        return [param for _, param in iter_slots(self.param_groups)]

    @abstractmethod
    def leaf(self, slot: Slot) -> tuple[MainParams, Slot]:
        """Return the main params of the wrapper that steps a slot, and the slot's number there."""

    def state_of(self, slot: Slot) -> SlotState:
        mains, there = self.leaf(slot)
        return mains.state_of(there)

    def home(self, slot: Slot) -> torch.device:
        mains, there = self.leaf(slot)
        return mains.executor.home(there, mains.param(there))

    def has_state(self, slot: Slot) -> bool:
        """Return whether a slot has ever been trainable; one that has not costs nothing."""
        mains, there = self.leaf(slot)
        return mains.has_main(there)

    def has_separate_main(self, slot: Slot) -> bool:
        """Return whether a slot is stepped on a tensor other than the model's parameter."""
        mains, there = self.leaf(slot)
        return mains.has_own_main(there)

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
            mains.main_param(there) if mains.has_main(there) else param_at(self.param_groups, slot)
        )

    def named_main_params(self) -> Iterator[tuple[str, Tensor]]:
        """Yield (FQN, FP32 tensor of the parameter's shape), in slot order.

        The tensor is a DTensor if the parameter is one. For a parameter that a
        :class:`~mp_optim.DistributedOptimizer` splits, it is this rank's flat shard of the
        parameter's shape. The tensor is the live one, or a copy if the main param is stored as a
        remainder.

        Raises:
            BrokenOffError: the last step or load was interrupted.
        """
        self.step_mark.check("named_main_params")
        self.make_current()
        for slot in self.slots():
            yield self.slot_name(slot), self.main_param(slot)

    @contextmanager
    def averaged_weights(self) -> Iterator[None]:
        """Replace the model's parameters by their averages (``ema_decay``), rounded to their
        dtypes, within a ``with`` block. Afterwards they have their own bits again, also after an
        exception. Collective if the optimizer is distributed.

        The block may evaluate, or save the model alone. A copy of this rank's share of the weights
        is kept in their dtype meanwhile. A parameter that was never stepped keeps its value.

        Raises:
            ValueError: no averages are kept.
            RuntimeError: in the block, from calls that step, save or load the optimizer.
        """
        with self.observers["averaged_weights"].swapped_in():
            yield

    def scale_rows_(self, factors: Mapping[str, Tensor]) -> None:
        """Multiply rows of parameters by factors, between two steps: of main params in FP32, each
        product rounded once; model parameters, remainders and shards follow from them. Moments and
        averages stay. Collective if ranks share parameters: one that has nothing to scale gives no
        factors.

        Args:
            factors: by FQN, for each row one: shape (rows,) of the whole parameter, of a part that
                plain tensor parallelism gives a rank of that part. The same on all ranks that hold
                it.

        Raises:
            ValueError: a name is not trained here or has another number of rows, or a factor is not
                finite; or ranks that share parameters give other factors, naming them; nothing is
                changed.
            BrokenOffError: the last step, load or scaling was broken off half-way.
        """
        self.step_mark.check("scale_rows_")
        self.finish_param_sync()
        self.make_current()
        check_write(self.sharers(), "scale_rows_", factors, self.device)
        with self.step_mark.step(self):
            scale_rows_(self.all_mains(), factors, self.step_mark)
            self.show_written_params()

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

    @in_own_modes
    def show_written_params(self) -> None:
        """Have all ranks, and FSDP2, use parameters that were written on this rank. Collective if
        ranks share parameters."""
        params = itertools.chain.from_iterable(mains.table.params for mains in self.all_mains())
        if not any(map(is_dtensor, params)):
            return
        from torch.distributed._composable_state import _module_state_mapping
        from torch.distributed.fsdp import FSDPModule

        # After a forward pass without backward the outermost module keeps its parameters whole, and
        # would use the old values.
        for module in list(_module_state_mapping):
            if isinstance(module, FSDPModule):
                module.reshard()

    def take_model_params(self, values: Mapping[str, Any]) -> None:
        """Do the work of :meth:`reload_model_params` without comparing ranks."""
        for mains in self.all_mains():
            mains.reload(values)

    def sharers(self) -> Iterator[tuple[str, tuple[ProcessGroup, ...]]]:
        """Yield the name of each trained parameter, and the groups of ranks that have copies or
        other parts of it. All of them have to write it alike."""
        for mains in self.all_mains():
            for slot in mains.slots_with_main():
                yield mains.name(slot), mains.sharers(slot)

    def offload_to_cpu(self) -> None:
        """Move main params and moments off the accelerator, until :meth:`restore_from_cpu`; a step
        before that raises RuntimeError. Gradients are the caller's to clear."""
        # Work that backward began refers to gradients, so their memory could not be freed.
        self.discard_backward_work()
        super().offload_to_cpu()

    # -- what changed -----------------------------------------------------------------------------

    def track_changes(self, on: bool = True) -> None:
        """Track the weights that change from now on, for :meth:`changed_weights`; or stop.
        ``docs/deltas.md`` has the cost; without tracking there is none.

        Raises:
            ValueError: parameters have no names, or are in 8 bits.
            RuntimeError: inside of ``averaged_weights()``.
        """
        self.observers["changed_weights"].track(on)

    def changed_weights(self, *, full: bool = False) -> WeightDelta:
        """Publish this rank's part of the changed elements of weights, with their values: elements
        of 16-bit and FP32 parameters of this optimizer that differ from the last publication (at
        first, from :meth:`track_changes`), in coordinates of the whole model. The ranks' parts
        together are the delta; no element is in two of them.

        An element that returned to its old value may be listed; one that differs is never missed.
        All elements may be listed of parameters that other code than a step wrote (with a trace,
        see ``docs/outside_writes.md``).

        Args:
            full: True for all elements, for a receiver that has other weights than those of the
                last publication.

        Raises:
            RuntimeError: :meth:`track_changes` was not called, or inside of ``averaged_weights()``.
            BrokenOffError: the last step or load was interrupted.
        """
        delta: WeightDelta = self.observers["changed_weights"].publish(full)
        return delta

    # -- state: a loss scale beside the slots' ----------------------------------------------------

    def state_dict(
        self, is_loading: bool = False, *, full_precision: bool = False
    ) -> dict[str, Any]:
        """Return a state dict in torch's format, plus ``grad_scaler`` if the optimizer has one.
        ``is_loading`` is accepted for compatibility, without effect."""
        return super().state_dict(full_precision=full_precision)

    def param_checksums(self) -> list[int | None]:
        return [checksum for mains in self.all_mains() for checksum in mains.checksums()]

    def saved_beside(self) -> dict[str, Any]:
        scaler = self.grad_scaler
        beside = {} if scaler is None else {"grad_scaler": scaler.state_dict()}
        for observer in self.observers.values():
            beside |= observer.state_dict()
        return beside

    def check_beside(self, state_dict: Mapping[str, Any], *, convert: bool) -> None:
        scaler, scale = self.grad_scaler, state_dict.get("grad_scaler")
        if scaler is not None and (scale or not convert):
            scaler.check_state_dict(scale)
        for observer in self.observers.values():
            observer.check_state_dict(state_dict)

    def load_beside(self, state_dict: Mapping[str, Any]) -> None:
        if self.grad_scaler is not None and state_dict.get("grad_scaler"):
            self.grad_scaler.load_state_dict(state_dict["grad_scaler"])
            self.remember_scale()
        for observer in self.observers.values():
            observer.load_state_dict(state_dict)

    # -- main params and metrics -------------------------------------------------------------------

    def choice_notes(self) -> tuple[str, ...]:
        """Return lines that list the parameters of each rule with Muon, and the reasons; else
        none."""
        if self.config.optimizer != "muon":
            return ()
        chunks = [] if self.model_params is None else self.model_params.chunks()
        return choice_notes(self.param_groups, Tables(chunks))

    @abstractmethod
    def describe(self) -> Description:
        """Return a table of count, bytes and backend with its reason, per group, place and dtype.
        ``print`` it."""

    def metrics(self) -> dict[str, float]:
        """Numbers about the last step and the run so far."""
        metrics = self.own_metrics()
        for observer in self.observers.values():
            metrics |= observer.metrics()
        return metrics

    @abstractmethod
    def own_metrics(self) -> dict[str, float]:
        """:meth:`metrics` without those of observers."""
