"""WrappedOptimizer: one inner optimizer with main params."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property, partial
from typing import Any, ClassVar

import torch
from torch import Tensor

from mp_optim.config import OptimizerConfig
from mp_optim.core import Slot, SlotUpdates, current_grad, iter_slots, local_tensor, with_names
from mp_optim.core.executor import Executor
from mp_optim.core.identity import SharedSettings
from mp_optim.core.interrupted_step import StepMark
from mp_optim.core.quantized import FLOAT8_DTYPES
from mp_optim.host.calls import weak_method
from mp_optim.mixed_precision.description import Description, describe
from mp_optim.mixed_precision.grad_norm import EXCLUDED, MAIN_NORM
from mp_optim.mixed_precision.grad_scaler import MegatronGradScaler
from mp_optim.mixed_precision.main_params import MainParams
from mp_optim.mixed_precision.megatron_optimizer import MegatronOptimizer
from mp_optim.mixed_precision.step import Engine, WrappedGrads
from mp_optim.offload.backward_grads import GradSource
from mp_optim.offload.hybrid_executor import stepper_of, work_in_backward
from mp_optim.process_groups.process_groups import ProcessGroups
from mp_optim.rules.rule_optimizer import SlotOptimizer, executor_of


class WrappedOptimizer(MegatronOptimizer):
    """Base class of the precision wrappers, with one inner optimizer.

    Args:
        optimizer: any torch optimizer over the model's parameters. An optimizer of this package
            steps gradients of any dtype in one pass; any other optimizer gets FP32 ``.grad``.
        config: see :class:`mp_optim.OptimizerConfig`.
        grad_scaler: loss scale; None for a scale of 1, which ``fp16=True`` does not allow.
        init_state_fn: ignored, for compatibility with Megatron; :meth:`init_state` allocates state.
        process_groups: the ranks that agree on the gradient norm; by default this process alone.

    Raises:
        TypeError, ValueError: the dtype of a parameter is not supported; the message names the
            parameter.
    """

    grads_of: ClassVar[type[Any]] = WrappedGrads

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        config: OptimizerConfig,
        grad_scaler: MegatronGradScaler | None = None,
        init_state_fn: Any = None,
        *,
        process_groups: ProcessGroups | None = None,
    ) -> None:
        if config.fp16 and grad_scaler is None:
            raise ValueError(
                "grad_scaler=None with fp16=True: FP16 training needs a loss scale; pass a "
                "ConstantGradScaler or DynamicGradScaler, or let get_megatron_optimizer build one "
                "from the config"
            )
        self.process_groups = process_groups or ProcessGroups()
        executor = executor_of(optimizer)
        groups = [with_names(group) for group in optimizer.param_groups]
        super().__init__(groups, dict(optimizer.defaults), config, grad_scaler)
        self._build_engine(optimizer, executor)

    def _build_engine(self, optimizer: torch.optim.Optimizer, executor: Executor) -> None:
        """Make the main params and the engine for an optimizer that has the same groups as this
        wrapper."""
        config = self.config
        check_param = partial(self.check_param, config=config)
        mains = MainParams(self.param_groups, executor, self.process_groups, check_param)
        updates = weak_method(self._updates_in_backward)
        settings = weak_method(self.share_settings)
        source = GradSource(self.param_groups, settings, updates, config.fused_backend)
        overlap = work_in_backward(executor, source, config.release_gradients)
        self.engine = Engine(
            *(optimizer, executor, mains, mains.table, overlap),
            *(config, self.param_groups, self.process_groups),
        )
        self.groups_below, self.shared_settings = executor.all_groups(), SharedSettings()
        self.use_mark(self.step_mark)
        self.share_settings()
        if overlap is not None:
            self.backward_schedulers.append(overlap)
            self.remember_scale()

    def _updates_in_backward(self, grads: Mapping[Slot, Tensor], multiplier: float) -> SlotUpdates:
        if self.has_edited_lists():
            return SlotUpdates.of([])
        return self.engine.table.updates(grads, multiplier, self.param_groups)

    @cached_property
    def engine(self) -> Engine:
        """The objects with which this wrapper steps, built at the first access.

        Raises:
            TypeError: the dtype of a parameter cannot be trained; the message names the parameter.
        """
        self._build()
        return self.engine

    @property
    def _is_built(self) -> bool:
        return "engine" in vars(self)

    def _build(self) -> None:
        """Build :attr:`engine`. Only a subclass that builds late overrides this method."""

    @property
    def executor(self) -> Executor:  # type: ignore[override]  # of one that may be built late
        """The executor that steps the parameters, taken from the inner optimizer."""
        return self.engine.executor

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        return self.engine.optimizer

    @staticmethod
    @abstractmethod
    def check_param(name: str, param: Tensor, config: OptimizerConfig) -> None:
        """Raise if the dtype of a trainable parameter does not fit this wrapper.

        Args:
            name: FQN of the parameter, for messages.
            param: the parameter.
            config: config of the wrapper.
        """

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a param group here and to the inner optimizer, and make main params for the
        parameters that need one.

        Parameters without names get their names from the model that the optimizer was built for.

        Args:
            param_group: ``params``, and hyperparameters that differ from the defaults.

        Raises:
            ValueError: the other groups have names, and a parameter is not in the model.
        """
        if not self._is_built:
            # torch's constructor adds the first groups before the engine exists. The engine binds
            # these groups when it is built.
            super().add_param_group(param_group)
            return
        with self.added_whole():
            super().add_param_group(_with_model_names(self, param_group))
            added, engine = self.param_groups[-1], self.engine
            engine.optimizer.add_param_group(with_names(added))
            inner_group = engine.executor.param_groups[-1]
            # Check here, because torch's optimizers do not check settings.
            engine.executor.check_settings(inner_group)
            for key, value in inner_group.items():
                added.setdefault(key, value)
            self.share_settings()
            # Ranks may differ in the norm groups and settings of the new group, so compare again.
            engine.norm_names, engine.has_compared = None, False
            engine.mains.bind_group(len(self.param_groups) - 1)

    def forget_groups(self, count: int) -> None:
        super().forget_groups(count)
        self.executor.forget_groups(count)

    # -- the step ---------------------------------------------------------------------------------

    def all_mains(self) -> list[MainParams]:
        return [self.engine.mains]

    def named_gradients(self) -> Iterator[tuple[str, Tensor]]:
        overlap = self.engine.overlap
        held: Mapping[Slot, Tensor] = {}
        if overlap is not None and self.config.release_gradients:
            held = overlap.collect().held
        for slot, param in iter_slots(self.param_groups):
            grad = current_grad(param)
            grad = held.get(slot) if grad is None else grad
            if grad is not None:
                yield self.slot_name(slot), local_tensor(grad)

    # -- main params and state --------------------------------------------------------------------

    def make_current(self, slot: Slot | None = None, *, follow_only: bool = False) -> None:
        mains = self.engine.mains
        mains.follow(slot)
        if not follow_only:
            table = mains.table
            indices = range(len(table.slots)) if slot is None else [table.index(slot)]
            mains.make_trainable(index for index in indices if table.params[index].requires_grad)
            mains.check_remainders(slot)

    def leaf(self, slot: Slot) -> tuple[MainParams, Slot]:
        return self.engine.mains, slot

    def allocate_state(self, slots: Sequence[Slot]) -> None:
        self.executor.allocate_state([slot for slot in slots if self.has_state(slot)])

    def use_mark(self, mark: StepMark) -> None:
        super().use_mark(mark)
        if isinstance(self.optimizer, SlotOptimizer):
            self.optimizer.step_mark = mark

    def recover(self) -> None:
        super().recover()
        # After an interrupted step, main params may differ from their weights although the
        # checksums of weights are unchanged. So forget the checksums.
        self.engine.mains.written.forget()

    # -- main params and metrics ------------------------------------------------------------------

    def describe(self) -> Description:
        self.check_lists()
        rows = describe(self.param_groups, self.executor, self.engine.table)
        return Description(rows.rows, (*rows.notes, *self.choice_notes()))

    def own_metrics(self) -> dict[str, float]:
        stepper, verdict = stepper_of(self.executor), self.counts.last_verdict()
        scaler, offload = self.grad_scaler, {"bytes_down": 0.0, "bytes_up": 0.0}
        if stepper is not None:
            moved = stepper.transfer_bytes
            offload = {"bytes_down": moved.down, "bytes_up": moved.up, **stepper.metrics()}
        return {
            "grad_norm": float("nan") if verdict.grad_norm is None else verdict.grad_norm,
            "loss_scale": 1.0 if scaler is None else float(scaler.scale),
            "multiplier": verdict.multipliers.get(MAIN_NORM, 0.0),
            **offload,
            **self.executor.metrics(),
            **{f"grad_norm/{name}": n for name, n in verdict.norms.items() if name != EXCLUDED},
            **self.counts.metrics(),
            "reloaded_params": self.engine.mains.reloaded,
        }


