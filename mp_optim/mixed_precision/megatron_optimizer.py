"""MegatronOptimizer: the methods of every stack. A stack is an optimizer with all its layers.

The step is in :mod:`mp_optim.mixed_precision.step`; ``docs/design.md`` follows a step to the
kernel.
"""

from __future__ import annotations

import itertools
from abc import abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, ClassVar, NoReturn, cast

import torch
from torch import Tensor
from torch._compile import _disable_dynamo
from torch.distributed import ProcessGroup

from mp_optim.checkpoint.digests import StepDigest, digest_of
from mp_optim.config import OptimizerConfig
from mp_optim.config.setting_checks import check_setting, whole
from mp_optim.core import Slot, iter_slots, param_at
from mp_optim.core.keyed_optimizer import Closure, SlotKeyedOptimizer
from mp_optim.core.names import ModelParams
from mp_optim.core.slot_state import SlotState
from mp_optim.core.weight_delta import WeightDelta
from mp_optim.host.calls import in_own_modes, weak_method
from mp_optim.host.torch_types import is_dtensor
from mp_optim.mixed_precision.clip_and_skip import StepCounts
from mp_optim.mixed_precision.description import Description
from mp_optim.mixed_precision.grad_norm import NormKey
from mp_optim.mixed_precision.grad_scaler import MegatronGradScaler
from mp_optim.mixed_precision.main_params import MainParams, scale_rows_
from mp_optim.mixed_precision.observer import Observer, Observers
from mp_optim.mixed_precision.settings_agreement import check_write, disagreement
from mp_optim.mixed_precision.step import take_step
from mp_optim.offload.backward_scheduler import BackwardScheduler
from mp_optim.param_groups.tables import Tables, choice_notes
from mp_optim.process_groups.agreement import Ranks


