"""StackOptimizer: base of optimizer classes with torch's signature, ``cls(params, **settings)``.

Settings that are not hyperparameters of the optimizer's rule become an OptimizerConfig.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch._compile import _disable_dynamo

from mp_optim.config import OptimizerConfig
from mp_optim.config.rules import RULES
from mp_optim.config.setting_checks import nearest, plain_setting
from mp_optim.config.state_forms import NO_REMAINDER
from mp_optim.core import ParamGroups, Slot, group_settings, iter_slots, local_tensor, with_names
from mp_optim.core.identity import SharedSettings
from mp_optim.core.keyed_optimizer import Closure, SlotKeyedOptimizer
from mp_optim.core.quantized import FLOAT8_DTYPES
from mp_optim.core.slot_state import State
from mp_optim.core.state_dict import checked_match, plain_groups
from mp_optim.factory.build import (
    StackRequest,
    construction_of,
    container_of,
    inner_optimizer,
    rule_of,
    set_up_host,
    settings_of,
)
from mp_optim.factory.host_memory_check import check_host_memory
from mp_optim.factory.offload_fraction import with_chosen_fraction
from mp_optim.host.calls import in_own_modes, warn
from mp_optim.host.host_memory import same_values
from mp_optim.kernels import check_serves
from mp_optim.kernels.selection import warn_of_missing_kernels
from mp_optim.mixed_precision import (
    MegatronGradScaler,
    MegatronOptimizer,
    StepResult,
    WrappedOptimizer,
)
from mp_optim.mixed_precision.grad_scaler import ConstantGradScaler
from mp_optim.mixed_precision.step import take_step
from mp_optim.optimizers.settings import config_of
from mp_optim.param_groups.overrides import keys_of_patterns, split_group
from mp_optim.process_groups.process_groups import ProcessGroups
from mp_optim.rules.rule_optimizer import RuleOptimizer, executor_of

_TRAINED = (torch.bfloat16, torch.float16, torch.float32, *FLOAT8_DTYPES)
_FP16 = (
    "float16 parameters are stepped without a loss scale, and small gradients underflow: "
    "use torch.amp.GradScaler (scaler.scale(loss).backward(), scaler.step(optimizer), "
    "scaler.update()), or bfloat16"
)


class StackOptimizer(WrappedOptimizer):
    """Base of the optimizer classes: a mixed-precision stack with torch's optimizer interface.

    Parameters may be any mix of 16-bit and FP32. Only a ``GradScaler`` scales the loss.

    The first step or the first read of state builds the executor and the main params. Until then
    parameters may be replaced by ``fully_shard``, by accelerate or by ``model.to(...)``. With
    ``release_gradients`` the constructor builds the executor and the main params.

    Args:
        params: parameters, named parameters or param groups, of any mix of bfloat16, float16 and
            float32.
        defaults: hyperparameters of the rule, by name.
        settings: values of :class:`~mp_optim.optimizers.settings.StackSettings`, by name.

    Raises:
        TypeError: a setting is unknown.
        ValueError: a setting is out of range, contradicts another setting, or has no effect.
    """

    rule = "adam"
    last_step: StepResult | None = None
    """Result of the last step: whether the step was taken, and the gradient norm before clipping.
    None before the first step."""
    _own_scaler: MegatronGradScaler | None = None

    def __init__(
        self, params: Iterable[Any], defaults: dict[str, Any], settings: Mapping[str, Any]
    ) -> None:
        self._warned_of_fp16 = self._is_begun = False
        self._found_inf: Tensor | None = None
        self._patched_step: Any = None
        # Defaults are plain values, because callers build copies by type(optimizer)(params,
        # **defaults).
        defaults = {key: plain_setting(settings.get(key, defaults[key])) for key in defaults}
        settings = {key: value for key, value in settings.items() if key not in defaults}
        self._given_settings = settings
        self._overrides = keys_of_patterns(settings.get("overrides") or {}, self.rule)
        self.process_groups = ProcessGroups()
        config = config_of(self.rule, settings, [*inspect.signature(type(self)).parameters][1:])
        given = {**construction_of(config), **RULES[self.rule].fixed, **defaults}
        self._empty = RuleOptimizer(rule_of(config), [{"params": []}], **given)
        """An optimizer of the same rule without parameters. It checks settings before the executor
        is built."""
        # Remember the names, because a wrapper such as timm's Lookahead adds entries to
        # ``defaults`` later.
        self._of_rule = tuple(defaults)
        # Call the constructor of MegatronOptimizer, because the constructor of WrappedOptimizer
        # would build the executor now.
        MegatronOptimizer.__init__(self, params, defaults, config, None)
        named = [
            (name, param)
            for group in self.param_groups
            for name, param in zip(group.get("param_names", ()), group["params"], strict=False)
        ]
        for key in self._overrides:
            if not any(key.matches(param, name) for name, param in named):
                pattern = "|".join(key.name)
                hint = nearest(pattern, [name for name, _ in named])
                raise ValueError(
                    f"overrides[{pattern!r}]: no parameter has such a name{hint}; correct the "
                    "pattern"
                )
        warn_of_missing_kernels(config.fused_backend, self.rule, self.param_groups)
        if config.release_gradients:
            # Hooks on parameters must be registered before the first backward, or its gradients are
            # missed.
            self._build()

    # -- deferred construction --------------------------------------------------------------------

    @property
    def stack(self) -> StackOptimizer:
        """This optimizer, with executor and main params. The first access builds both.

        Raises:
            TypeError: the dtype of a parameter is not supported; the message names the parameter.
        """
        if not self._is_built:
            self._build()
        return self

    @in_own_modes
    def _build(self) -> None:
        self.step_mark.check_lent("step or state")
        check_serves(self.config.fused_backend, self.device)
        set_up_host(self.config)
        container = container_of(self.param_groups)
        request = StackRequest(self.config, [container], {}, self.process_groups)
        if self._given_settings.get("offload") == "auto":
            asked = replace(self.config, optimizer_offload_fraction="auto")
            self.config = with_chosen_fraction(replace(request, config=asked))
        request = replace(request, config=self.config, param_groups=self.param_groups)
        check_host_memory(request, is_class=True)
        groups = [with_names(group) for group in self.param_groups]
        settings = {**settings_of(self.config), **self._hyperparameters}
        super().lists_are_known()
        try:
            inner = inner_optimizer(self.config, groups, settings)
            executor = executor_of(inner)
            for group, built in zip(self.param_groups, executor.param_groups, strict=True):
                group.update({**group_settings(built), **group})
            self._build_engine(inner, executor)
        except BaseException:
            self.drop_engine()
            raise

    def keep_loss_scale(self, scaler: MegatronGradScaler | None) -> None:
        """Scale the loss by a scaler that belongs to this optimizer. State dicts contain the
        scaler's state.

        Args:
            scaler: the loss scale of all steps without a ``GradScaler``; None for 1.
        """
        self.grad_scaler = self._own_scaler = scaler

    def drop_engine(self) -> None:
        """Free main params and state. The next step or load builds them again."""
        for scheduler in self.backward_schedulers:
            scheduler.stop()
        vars(self).pop("engine", None)
        self.step_mark.invalidate_plans()
        self.groups_below, self.shared_settings = (), SharedSettings()
        self._sizes.clear()
        self.step_mark.clear()
        self._is_begun = False
        self._begin(self.config)

    @staticmethod
    def check_param(name: str, param: Tensor, config: OptimizerConfig) -> None:
        if param.dtype not in _TRAINED:
            raise TypeError(
                f"{name} is {param.dtype}: parameters must be bfloat16, float16, float32 or "
                "float8; convert the model, or freeze the parameter"
            )
        has_no_main = config.param_remainder_bits == NO_REMAINDER.name
        if param.dtype == torch.float16 and has_no_main and config.keeps_remainders:
            raise TypeError(
                f"{name} is float16: main_params='none' supports only bfloat16, because float16 "
                "has too few exponent bits for rounded steps; convert the model to bfloat16, or "
                "leave main_params='fp32'"
            )

    @property
    def _hyperparameters(self) -> dict[str, Any]:
        """The rule's entries of ``defaults``, without entries that wrappers such as Lookahead
        add."""
        return {name: self.defaults[name] for name in self._of_rule}

    # -- stepping ---------------------------------------------------------------------------------

    # torch.compile must not trace the first step, because the trace would keep the objects that the
    # step builds.
    @_disable_dynamo
    def step(self, closure: Closure | None = None) -> Any:
        """Take one optimizer step.

        If a gradient holds an inf or nan, parameters and state are unchanged; :attr:`last_step` and
        a warning report it.

        Args:
            closure: function that evaluates the model and returns the loss; called with gradients
                enabled.

        Returns:
            The closure's loss; None without a closure.

        Raises:
            TypeError: the dtype of a parameter is not supported; raised by the first step.
            ValueError: a hyperparameter is out of range; no parameter is stepped.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self.begin_step()
        self.last_step = take_step(self)
        return loss

    def begin_step(self) -> None:
        """Prepare a step: take the loss scale of a ``GradScaler``, check that param groups were not
        edited, and build the executor at the first step."""
        scale = vars(self).get("grad_scale")
        if self._found_inf is None and not self._warned_of_fp16:
            self._warned_of_fp16 = True
            if self._own_scaler is None and self._step_supports_amp_scaling:
                warn(_FP16)
        self.grad_scaler = self._own_scaler if scale is None else AmpLossScale(scale)
        if [len(group["params"]) for group in self._live_groups] != self._sizes:
            self.check_lists()
        if "engine" not in vars(self):
            self._build()
        self._is_begun = True

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """True if ``GradScaler.step`` leaves the division by the loss scale to :meth:`step`.

        :meth:`step` divides the gradients of float16 parameters in FP32, because a ``GradScaler``
        cannot unscale float16 gradients in place.
        """
        trained = (param for _, param in iter_slots(self.param_groups) if param.requires_grad)
        return any(param.dtype == torch.float16 for param in trained)

    @property
    def found_inf(self) -> Tensor | None:
        """Tensor of one element that is not 0 if gradients hold an inf or nan; None without a
        ``GradScaler``. A ``GradScaler`` sets this attribute for one step."""
        return self._found_inf

    @found_inf.setter
    def found_inf(self, value: Tensor | None) -> None:
        del self.found_inf
        self._found_inf = value
        if value is not None and float(value) != 0.0:
            # Replace ``step`` instead of returning early from it. Accelerate patches ``step`` and
            # counts each call of its patch as a step that was taken.
            self._patched_step = vars(self).get("step")
            vars(self)["step"] = self._skip

    @found_inf.deleter
    def found_inf(self) -> None:
        if self._found_inf is not None and vars(self).get("step") == self._skip:
            del vars(self)["step"]
            if self._patched_step is not None:
                vars(self)["step"] = self._patched_step
        self._found_inf = self._patched_step = None

    def _skip(self, closure: Closure | None = None) -> None:
        """Replace :meth:`step` for one call, after a ``GradScaler`` found an inf or nan."""
        self.last_step = StepResult(False, None, None, "GradScaler found an inf or nan")

    # -- groups -----------------------------------------------------------------------------------

    @property
    def param_groups(self) -> ParamGroups:
        """The current param groups. Until the first step or load, callers may edit or replace
        the groups, even after a read of the state."""
        return self._live_groups

    @param_groups.setter
    def param_groups(self, groups: ParamGroups) -> None:
        if self._is_built and not self._is_begun and groups is not self._live_groups:
            self.drop_engine()
        SlotKeyedOptimizer.param_groups.__set__(self, groups)  # type: ignore[attr-defined]

    def check_lists(self) -> None:
        """Raise ValueError if parameter lists were edited after the first step.

        If lists were edited before the first step, discard an executor that was built to read the
        state. The next step builds another executor.
        """
        if self._is_built and not self._is_begun and self.has_edited_lists():
            self.drop_engine()
        super().check_lists()

    def lists_are_known(self) -> None:
        """Record the current parameter lists, if the executor is built."""
        if self._is_built:
            super().lists_are_known()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a param group, or several groups if the rule splits the given group. An error changes
        nothing.

        Args:
            param_group: ``params`` and settings; missing settings have the optimizer's defaults.

        Raises:
            TypeError: the dtype of a parameter is not supported.
            ValueError: a setting is out of range, or a parameter is in another group already.
        """
        with self.added_whole():
            for group in self.arranged(param_group):
                if self._is_built:
                    super().add_param_group(group)
                else:
                    every = group_settings(self._empty.param_groups[0]) | self._hyperparameters
                    SlotKeyedOptimizer.add_param_group(self, {**every, **group})
                    self.check_settings(self.param_groups[-1])

    def check_settings(self, group: dict[str, Any]) -> None:
        self._empty.check_settings({**self._empty.defaults, **group})

    def forget_groups(self, count: int) -> None:
        if self._is_built:
            super().forget_groups(count)
        else:
            SlotKeyedOptimizer.forget_groups(self, count)

    def arranged(self, group: dict[str, Any]) -> list[dict[str, Any]]:
        """Split a caller's param group by ``overrides``, and return the resulting groups."""
        return split_group(group, self._overrides) if self._overrides else [group]

    # -- state ------------------------------------------------------------------------------------

    def reset_states(self, slots: Sequence[Slot]) -> None:
        if self._is_built:  # An optimizer without an executor has no state to reset.
            super().reset_states(slots)

    def assign_states(self, states: Mapping[Slot, State], *, whole: bool) -> None:
        # Lightning reads a new optimizer's state and assigns the same values again to move the
        # state to a device. Such an assignment must not count as a load, which would fix the param
        # groups.
        has_new = self._is_begun
        for slot, given in states.items():
            mine = self.shown_state(slot)
            has_new = has_new or not all(_is_same(mine.get(key), given[key]) for key in given)
        super().assign_states(states, whole=whole)
        self._is_begun = has_new

    def load_slot_state(self, slot: Slot, state: State) -> None:
        super().load_slot_state(slot, state)
        self._is_begun = True

    def state_dict(
        self, is_loading: bool = False, *, full_precision: bool = False
    ) -> dict[str, Any]:
        """Return the state dict in torch's format.

        ``state`` is empty before the first step or the first read of :attr:`state`.

        Args:
            is_loading: accepted for compatibility with Megatron, without effect.
            full_precision: True to return FP32 copies of state that is stored in fewer bits.
        """
        if not self._is_built:
            self.step_mark.check_lent("state_dict")
            return {"state": {}, "param_groups": plain_groups(self.param_groups)}
        # A GradScaler saves its own scale, so the state dict must not have a second copy.
        self.grad_scaler = self._own_scaler
        return super().state_dict(is_loading, full_precision=full_precision)

    def drops_all_state(self, state_dict: Mapping[str, Any]) -> bool:
        """Reset this optimizer if a state dict was saved before the first step and so has no state.

        After a reset, the next step initializes state from the model's weights.

        Returns:
            True if the optimizer was reset.
        """
        self.grad_scaler = self._own_scaler
        if state_dict["state"]:
            self._is_begun = True
            return False
        match = checked_match(self.param_groups, state_dict["param_groups"], self.check_settings)
        self.last_step = None
        self.drop_engine()
        match.write_settings(self.param_groups)
        return True

    # -- copies -----------------------------------------------------------------------------------

    def __reduce_ex__(self, protocol: Any) -> Any:
        return object.__reduce_ex__(self, protocol)

    def __getstate__(self) -> dict[str, Any]:
        """Return parameters, settings and state for pickle and ``copy.deepcopy``, without hooks.

        The result includes the parameters. So an optimizer that is copied together with its model
        steps the copied model.
        """
        groups = [with_names(group) for group in self.param_groups]
        saved = self.state_dict() if self._is_built else None
        return {
            "hyperparameters": self._hyperparameters,
            "defaults": self.defaults,
            "settings": self._given_settings,
            "param_groups": groups,
            "saved": saved,
            "scaler": self._own_scaler,
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        # Call the constructor without overrides: these groups are split already, and a schedule may
        # have changed their settings. The overrides are put back below, for groups that are added
        # later.
        settings = {key: value for key, value in state["settings"].items() if key != "overrides"}
        StackOptimizer.__init__(self, state["param_groups"], state["hyperparameters"], settings)
        self._given_settings = state["settings"]
        self._overrides = keys_of_patterns(state["settings"].get("overrides") or {}, self.rule)
        self.defaults.update(state["defaults"])
        self.keep_loss_scale(state["scaler"])
        if state["saved"] is not None:
            self.load_state_dict(state["saved"])


def _is_same(mine: Any, given: Any) -> bool:
    """True if two values of a slot's state are equal. The devices of tensors may differ."""
    if not isinstance(given, Tensor) or not isinstance(mine, Tensor):
        return type(given) is type(mine) and bool(given == mine)
    one, other = local_tensor(mine), local_tensor(given)
    return one.dtype == other.dtype and same_values(other.to(one.device), one)


class AmpLossScale(ConstantGradScaler):
    """Loss scale of a ``GradScaler`` for one step. Only the ``GradScaler`` updates the scale.

    Args:
        scale: FP32 tensor of one element on any device.
    """

    def __init__(self, scale: Tensor) -> None:
        # 1.0 is a placeholder on the host, which the next line replaces. Building it on the scale's
        # device would copy, and so synchronize.
        super().__init__(1.0)
        self._scale = scale.detach().reshape(1)

    def may_shrink(self, scale: float) -> bool:
        return True
