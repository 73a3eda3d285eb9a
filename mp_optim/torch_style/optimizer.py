"""StackOptimizer: the stack behind the face of a torch optimizer, ``cls(params, **settings)``."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn
from torch._compile import _disable_dynamo

from mp_optim.config import OptimizerConfig
from mp_optim.factory import inner_optimizer, set_up_host
from mp_optim.planner.auto import with_chosen_fraction
from mp_optim.precision import Float16OptimizerWithFloat16Params, StepResult
from mp_optim.precision.description import Description
from mp_optim.precision.health import GradientHealth
from mp_optim.process.caller_warnings import warn
from mp_optim.process.torch_modes import in_own_modes
from mp_optim.quantized import FLOAT8_DTYPES
from mp_optim.ranks.process_groups import ProcessGroups
from mp_optim.slots import ParamGroups, Slot, iter_slots, local_tensor, with_names
from mp_optim.slots.group_lists import added_whole
from mp_optim.slots.keyed_optimizer import Closure
from mp_optim.slots.loading import matched_groups
from mp_optim.slots.state_dict import check_form, plain_groups
from mp_optim.slots.state_view import SlotStateView
from mp_optim.torch_style.amp import AmpLossScale
from mp_optim.torch_style.settings import config_of
from mp_optim.update import check_serves
from mp_optim.update.backends.missing_kernels import warn_of_missing_kernels
from mp_optim.update.rules import CLASSES, construction_of, settings_of

_TRAINED = (torch.bfloat16, torch.float16, torch.float32, *FLOAT8_DTYPES)


class AnyPrecisionStack(Float16OptimizerWithFloat16Params):
    """A stack over any mix of 16-bit and FP32 parameters, with nobody's loss scale but that of a
    ``GradScaler``.

    Args:
        groups: an empty list, which is to hold the param groups.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        config: OptimizerConfig,
        groups: ParamGroups,
    ) -> None:
        self._live_groups = groups
        super().__init__(optimizer, config)

    def check_param(self, slot: Slot, param: Tensor) -> None:
        if param.dtype not in _TRAINED:
            raise TypeError(
                f"{self.slot_name(slot)} is {param.dtype}: parameters are bfloat16, float16, "
                "float32 or float8; convert the model, or freeze the parameter"
            )