class MegatronOptimizer(SlotKeyedOptimizer):
    """The interface of every stack: a torch optimizer over the model's parameters, with a loss
    scale. It measures gradients, agrees on the norm, decides, and steps or skips.

    A :class:`~mp_optim.mixed_precision.wrapped_optimizer.WrappedOptimizer` has one inner optimizer.
    A :class:`~mp_optim.zero.composite.CompositeOptimizer` delegates to member optimizers. Both
    implement the abstract methods.

    Args:
        params: groups of the model's parameters.
        defaults: default settings of groups.
        config: see :class:`mp_optim.OptimizerConfig`.
        grad_scaler: loss scale; None for 1.

    Attributes:
        model_params: parameters of the whole model, in which names are looked up; None if the stack
            was not built for a model.
        grads_of: class of the gradients of one step. Its constructor collects the gradients of a
            stack without a wait for the device.
        observer_kinds: classes of the observers that every stack has, by name
            (:mod:`mp_optim.monitor`).
        observers: observers of this stack.
        backward_schedulers: schedulers of work during backward, one for each wrapper with such
            work.
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
        """Become a member of a composite: use its loss scale, counts and observers.

        Args:
            whole: the composite.
        """
        self.grad_scaler, self.counts, self.observers = (
            whole.grad_scaler,
            whole.counts,
            whole.observers,
        )

    @property
    def health(self) -> Any:
        """The observer with the gradient norms of single parameters and with ``report_loss`` for
        the skip rule: :class:`~mp_optim.monitor.health.GradientHealth`."""
        return self.observers["health"]

    # -- parts of a step --------------------------------------------------------------------------

    @abstractmethod
    def all_mains(self) -> list[MainParams]:
        """Return the main params of each precision wrapper in the stack, in slot order."""

    def norm_ranks(self) -> list[ProcessGroup]:
        """Return the groups of ranks that agree on a gradient norm, one for each wrapper that has
        such a group."""
        of_members = (mains.process_groups.grad_stats for mains in self.all_mains())
        return [ranks for ranks in of_members if ranks is not None]

    # -- the step ---------------------------------------------------------------------------------

    @_disable_dynamo  # torch.compile must not trace the objects that the first step builds.
    def step(self, closure: Closure | None = None) -> Any:
        """Take one step. Return a :class:`~mp_optim.mixed_precision.clip_and_skip.StepResult`, or
        the closure's loss if a closure is given.

        A step changes no parameter and no state of a parameter in three cases: a gradient holds an
        inf or nan, the gradient norm exceeds ``config.grad_norm_skip_threshold``, or the skip rule
        finds a spike. A skipped step is logged, and ``StepResult.reason`` has the reason. A step
        without any gradient and several skipped steps in a row cause a warning.

        Args:
            closure: function that computes the loss and the gradients and returns the loss; None if
                backward was called already.

        Raises:
            ValueError: a hyperparameter is out of range; the message has its name. Nothing was
                stepped.
            BrokenOffError: the previous step was interrupted, by a signal or by an error in a
                kernel.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self.check_lists()
        result = take_step(self)
        return result if closure is None else loss

    def refuse_disagreement(self) -> NoReturn:
        """Raise ValueError with the difference between the ranks' settings, because ranks that
        share parameters would step the parameters differently."""
        self.discard_backward_work()
        tables = [mains.table for mains in self.all_mains()]
        raise disagreement([table.reuse("common", table.settings_alike) for table in tables])

    # -- loss scale, gradients --------------------------------------------------------------------

    def get_loss_scale(self) -> Tensor:
        """Return the loss scale: FP32, shape (1,), on the parameters' device. The gradients of a
        step must be those of the loss times this scale."""
        if self.grad_scaler is None:
            return torch.ones(1, dtype=torch.float32, device=self.device)
        return self.grad_scaler.scale

    def remember_scale(self) -> None:
        """Predict the multiplier of the next backward from the present loss scale, for speculative
        steps."""
        if self.grad_scaler is not None:
            for scheduler in self.backward_schedulers:
                scheduler.expect_multiplier(self.grad_scaler.inv_scale)

    def scale_loss(self, loss: Tensor) -> Tensor:
        """Return the loss times the loss scale. Call ``backward()`` on the result."""
        if self.grad_scaler is None:
            return loss
        return loss * self.grad_scaler.scale.to(loss.device).reshape(())

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear ``grad`` and ``decoupled_grad`` of all parameters, and forget released gradients.

        ``main_grad`` stays, because it belongs to the code that made it.

        Args:
            set_to_none: True to set gradients to None, False to set their elements to zero.
        """
        for scheduler in self.backward_schedulers:
            scheduler.forget_released()
        super().zero_grad(set_to_none=set_to_none)
        param: Any
        for _, param in iter_slots(self.param_groups):
            if getattr(param, "decoupled_grad", None) is not None:
                param.decoupled_grad = None

    @abstractmethod
    def named_gradients(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the FQN and the current local gradient of each parameter that has one."""

    def finish_grad_sync(self) -> None:
        """Reduce all gradients that are not yet reduced over the ranks, and wait. :meth:`step` also
        does this."""

    def finish_param_sync(self) -> None:
        """Wait until all parameters have the values of the last step. Without this call, the
        forward pass waits, module by module."""

    # -- work during backward ---------------------------------------------------------------------

    @property
    def is_last_microbatch(self) -> bool:
        """True if gradients that arrive in backward are complete, so that ``offload_mode`` may use
        them before ``step()``.

        Set this to False for all micro-batches except the last. Otherwise jobs during backward use
        incomplete gradients, and are repeated after the later micro-batches. The result is the
        same, but a step takes longer.
        """
        return all(scheduler.is_last_microbatch for scheduler in self.backward_schedulers)

    @is_last_microbatch.setter
    def is_last_microbatch(self, value: bool) -> None:
        for scheduler in self.backward_schedulers:
            scheduler.is_last_microbatch = value

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Return a context for all micro-batches except the last. Inside the context, backward
        starts no copies or steps of ``offload_mode``."""
        before, self.is_last_microbatch = self.is_last_microbatch, False
        try:
            yield
        finally:
            self.is_last_microbatch = before

    def gradients_ready(self, params: Iterable[Tensor] | None = None) -> None:
        """Report that the gradients of some parameters are final, so that ``offload_mode`` may copy
        them to the host and step.

        Call this from the loop that reduces gradients over ranks. In a job of one rank, and with
        FSDP2, backward hooks call this method.

        Args:
            params: the parameters; None for all.
        """
        chosen = None if params is None else list(params)
        for scheduler in self.backward_schedulers:
            scheduler.grads.ready(chosen)

    def discard_backward_work(self) -> None:
        """Discard the copies and steps that ``offload_mode`` made during backward; ``step()`` makes
        them again.

        Call this after a write to gradients that no check can detect: an exchange of rows in
        accelerator memory (``docs/outside_writes.md``). All other writes are detected.
        """
        for scheduler in self.backward_schedulers:
            scheduler.discard()

    # -- parameters and main params ---------------------------------------------------------------

    @property
    def chained_optimizers(self) -> list[MegatronOptimizer]:
        """The members of a chain. Any other optimizer returns a list that contains only itself."""
        return [self]

    @property
    @abstractmethod
    def optimizer(self) -> torch.optim.Optimizer:
        """The inner torch optimizer, which the caller gave to the constructor."""

    @property
    def is_stub_optimizer(self) -> bool:
        """True if this rank has no parameter to step."""
        return not any(group["params"] for group in self.param_groups)

    def get_parameters(self) -> list[Tensor]:
        """Return the model's parameters in slot order."""
        return [param for _, param in iter_slots(self.param_groups)]

    @abstractmethod
    def leaf(self, slot: Slot) -> tuple[MainParams, Slot]:
        """Return the main params of the wrapper that steps a slot, and the slot in the groups of
        that wrapper."""

    def state_of(self, slot: Slot) -> SlotState:
        mains, there = self.leaf(slot)
        return mains.state_of(there)

    def home(self, slot: Slot) -> torch.device:
        mains, there = self.leaf(slot)
        return mains.executor.home(there, mains.param(there))

    def has_state(self, slot: Slot) -> bool:
        """True if the parameter at a slot has ever been trainable. State of other parameters takes
        no memory."""
        mains, there = self.leaf(slot)
        return mains.has_main(there)

    def norm_key(self, slot: Slot) -> NormKey:
        """Return the name of the norm in which a slot's gradient counts, and the groups of ranks
        that share the parameter."""
        mains, there = self.leaf(slot)
        return mains.table.keys[mains.table.index(there)]

    def main_param(self, slot: Slot) -> Tensor:
        """Return the main param of a slot: FP32, with the parameter's shape, live or a copy as
        :meth:`named_main_params` describes. Return the model's parameter if the slot was never
        trainable.

        Raises:
            BrokenOffError: the last step or load was interrupted.
        """
        self.step_mark.check("main_param")
        self.make_current(slot)
        mains, there = self.leaf(slot)
        return (
            mains.main_param(there) if mains.has_main(there) else param_at(self.param_groups, slot)
        )

    def named_main_params(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the FQN and the FP32 main param of each parameter, in slot order.

        The main param has the parameter's shape. It is a DTensor if the parameter is a DTensor. If
        a :class:`~mp_optim.DistributedOptimizer` splits the parameter, the main param is this
        rank's flat shard (:class:`~mp_optim.core.flat_shard.FlatShard`). The tensor is the live
        main param; it is a copy if the main param is stored as a remainder.

        Raises:
            BrokenOffError: the last step or load was interrupted.
        """
        self.step_mark.check("named_main_params")
        self.make_current()
        for slot in self.slots():
            yield self.slot_name(slot), self.main_param(slot)

    @contextmanager
    def averaged_weights(self) -> Iterator[None]:
        """Replace the model's parameters by their averages (``ema_decay``) inside a ``with`` block.
        Collective if the optimizer is distributed.

        The averages are rounded to the dtypes of the parameters. After the block, also after an
        exception, the parameters have their own bits again. A parameter that was never stepped
        keeps its value. The block may evaluate the model, or save the model alone. During the
        block, a copy of this rank's part of the weights takes memory in the dtypes of the weights.

        Raises:
            ValueError: no averages are kept.
            RuntimeError: in the block, from calls that step, save or load the optimizer.
        """
        with self.observers["averaged_weights"].swapped_in():
            yield

    def scale_rows_(self, factors: Mapping[str, Tensor]) -> None:
        """Multiply rows of parameters by factors between two steps. Collective if ranks share
        parameters; a rank without rows to scale passes {}.

        Main params are multiplied in FP32, and each product is rounded once. Model parameters,
        remainders and shards follow from the main params. Moments and averages stay.

        Args:
            factors: FQN of a parameter -> floating-point tensor of shape (rows,), one factor for
                each row of the whole parameter (with plain tensor parallelism, of this rank's
                part). All ranks that have the parameter pass equal factors.

        Raises:
            ValueError: a name is not trained here or has another number of rows, or a factor is not
                finite. Or ranks that share parameters pass different factors; the message names the
                ranks. Nothing is changed.
            BrokenOffError: the last step, load or scaling was interrupted.
        """
        self.step_mark.check("scale_rows_")
        self.finish_param_sync()
        self.make_current()
        check_write(self.sharers(), "scale_rows_", factors, self.device)
        with self.step_mark.step(self):
            scale_rows_(self.all_mains(), factors, self.step_mark)
            self.show_written_params()

    def reload_model_params(self, state_dict: dict[str, Any] | None = None) -> None:
        """Continue from the model's present values now; without this call the next step does so.
        Collective if ranks share parameters.

        This method exists for programs written for Megatron. Loaded remainders that belong to other
        weights are dropped.

        Args:
            state_dict: full-precision values by FQN. They replace the main params and parameters of
                these names. None for no values.

        Raises:
            ValueError: ranks that share parameters pass different values; the message names the
                ranks. Nothing is changed.
        """
        self.step_mark.check_lent("reload_model_params")
        values = state_dict or {}
        check_write(self.sharers(), "reload_model_params", values, self.device)
        self.take_model_params(values)

    @in_own_modes
    def show_written_params(self) -> None:
        """Make parameters that were written on this rank visible to all ranks and to FSDP2.
        Collective if ranks share parameters."""
        params = itertools.chain.from_iterable(mains.table.params for mains in self.all_mains())
        if not any(map(is_dtensor, params)):
            return
        from torch.distributed._composable_state import _module_state_mapping
        from torch.distributed.fsdp import FSDPModule

        # After a forward pass without backward, the outermost FSDP module keeps its parameters
        # gathered. The next forward would use the old values, so free the gathered parameters.
        for module in list(_module_state_mapping):
            if isinstance(module, FSDPModule):
                module.reshard()

    def take_model_params(self, values: Mapping[str, Any]) -> None:
        """Continue from the model's present values, as :meth:`reload_model_params` does, but do not
        compare the values between ranks.

        Args:
            values: full-precision values by FQN.
        """
        for mains in self.all_mains():
            mains.reload(values)

    def sharers(self) -> Iterator[tuple[str, tuple[ProcessGroup, ...]]]:
        """Yield the FQN of each trained parameter, and the groups of ranks that have copies or
        other parts of the parameter. All of these ranks must write the same values to the
        parameter."""
        for mains in self.all_mains():
            for slot in mains.slots_with_main():
                yield mains.name(slot), mains.sharers(slot)

    def offload_to_cpu(self) -> None:
        """Move main params and moments to host memory, until :meth:`restore_from_cpu`.

        A step before that raises RuntimeError. Gradients stay on the accelerator; call
        ``zero_grad()`` to free them.
        """
        # Jobs that began in backward refer to gradients, so the memory of gradients could not be
        # freed.
        self.discard_backward_work()
        super().offload_to_cpu()

    # -- changed weights --------------------------------------------------------------------------

    def track_changes(self, on: bool = True) -> None:
        """Start or stop recording which weights change, for :meth:`changed_weights`. Without
        recording there is no cost; ``docs/deltas.md`` has the cost of recording.

        Args:
            on: True to start, False to stop.

        Raises:
            ValueError: parameters have no names, or are in 8 bits.
            RuntimeError: the call is inside a ``with optimizer.averaged_weights()`` block.
        """
        self.observers["changed_weights"].track(on)

    def changed_weights(self, *, full: bool = False) -> WeightDelta:
        """Return this rank's part of the weights that changed since the last call (at first, since
        :meth:`track_changes`), with their values.

        The delta has elements of 16-bit and FP32 parameters of this optimizer, with indices in the
        whole model. The deltas of all ranks together are complete, and no element is in two of
        them. Every element that differs is in the delta. An element that returned to its old value
        may be in the delta, too. If other code than a step wrote a parameter
        (``docs/outside_writes.md``), all of its elements may be in the delta.

        Args:
            full: True for all elements, for a receiver whose weights are not those of the last
                call.

        Raises:
            RuntimeError: :meth:`track_changes` was not called, or the call is inside a ``with
                optimizer.averaged_weights()`` block.
            BrokenOffError: the last step or load was interrupted.
        """
        delta: WeightDelta = self.observers["changed_weights"].publish(full)
        return delta

    # -- digests ----------------------------------------------------------------------------------

    @in_own_modes
    def step_digest(
        self,
        sample: int = 4096,
        *,
        step: int | None = None,
        per_tensor: bool = False,
        process_group: ProcessGroup | None = None,
    ) -> StepDigest:
        """Return a digest of parameters, main params and state after a step. Collective over
        ``process_group``. Steps themselves compute no digest.

        Equal bits have equal digests, whatever the number of ranks and the places of the state
        (GPU, host, disk). One changed element always changes the digest. Several changed elements
        cancel with a probability of about 2^-32. A tensor on several ranks counts once. State in
        blocks (8 bits, 4 bits, fp16) counts with its FP32 values.

        Args:
            sample: each call reads about 1/``sample`` of the elements, in runs of at most 262,144.
                Calls in ``sample`` successive steps read each element once. 1 reads everything.
            step: number of the step, which selects the sample; None for the number of steps since
                this optimizer was built.
            per_tensor: True to return the digest of each tensor, too.
            process_group: the ranks that hold the model together; None for all ranks.

        Raises:
            ValueError: ``sample`` is not a whole number >= 1, or ``step`` is not a whole number
                >= 0.
            BrokenOffError: the last step or load was interrupted.
        """
        check_setting("sample", sample, whole(1))
        stack = cast(MegatronOptimizer, self.stack)
        number = stack.counts.steps if step is None else step
        check_setting("step", number, whole(0))
        stack.step_mark.check("step_digest")
        stack.finish_param_sync()
        norm = stack.counts.last_verdict().grad_norm
        # Convert tensors and 2.0 to int, because only equal ints select the same elements.
        number, sample = int(number), int(sample)
        return digest_of(stack, number, norm, sample, per_tensor, Ranks.of(process_group))

    # -- state: slots, loss scale, observers ------------------------------------------------------

    def state_dict(
        self, is_loading: bool = False, *, full_precision: bool = False
    ) -> dict[str, Any]:
        """Return a state dict in torch's format, plus ``grad_scaler`` if the optimizer has a loss
        scaler.

        Args:
            is_loading: ignored, for compatibility with Megatron.
            full_precision: True for FP32 copies of all state that is stored in fewer bits.
        """
        return super().state_dict(full_precision=full_precision)

    def param_checksums(self) -> list[int | None]:
        return [checksum for mains in self.all_mains() for checksum in mains.checksums()]

    def extra_entries(self) -> dict[str, Any]:
        scaler = self.grad_scaler
        entries = {} if scaler is None else {"grad_scaler": scaler.state_dict()}
        for observer in self.observers.values():
            entries |= observer.state_dict()
        return entries

    def check_extra_entries(self, state_dict: Mapping[str, Any], *, convert: bool) -> None:
        scaler, scale = self.grad_scaler, state_dict.get("grad_scaler")
        if scaler is not None and (scale or not convert):
            scaler.check_state_dict(scale)
        for observer in self.observers.values():
            observer.check_state_dict(state_dict)

    def load_extra_entries(self, state_dict: Mapping[str, Any]) -> None:
        if self.grad_scaler is not None and state_dict.get("grad_scaler"):
            self.grad_scaler.load_state_dict(state_dict["grad_scaler"])
            self.remember_scale()
        for observer in self.observers.values():
            observer.load_state_dict(state_dict)

    # -- main params and metrics ------------------------------------------------------------------

    def choice_notes(self) -> tuple[str, ...]:
        """Return lines that list which parameters Muon steps and which the scalar optimizer steps,
        with the reasons; empty without Muon."""
        if self.config.optimizer != "muon":
            return ()
        chunks = [] if self.model_params is None else self.model_params.chunks()
        return choice_notes(self.param_groups, Tables(chunks))

    @abstractmethod
    def describe(self) -> Description:
        """Return a table with the number of parameters, bytes, and backend with its reason, for
        each group, place and dtype. ``print()`` shows the table."""

    def metrics(self) -> dict[str, float]:
        """Return numbers about the last step and the run so far, by name."""
        metrics = self.own_metrics()
        for observer in self.observers.values():
            metrics |= observer.metrics()
        return metrics

    @abstractmethod
    def own_metrics(self) -> dict[str, float]:
        """Return :meth:`metrics` without the metrics of observers."""