def _with_model_names(wrapper: WrappedOptimizer, group: dict[str, Any]) -> dict[str, Any]:
    """Return the group with names for its parameters if the other groups have names."""
    if wrapper.model_params is None or "params" not in group:
        return group
    params = [group["params"]] if isinstance(group["params"], Tensor) else list(group["params"])
    is_stub = not any(live["params"] for live in wrapper.param_groups)
    named = "param_names" in group or any(isinstance(param, tuple) for param in params)
    names = [] if named else wrapper.model_params.names_of(params)
    if is_stub and None not in names:
        for groups in (wrapper.param_groups, wrapper.executor.param_groups):
            # torch requires param_names in all groups or in none.
            groups[0].setdefault("param_names", [])
    if named or not any("param_names" in live for live in wrapper.param_groups):
        return {**group, "params": params}
    if None in names:
        lost = params[names.index(None)]
        raise ValueError(
            f"add_param_group: a parameter of shape {tuple(lost.shape)} is not in the model that "
            "the optimizer was built for, so it has no name here; give (name, parameter) pairs, "
            "such as list(module.named_parameters())"
        )
    return {**group, "params": list(zip(names, params, strict=True))}


class Float16OptimizerWithFloat16Params(WrappedOptimizer):
    """Precision wrapper of 16-bit models: steps an FP32 main param for each 16-bit parameter. FP32
    parameters are stepped directly.

    After construction, the ``param_groups`` of the wrapped optimizer hold the main params, on the
    device where the main params are stepped. The ``param_groups`` of this object hold the model's
    own parameters.
    """

    @staticmethod
    def check_param(name: str, param: Tensor, config: OptimizerConfig) -> None:
        allowed = (torch.float16, torch.bfloat16, torch.float32, *FLOAT8_DTYPES)
        if param.dtype not in allowed:
            raise TypeError(
                f"{name} is {param.dtype}: a Float16 optimizer takes float16, bfloat16, "
                "float32 and float8 parameters; convert the model, or freeze the parameter"
            )
        if (param.dtype == torch.float16 and config.bf16) or (
            param.dtype == torch.bfloat16 and config.fp16
        ):
            raise ValueError(
                f"{name} is {param.dtype} but the config has bf16={config.bf16}, "
                f"fp16={config.fp16}; set bf16 or fp16 in OptimizerConfig as the model needs"
            )


class FP32Optimizer(WrappedOptimizer):
    """Precision wrapper of FP32 models. It measures, clips and skips as in mixed precision."""

    @staticmethod
    def check_param(name: str, param: Tensor, config: OptimizerConfig) -> None:
        if param.dtype == torch.float64:
            raise TypeError(
                f"{name} is float64: parameters are stepped in FP32; convert the model with "
                ".float(), or freeze the parameter"
            )
        if param.dtype != torch.float32:
            raise TypeError(
                f"{name} is {param.dtype}: FP32Optimizer takes float32 parameters; "
                "set bf16=True or fp16=True in OptimizerConfig for a 16-bit model"
            )