class StackOptimizer(torch.optim.Optimizer):
    """What the classes of :mod:`mp_optim.torch_style` have in common.

    The stack below is built at the first step, or when state is first asked for. Until then
    parameters may be replaced: by ``fully_shard``, by accelerate, by ``model.to(...)``. With
    ``release_gradients`` it is built at once.

    Args:
        params: parameters, named parameters or groups, of any mix of bfloat16, float16 and float32.
        defaults: the rule's hyperparameters.
        settings: of :class:`~mp_optim.torch_style.settings.StackSettings`.

    Raises:
        TypeError, ValueError: a setting is unknown, out of range or without effect, naming it.
    """

    rule = "adam"

    def __init__(
        self,
        params: Iterable[Any],
        defaults: dict[str, Any],
        settings: Mapping[str, Any],
    ) -> None:
        self._stack: AnyPrecisionStack | None = None
        self._last: StepResult | None = None
        self._warned_of_fp16 = False
        self._settings = dict(settings)
        self._config = config_of(self.rule, settings)
        self._rule = CLASSES[self.rule](
            [{"params": []}], **construction_of(self._config), **defaults
        )
        self._of_rule = tuple(defaults)  # a wrapper (timm's Lookahead) adds its own
        super().__init__(params, defaults)
        warn_of_missing_kernels(
            self._config.fused_backend, self.rule, self.param_groups
        )
        if self._config.release_gradients:
            self._stack = self._build()  # the first backward releases already

    @property
    def param_groups(self) -> ParamGroups:
        """As torch's: live. Another list may be assigned; after the first step its groups take the
        place of those that are here, and have to hold as many parameters."""
        return self._groups

    @param_groups.setter
    def param_groups(self, groups: ParamGroups) -> None:
        if self._stack is None:
            self._groups = groups
        else:
            self._stack.param_groups = groups

    # -- the stack below --------------------------------------------------------------------------

    @property
    def stack(self) -> AnyPrecisionStack:
        """The :class:`~mp_optim.MegatronOptimizer` that does the work, built now if it was not.

        Raises:
            TypeError: a parameter's dtype cannot be trained, naming it.
        """
        if self._stack is None:
            self._stack = self._build()
        return self._stack

    @in_own_modes
    def _build(self) -> AnyPrecisionStack:
        container = _container(self.param_groups)
        device = _device_of(self.param_groups)
        check_serves(self._config.fused_backend, device)
        set_up_host(self._config, device)
        if self._config.optimizer_offload_fraction == "auto":
            self._config = with_chosen_fraction(
                self._config, [container], {}, ProcessGroups(), None
            )
        groups = [with_names(group) for group in self.param_groups]
        settings = {**settings_of(self._config), **self._hyperparameters}
        inner = inner_optimizer(self._config, groups, settings)
        # NOTE: callers hold our list, schedulers our groups; the stack goes by the same objects.
        held, ours = self.param_groups, list(self.param_groups)
        held.clear()
        try:
            stack = AnyPrecisionStack(inner, self._config, held)
            for group, built in zip(ours, held, strict=True):
                for name, value in built.items():
                    group.setdefault(name, value)
        finally:
            held[:] = ours
        return stack

    @property
    def _hyperparameters(self) -> dict[str, Any]:
        """The rule's own of ``defaults``, where wrappers (Lookahead's) put theirs, too."""
        return {name: self.defaults[name] for name in self._of_rule}

    def describe(self) -> Description:
        """Per group, place and dtype: count, bytes, backend and why; ``print`` it."""
        return self.stack.describe()

    def metrics(self) -> dict[str, float]:
        """Numbers about the last step and the run so far."""
        return self.stack.metrics()

    def averaged_weights(self) -> AbstractContextManager[None]:
        """``with optimizer.averaged_weights(): evaluate()``: the model's parameters have the values
        of their averages (``ema_decay``) in the block, and their own bits after it. See
        :meth:`mp_optim.MegatronOptimizer.averaged_weights`."""
        return self.stack.averaged_weights()

    def scale_rows_(self, factors: Mapping[str, Tensor]) -> None:
        """Multiply rows of parameters by factors. See
        :meth:`mp_optim.MegatronOptimizer.scale_rows_`."""
        self.stack.scale_rows_(factors)

    @property
    def health(self) -> GradientHealth:
        """Takes the loss for ``skip_step_sigma_factor``, and tells norms and updates of single
        parameters; looking at it builds the stack."""
        return self.stack.health

    @property
    def last_step(self) -> StepResult | None:
        """What became of the last step: whether it was taken, and the gradient norm before
        clipping; None before the first."""
        return self._last

    # -- stepping ---------------------------------------------------------------------------------

    @_disable_dynamo  # what is built at the first step outlives a trace
    def step(self, closure: Closure | None = None) -> Any:
        """One step; returns the closure's loss, or None. Gradients with an inf or nan change
        nothing, and are told of (:attr:`last_step`, warnings).

        Raises:
            ValueError: a hyperparameter is out of range, naming it; nothing was stepped.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        stack, amp = self.stack, vars(self)
        scale, found_inf = amp.get("grad_scale"), amp.get("found_inf")
        if found_inf is None and not self._warned_of_fp16:
            self._warn_of_fp16()
        if found_inf is not None and float(found_inf) != 0.0:
            self._last = StepResult(False, None, None, "GradScaler found an inf or nan")
            return loss
        stack.grad_scaler = None if scale is None else AmpLossScale(scale)
        self._last = stack.unhooked_step()
        return loss

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """Whether ``GradScaler.step`` leaves dividing by the loss scale to :meth:`step`, which does
        it in FP32. torch divides gradients in place, but not those of float16."""
        return any(_is_fp16(param) for _, param in iter_slots(self.param_groups))

    def _warn_of_fp16(self) -> None:
        self._warned_of_fp16 = True
        if any(_is_fp16(param) for _, param in iter_slots(self.param_groups)):
            warn(
                "float16 parameters are stepped without a loss scale, and small gradients are lost "
                "in float16: use torch.amp.GradScaler (scaler.scale(loss).backward(), "
                "scaler.step(optimizer), scaler.update()), or bfloat16"
            )

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As torch's; also forgets work that was begun on the gradients."""
        if self._stack is None:
            super().zero_grad(set_to_none)
        else:
            self._stack.zero_grad(set_to_none)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As torch's. Where it is refused, nothing is changed.

        Raises:
            TypeError, ValueError: what is wrong with a parameter or setting.
        """
        with added_whole(self):
            for group in self.arranged(param_group):
                if self._stack is None:
                    super().add_param_group(group)
                    self._check_settings(self.param_groups[-1])
                else:
                    self._stack.add_param_group(group)

    def _check_settings(self, group: dict[str, Any]) -> None:
        self._rule.check_settings({**self._rule.defaults, **group})

    def forget_groups(self, count: int) -> None:
        """Take back groups that were added after the first ``count``."""
        if self._stack is None:
            del self.param_groups[count:]
        else:
            self._stack.forget_groups(count)

    def arranged(self, group: dict[str, Any]) -> list[dict[str, Any]]:
        """A group as it is given, as the groups that it becomes."""
        return [group]

    # -- state ------------------------------------------------------------------------------------

    @property  # type: ignore[override]
    def state(self) -> SlotStateView:
        """The state of every parameter; looking at it builds the stack."""
        return self.stack.state

    @state.setter
    def state(self, value: Mapping[Tensor, dict[str, Any]]) -> None:
        if value or self._stack is not None:  # torch's constructor begins with none
            self.stack.state = value

    def state_dict(self) -> dict[str, Any]:
        """As torch's: without state before the first step (or look at :attr:`state`)."""
        if self._stack is None:
            return {"state": {}, "param_groups": plain_groups(self.param_groups)}
        for before in self._optimizer_state_dict_pre_hooks.values():
            before(self)
        self._stack.grad_scaler = None  # a GradScaler saves itself
        result = self._stack.state_dict()
        for after in self._optimizer_state_dict_post_hooks.values():
            hooked = after(self, result)
            result = result if hooked is None else hooked
        return result

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what :meth:`state_dict` made, by name where both have names, else by position. A
        state dict without state is one from before the first step: state begins anew from the
        model's weights.

        Raises:
            ValueError: it does not fit, naming the parameter; nothing was loaded.
        """
        check_form(state_dict)
        state_dict = dict(state_dict)
        for before in self._optimizer_load_state_dict_pre_hooks.values():
            hooked = before(self, state_dict)
            state_dict = state_dict if hooked is None else hooked
        check_form(state_dict)
        if state_dict["state"]:
            self.stack.load_state_dict(state_dict)
        else:
            self._begin_anew(state_dict["param_groups"])
        for after in self._optimizer_load_state_dict_post_hooks.values():
            after(self)

    def _begin_anew(self, saved: list[dict[str, Any]]) -> None:
        """Take settings, and have no state."""
        if self._stack is not None:
            self._stack.step_mark.check_lent("load_state_dict")
        match = matched_groups(self.param_groups, saved, self._check_settings)
        if self._stack is not None:
            self._stack.early_work.stop()
        self._stack = self._last = None
        match.write_settings(self.param_groups)

    # -- copies -----------------------------------------------------------------------------------

    def __getstate__(self) -> dict[str, Any]:
        """For pickle and ``copy.deepcopy``, as torch's: the parameters are part of it, so an
        optimizer that is copied together with its model stays that model's. Hooks are not."""
        groups = [with_names(group) for group in self.param_groups]
        saved = None if self._stack is None else self._stack.state_dict()
        return {
            "hyperparameters": self._hyperparameters,
            "defaults": self.defaults,
            "settings": self._settings,
            "param_groups": groups,
            "saved": saved,
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        StackOptimizer.__init__(
            self, state["param_groups"], state["hyperparameters"], state["settings"]
        )
        self.defaults.update(state["defaults"])
        if state["saved"] is not None:
            self.stack.load_state_dict(state["saved"])


def _is_fp16(param: Tensor) -> bool:
    return param.requires_grad and param.dtype == torch.float16


def _device_of(groups: list[dict[str, Any]]) -> torch.device:
    params = (param for _, param in iter_slots(groups))
    return next((local_tensor(param).device for param in params), torch.device("cpu"))


def _container(groups: list[dict[str, Any]]) -> nn.Module:
    """The parameters as a module, for the planner."""
    container = nn.Module()
    for index, (_, param) in enumerate(iter_slots(groups)):
        held = (
            param if isinstance(param, nn.Parameter) else nn.Parameter(param.detach())
        )
        container.register_parameter(f"param{index}", held)
    return container
